"""The host side of Qwen3-Omni's talker: embeddings in, as they come, and frames of codes out."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from sgl_omni.engine.inputs import begin_input, end_input, extend_input
from sgl_omni.engine.interface import Payload
from sgl_omni.engine.request import Request
from sgl_omni.engine.task import InputSpec, Task, parse_sampling, whole_number
from sgl_omni.models.qwen3_omni.spec import TalkerSpec


class TalkerTask(Task):
    """``prompt_embeddings`` [length, hidden]; ``added_embeddings`` [n, hidden] are the text, a row an output.

    With ``input_open`` more text may follow. Once it has ended, padding is added. Results are arrays ``codes`` int16
    [frames, num_codes], each frame as soon as it is there.
    """

    takes_inputs = True

    def __init__(self, spec: TalkerSpec, padding: Tensor, *, default_max_frames: int = 4096) -> None:
        """``padding`` [hidden], of the inputs' kind; where it lies, what arrives lies too."""
        self._spec = spec
        self._padding = padding
        self._default_max_frames = default_max_frames
        self._inputs = InputSpec(
            vocab_sizes=(spec.decoder.vocab_size,) + (spec.predictor.vocab_size,) * (spec.num_codes - 1),
            hidden_size=spec.decoder.hidden_size,
            axes=spec.decoder.rope.num_axes,
        )

    def parse(self, request_id: str, payload: Payload) -> Request:
        return Request(
            request_id,
            self._inputs.prompt(payload),
            max_outputs=whole_number(payload, "max_frames", self._default_max_frames),
            sampling=parse_sampling(payload),
            inputs=begin_input(payload, self._padding, self._inputs),
        )

    def extend(self, request: Request, payload: Payload) -> None:
        extend_input(request, payload, self._inputs)

    def finish_input(self, request: Request) -> None:
        end_input(request)

    def take(self, request: Request, row: list[int]) -> bool:
        if row[0] == self._spec.eos_id:
            request.finish_reason = "stop"
            return True
        request.outputs.append(row)
        if request.is_at_limit:
            request.finish_reason = "length"
        return request.finish_reason is not None

    def chunk(self, request: Request) -> Payload | None:
        if request.sent == len(request.outputs):
            return None
        new = request.outputs.array(request.sent).astype(np.int16)
        request.sent = len(request.outputs)
        return {"codes": new}

    def result(self, request: Request) -> Payload:
        return {
            "finish_reason": request.finish_reason,
            "input_tokens": request.prompt_length,
            "output_tokens": len(request.outputs),
        }
