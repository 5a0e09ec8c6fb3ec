"""What the talker is given before its first frame, and what is added to its outputs.

A prompt is a sum of two tracks, text and codes, that run side by side::

    text    instruction  role  pad ... pad  begin  ...
    codes       -         -    language, speaker, pad  ...

Of the text that is to be spoken, a preset or described voice sees all at once. A cloned voice sees one token a frame:
the first here, the others as they are added to the outputs. With a recording whose words are known, its frames run
along with the text of both, which is then one text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_omni.models.qwen3_tts.talker import TalkerModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Speech:
    """What is to be spoken, and how. All ids are of the text, but ``speaker_id`` and ``language_id``, which are codes.

    ``speaker_embedding`` [hidden] in place of a speaker's id; ``reference_codes`` int64 [frames, codes] and
    ``reference_ids`` where a recording and its words are given. ``whole_text``: all of the text before the first
    frame, instead of a token a frame.
    """

    role_ids: list[int]
    text_ids: list[int]
    instruction_ids: list[int]
    language_id: int | None = None
    speaker_id: int | None = None
    speaker_embedding: Tensor | None = None
    reference_ids: list[int] | None = None
    reference_codes: Tensor | None = None
    whole_text: bool = True


@dataclass(frozen=True, slots=True)
class SpeechPrompt:
    """``rows`` [n, hidden] before the first frame, ``added`` [m, hidden] to the outputs, one each; then padding."""

    rows: Tensor
    added: Tensor


class PromptBuilder:
    """Holds the talker's tables and the marks that frame spoken text."""

    @torch.inference_mode()
    def __init__(self, model: TalkerModel) -> None:
        self._model = model
        spec = model.spec
        self._begin, self._end, self.padding = model.embed_text([spec.tts_bos_id, spec.tts_eos_id, spec.tts_pad_id])

    @torch.inference_mode()
    def build(self, speech: Speech) -> SpeechPrompt:
        model, spec = self._model, self._model.spec
        codes = self._voice(speech)
        marks = torch.cat([self.padding.expand(len(codes) - 2, -1), self._begin[None]])
        start = [model.embed_text(speech.instruction_ids + speech.role_ids), marks + codes[:-1]]
        text = model.embed_text((speech.reference_ids or []) + speech.text_ids)
        text = torch.cat([text, self._end[None]])
        first_code = codes[-1:]
        if speech.reference_codes is not None:
            frames = torch.cat([first_code, model.embed_ids(speech.reference_codes.to(model.device))])
            return self._side_by_side(start, text, frames)
        if not speech.whole_text:
            return self._side_by_side(start, text, first_code)
        silent = model.embed_codec([spec.pad_id])
        rows = [*start, text + silent, self.padding + first_code]
        return SpeechPrompt(torch.cat(rows), text[:0])

    def _side_by_side(self, start: list[Tensor], text: Tensor, codes: Tensor) -> SpeechPrompt:
        """Text along with codes for as long as there are codes; the rest of it is added to the outputs."""
        missing = len(codes) - len(text)
        if missing > 0:
            text = torch.cat([text, self.padding.expand(missing, -1)])
        return SpeechPrompt(torch.cat([*start, text[: len(codes)] + codes]), text[len(codes) :])

    def _voice(self, speech: Speech) -> Tensor:
        """The codes that say language and speaker, up to the one that begins the audio: [n, hidden]."""
        model, spec = self._model, self._model.spec
        if speech.language_id is None:
            ids = [spec.nothink_id, spec.think_bos_id, spec.think_eos_id]
        else:
            ids = [spec.think_id, spec.think_bos_id, speech.language_id, spec.think_eos_id]
        parts = [model.embed_codec(ids)]
        if speech.speaker_embedding is not None:
            parts.append(speech.speaker_embedding.to(parts[0])[None])
        elif speech.speaker_id is not None:
            parts.append(model.embed_codec([speech.speaker_id]))
        return torch.cat([*parts, model.embed_codec([spec.pad_id, spec.bos_id])])
