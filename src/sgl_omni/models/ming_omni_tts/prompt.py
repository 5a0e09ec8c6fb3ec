"""The prompt of Ming-Omni-TTS. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from sgl_omni.errors import InvalidRequest
from sgl_omni.json_files import parse_json
from sgl_omni.text.tokenizer import TextTokenizer

_TASK = "Please generate speech based on the following description.\n"
_BACKGROUND = ("Genre", "Mood", "Instrument", "Theme", "ENV", "SNR")
_CAPTION = ("方言", "风格", "语速", "基频", "音量", "情感")
"""Dialect, style, tempo, pitch, loudness, emotion: what a caption may say of a voice, beside its background."""

_STYLE = "风格"


@dataclass(frozen=True, slots=True)
class Marks:
    """Pieces of the prompt that the language model decides; each is a text of its own for the tokenizer.

    ``speaker``: what begins a speaker's vector, holds its place, and ends it.
    """

    user: tuple[str, ...]
    speaker: tuple[str, str, str]
    answer: tuple[str, ...]

    @property
    def tokens(self) -> tuple[str, ...]:
        """Of audio, of an end, and of a speaker's beginning and place."""
        return ("<audio>", "<|endoftext|>", *self.speaker[:2])


DENSE = Marks(
    user=("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n", "<|im_start|>user\n"),
    speaker=("<|vision_start|>", "<|vision_pad|>", "<|vision_end|>\n"),
    answer=("<|im_end|>\n", "<|im_start|>assistant\n"),
)
EXPERTS = Marks(
    user=("<role>HUMAN</role>",),
    speaker=("<spk>", "<audioPatch>", "</spk>\n"),
    answer=("<role>ASSISTANT</role>",),
)


@dataclass(frozen=True, slots=True)
class Written:
    """``speaker_at``: the place of the speaker's vector, or -1 where the prompt has none."""

    ids: list[int]
    speaker_at: int


class PromptWriter:
    def __init__(self, tokenizer: TextTokenizer, marks: Marks = DENSE) -> None:
        """Raises ``StartupError`` where the tokenizer lacks one of the prompt's marks."""
        self._tokenizer = tokenizer
        self._marks = marks
        self._audio, self._end, *self._speaker = (tokenizer.id_of(token) for token in marks.tokens)

    def write(
        self, text: str, *, spoken: str | None = None, hears_speaker: bool = False, instructions: str | None = None
    ) -> Written:
        """``spoken``: what is said in the reference, whose latents follow the prompt; ``hears_speaker``: its speaker's
        vector is in the prompt.

        Without either the prompt names a speaker that is not told. Raises ``InvalidRequest`` for instructions that
        are JSON and no caption.
        """
        told = caption(instructions) if instructions else None
        marks, encode, plain = self._marks, self._tokenizer.encode, self._tokenizer.encode_plain
        ids = [id for piece in (*marks.user, _TASK) for id in encode(piece)]
        speaker_at = -1
        if hears_speaker or spoken is None:
            ids += encode("  speaker_1:")
            speaker_at = len(ids) + 1
            ids += [*self._speaker, *encode(marks.speaker[2])]
        ids += [*encode(" Text input:\n"), *(plain(spoken) if spoken else ()), *plain(text)]
        ids += [id for piece in marks.answer for id in encode(piece)]
        if told is not None:
            ids += [*plain(told), self._end]
        return Written([*ids, self._audio], speaker_at)


def caption(instructions: str) -> str:
    """What the model was trained to be told: JSON with one speaker. A plain text is the voice's style; a JSON object
    says its fields, as ``{"情感": "高兴"}``."""
    told = _object(instructions)
    speaker: dict[str, Any] = {"序号": 1, "说话人": "speaker_1"}
    speaker |= {name: told.pop(name, None) for name in _CAPTION}
    speaker["BGM"] = told.pop("BGM", dict.fromkeys(_BACKGROUND))
    speaker["IP"] = told.pop("IP", None)
    if told:
        raise InvalidRequest(
            f"instructions have unknown fields {', '.join(sorted(told))}; known are {', '.join(_CAPTION)}, BGM and IP",
            param="instructions",
        )
    background = speaker["BGM"]
    if isinstance(background, dict) and background.get("SNR") is not None:
        order = ("序号", "说话人", "BGM", "情感", "方言", "风格", "语速", "基频", "音量", "IP")
        speaker = {name: speaker[name] for name in order}
    return json.dumps({"audio_sequence": [speaker]}, ensure_ascii=False)


def _object(instructions: str) -> dict[str, Any]:
    if not instructions.lstrip().startswith("{"):
        return {_STYLE: instructions.strip()}
    try:
        found = parse_json(instructions)
    except ValueError as error:
        raise InvalidRequest(f"instructions are no JSON object: {error}", param="instructions") from error
    return dict(found)
