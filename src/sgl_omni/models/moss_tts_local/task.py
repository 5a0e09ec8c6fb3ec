"""The host side of MOSS-TTS-Local: prompts of text and reference frames in, frames of codes out."""

from __future__ import annotations

from sgl_omni.engine.request import Request
from sgl_omni.engine.task import HandOver, InputSpec
from sgl_omni.models.moss_tts_local.spec import MossSpec
from sgl_omni.models.speech_rows import SpeechRowsTask


class MossTask(SpeechRowsTask):
    """The row that says the end ends the audio with the frame before it."""

    def __init__(self, spec: MossSpec, *, default_max_frames: int = 4096, hand_over: HandOver | None = None) -> None:
        inputs = InputSpec(
            vocab_sizes=(spec.decoder.vocab_size,) + (spec.codebook_size + 1,) * spec.num_codebooks,
            hidden_size=spec.decoder.hidden_size,
        )
        super().__init__(
            inputs,
            end_id=spec.end_id,
            max_positions=spec.decoder.max_positions,
            default_max_frames=default_max_frames,
            hand_over=hand_over,
        )

    def take(self, request: Request, row: list[int]) -> bool:
        if row[0] == self._end_id:
            request.finish_reason = "stop"
            return True
        request.outputs.append(row)
        if request.is_at_limit:
            request.finish_reason = "length"
        return request.finish_reason is not None
