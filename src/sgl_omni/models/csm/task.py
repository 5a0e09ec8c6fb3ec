"""The host side of CSM: prompts of text and frames in, frames of codes out."""

from __future__ import annotations

from sgl_omni.engine.request import Request
from sgl_omni.engine.task import HandOver, InputSpec
from sgl_omni.models.csm.spec import CsmSpec
from sgl_omni.models.speech_rows import SpeechRowsTask


class CsmTask(SpeechRowsTask):
    """The frame whose codes all mean the end is not spoken."""

    def __init__(self, spec: CsmSpec, *, default_max_frames: int = 1125, hand_over: HandOver | None = None) -> None:
        inputs = InputSpec(
            vocab_sizes=(spec.text_vocab_size,) + (spec.vocab_size,) * spec.num_codebooks,
            hidden_size=spec.backbone.hidden_size,
        )
        super().__init__(
            inputs,
            end_id=spec.audio_end_id,
            max_positions=spec.backbone.max_positions,
            default_max_frames=default_max_frames,
            hand_over=hand_over,
        )
        self._end_code = spec.end_code

    def take(self, request: Request, row: list[int]) -> bool:
        ends = row[0] == self._end_id
        if not (ends and row[-1] == self._end_code):
            request.outputs.append(row)
        if ends:
            request.finish_reason = "stop"
        elif request.is_at_limit:
            request.finish_reason = "length"
        return request.finish_reason is not None
