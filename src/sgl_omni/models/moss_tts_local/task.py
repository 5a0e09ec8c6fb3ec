"""The host side of MOSS-TTS-Local: prompts of text and reference frames in, frames of codes out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgl_omni.engine.interface import Payload
from sgl_omni.engine.request import Request
from sgl_omni.engine.task import HandOver, InputSpec, Task, frames_asked, number, parse_sampling
from sgl_omni.models.moss_tts_local.spec import MossSpec


@dataclass(frozen=True, slots=True)
class _Options:
    speed: float


class MossTask(Task):
    """``prompt_ids`` [length, 1 + codebooks]; chunks are ``codes`` int16 [frames, codebooks] and the asked ``speed``.

    The row that says the end ends the audio with the frame before it.
    """

    def __init__(self, spec: MossSpec, *, default_max_frames: int = 4096, hand_over: HandOver | None = None) -> None:
        self._spec = spec
        self._default_max_frames = default_max_frames
        self._hand_over = hand_over or HandOver()
        self._inputs = InputSpec(
            vocab_sizes=(spec.decoder.vocab_size,) + (spec.codebook_size + 1,) * spec.num_codebooks,
            hidden_size=spec.decoder.hidden_size,
        )

    def parse(self, request_id: str, payload: Payload) -> Request:
        prompt, positions = self._inputs.prompt(payload), self._spec.decoder.max_positions
        room = None if positions is None else positions - len(prompt)
        frames = frames_asked(payload, self._default_max_frames, room)
        return Request(
            request_id,
            prompt,
            max_outputs=frames,
            sampling=parse_sampling(payload),
            due=self._hand_over.first,
            task=_Options(number(payload, "speed", 1.0)),
        )

    def take(self, request: Request, row: list[int]) -> bool:
        if row[0] == self._spec.end_id:
            request.finish_reason = "stop"
            return True
        request.outputs.append(row)
        if request.is_at_limit:
            request.finish_reason = "length"
        return request.finish_reason is not None

    def quiet_rows(self, request: Request) -> int:
        return min(request.max_outputs, request.due) - 1 - len(request.outputs)

    def ends(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        return rows[:, 0] == self._spec.end_id

    def chunk(self, request: Request) -> Payload | None:
        if request.sent == len(request.outputs):
            return None
        new = [row[1:] for row in request.outputs[request.sent :]]
        request.sent = len(request.outputs)
        request.due = request.sent + self._hand_over.frames_after(request.sent)
        return {"codes": np.asarray(new, dtype=np.int16), "speed": request.task.speed}

    def result(self, request: Request) -> Payload:
        return {
            "finish_reason": request.finish_reason,
            "input_tokens": request.prompt_length,
            "output_tokens": len(request.outputs),
        }
