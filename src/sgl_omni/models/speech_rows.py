"""The host side of models that choose a row a frame: a mark, which may say the end, and the frame's codes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sgl_omni.engine.interface import Payload
from sgl_omni.engine.request import Request
from sgl_omni.engine.task import HandOver, InputSpec, Task, frames_asked, number, parse_sampling


@dataclass(frozen=True, slots=True)
class _Options:
    speed: float


class SpeechRowsTask(Task):
    """``prompt_ids`` [length, 1 + codebooks]; chunks are ``codes`` int16 [frames, codebooks] and the asked ``speed``.

    What a row with the mark of the end does is the family's to say, in ``take``.
    """

    def __init__(
        self,
        inputs: InputSpec,
        *,
        end_id: int,
        max_positions: int | None,
        default_max_frames: int,
        hand_over: HandOver | None,
    ) -> None:
        self._inputs = inputs
        self._end_id = end_id
        self.end_ids = frozenset([end_id])
        self._max_positions = max_positions
        self._default_max_frames = default_max_frames
        self._hand_over = hand_over or HandOver()

    def parse(self, request_id: str, payload: Payload) -> Request:
        """Without ``max_frames`` a long prompt leaves less room for the audio."""
        prompt = self._inputs.prompt(payload)
        room = None if self._max_positions is None else self._max_positions - len(prompt)
        frames = frames_asked(payload, self._default_max_frames, room)
        return Request(
            request_id,
            prompt,
            max_outputs=frames,
            sampling=parse_sampling(payload),
            due=self._hand_over.first,
            task=_Options(number(payload, "speed", 1.0)),
        )

    def quiet_rows(self, request: Request) -> int:
        return request.max_outputs - 1 - len(request.outputs)

    def chunk(self, request: Request) -> Payload | None:
        if request.sent == len(request.outputs):
            return None
        new = request.outputs.array(request.sent)[:, 1:]
        request.sent = len(request.outputs)
        request.due = request.sent + self._hand_over.frames_after(request.sent)
        return {"codes": new.astype(np.int16), "speed": request.task.speed}

    def result(self, request: Request) -> Payload:
        return {
            "finish_reason": request.finish_reason,
            "input_tokens": request.prompt_length,
            "output_tokens": len(request.outputs),
        }
