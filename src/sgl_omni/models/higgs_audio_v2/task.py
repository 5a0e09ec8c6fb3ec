"""The host side of Higgs Audio v2: prompts with reference audio in, frames of codes out."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sgl_omni.engine.interface import Payload
from sgl_omni.engine.request import Prompt, Request
from sgl_omni.engine.task import InputSpec, Task, parse_sampling, whole_number
from sgl_omni.errors import InvalidRequest
from sgl_omni.models.higgs_audio_v2.spec import HiggsSpec


class HiggsTask(Task):
    """``prompt_ids`` [length] of text, in which placeholders stand for the rows of ``audio_rows`` [rows, codebooks].

    The prompt ends with the id that begins audio. Reference audio is in its delay pattern already. Results are
    arrays ``codes`` int16 [frames, codebooks]: codebook k of frame f lies in output row f + 1 + k, after a first row
    of begin ids. The row that brings an end id ends the audio with the frame before it. An id that no codec knows
    and that the model put inside the audio all the same becomes the codec's last. A request's ``frame_end`` is the
    first output with an end id in any column.
    """

    def __init__(self, spec: HiggsSpec, *, default_max_frames: int = 1024) -> None:
        self._spec = spec
        self._default_max_frames = default_max_frames
        self._text = InputSpec(vocab_sizes=(spec.decoder.vocab_size,), hidden_size=spec.decoder.hidden_size)
        self._audio = InputSpec(
            vocab_sizes=(spec.codebook_size,) * spec.num_codebooks, hidden_size=spec.decoder.hidden_size
        )

    def parse(self, request_id: str, payload: Payload) -> Request:
        frames = whole_number(payload, "max_frames", self._default_max_frames)
        if frames < 1:
            raise InvalidRequest(f"max_frames must be 1 or more, not {frames}", param="max_frames")
        return Request(
            request_id,
            Prompt(self._prompt_rows(payload)),
            max_outputs=frames + self._spec.num_codebooks,
            sampling=parse_sampling(payload),
        )

    def _prompt_rows(self, payload: Payload) -> Tensor:
        """int64 [length, 1 + codebooks]."""
        spec = self._spec
        text = self._text.prompt({"prompt_ids": payload.get("prompt_ids", [])}).rows
        if int(text[-1, 0]) != spec.audio_bos_id:
            raise InvalidRequest(
                f"the prompt must end with the id that begins audio, {spec.audio_bos_id}, not {int(text[-1, 0])}",
                param="prompt_ids",
            )
        places = (text[:, 0] == spec.placeholder) | (text[:, 0] == spec.delay_placeholder)
        given = payload.get("audio_rows")
        audio = None if given is None else self._audio.prompt({"prompt_ids": given}).rows
        count = 0 if audio is None else len(audio)
        if int(places.sum()) != count:
            raise InvalidRequest(
                f"the prompt has {int(places.sum())} places for audio rows, and {count} rows are given",
                param="audio_rows",
            )
        rows = torch.zeros(len(text), 1 + spec.num_codebooks, dtype=torch.int64)
        rows[:, :1] = text
        if audio is not None:
            rows[places, 1:] = audio
        return rows

    def take(self, request: Request, row: list[int]) -> bool:
        eos = self._spec.stream_eos_id
        if request.frame_end < 0 and eos in row[1:]:
            request.frame_end = len(request.outputs)
        request.outputs.append(row)
        end = request.frame_end
        if end >= 0 and (self._known(request) == end - 1 or set(row[1:]) == {eos}):
            request.finish_reason = "stop"
        elif request.is_at_limit:
            request.finish_reason = "length"
        return request.finish_reason is not None

    def chunk(self, request: Request) -> Payload | None:
        known, sent = self._known(request), request.sent
        if known <= sent:
            return None
        request.sent = known
        outputs = request.outputs[sent + 1 : known + self._spec.num_codebooks]
        rows = np.asarray([row[1:] for row in outputs], dtype=np.int16)
        diagonals = [rows[k : k + known - sent, k] for k in range(self._spec.num_codebooks)]
        return {"codes": np.stack(diagonals, 1).clip(0, self._spec.codec_size - 1)}

    def result(self, request: Request) -> Payload:
        return {
            "finish_reason": request.finish_reason,
            "input_tokens": request.prompt_length,
            "output_tokens": self._known(request),
        }

    def _known(self, request: Request) -> int:
        """Frames whose every codebook is among the outputs."""
        known = max(0, len(request.outputs) - self._spec.num_codebooks)
        end = request.frame_end
        return known if end < 0 else min(known, max(0, end - 1))
