"""The host side of Whisper's decoder: an encoder's output and a prompt in, tokens out."""

from __future__ import annotations

from sgl_omni.engine.interface import Payload
from sgl_omni.engine.request import Request
from sgl_omni.engine.task import InputSpec, TokenTask
from sgl_omni.errors import InvalidRequest
from sgl_omni.models.whisper.decoder import WhisperSpec


class WhisperTask(TokenTask):
    """A ``TokenTask`` whose payload also has ``encoder_states`` [frames, width], what the encoder made of the audio."""

    takes_inputs = False

    def __init__(self, spec: WhisperSpec) -> None:
        inputs = InputSpec(vocab_sizes=(spec.vocab_size,), hidden_size=spec.width)
        super().__init__(inputs, eos_ids=[spec.eos_id], default_max_new_tokens=spec.max_positions // 2)
        self._spec = spec
        self._states = inputs

    def parse(self, request_id: str, payload: Payload) -> Request:
        if payload.get("prompt_ids") is None:
            raise InvalidRequest("a prompt of ids is missing", param="prompt_ids")
        request = super().parse(request_id, payload)
        if request.inputs is not None:
            raise InvalidRequest("Whisper takes all of a request's input at once", param="input_open")
        source = self._states.finite_embeddings(payload.get("encoder_states"), "encoder_states")
        if not 1 <= len(source) <= self._spec.max_frames:
            raise InvalidRequest(
                f"encoder_states must have 1 to {self._spec.max_frames} frames, not {len(source)}",
                param="encoder_states",
            )
        request.source = source
        return request
