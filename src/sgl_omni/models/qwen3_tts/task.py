"""The host side of Qwen3-TTS's talker: prepared requests in, frames of codes out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sgl_omni.engine.inputs import ArrivingInput
from sgl_omni.engine.interface import Payload
from sgl_omni.engine.request import Prompt, Request
from sgl_omni.engine.task import Task, parse_sampling, whole_number
from sgl_omni.errors import InvalidRequest
from sgl_omni.models.qwen3_tts.facts import next_cut
from sgl_omni.models.qwen3_tts.prompt import PromptBuilder, Speech
from sgl_omni.models.qwen3_tts.spec import TalkerSpec


@dataclass(frozen=True, slots=True)
class _Voiced:
    """What the vocoder has to know, sent along with the first frames."""

    speed: float
    reference_codes: npt.NDArray[np.int16] | None


class TalkerTask(Task):
    """Takes what ``preprocess.SpeechPreprocessor`` makes of a request.

    Chunks are arrays ``codes`` int16 [frames, num_codes], cut as ``next_cut`` says. The first also has ``speed`` and,
    where the voice is cloned with its words, the recording's own frames as ``reference_codes``.
    """

    takes_inputs = True

    def __init__(self, spec: TalkerSpec, prompts: PromptBuilder) -> None:
        self._spec = spec
        self._prompts = prompts
        self.end_ids = frozenset([spec.eos_id])

    def parse(self, request_id: str, payload: Payload) -> Request:
        reference = payload.get("reference_codes")
        prompt = self._prompts.build(self._speech(payload))
        inputs = ArrivingInput(self._prompts.padding)
        inputs.append(prompt.added)
        inputs.ended = True
        return Request(
            request_id,
            Prompt(embeddings=prompt.rows.to("cpu", torch.float32)),
            max_outputs=whole_number(payload, "max_frames", 1),
            sampling=parse_sampling(payload),
            inputs=inputs,
            task=_Voiced(payload["speed"], reference),
            due=next_cut(0),
        )

    def _speech(self, payload: Payload) -> Speech:
        """Raises ``InvalidRequest`` for a recording that does not fit the talker."""
        codes, embedding = payload.get("reference_codes"), payload.get("speaker_embedding")
        width = self._spec.decoder.hidden_size
        if embedding is not None and embedding.shape != (width,):
            raise InvalidRequest(f"a speaker is [{width}] numbers, not {[*embedding.shape]}", param="references")
        if codes is not None and (codes.ndim != 2 or codes.shape[1] != self._spec.num_codes):
            raise InvalidRequest(f"frames have {self._spec.num_codes} codes, not {[*codes.shape]}", param="references")
        keys = ("role_ids", "text_ids", "instruction_ids", "language_id", "speaker_id", "reference_ids", "whole_text")
        given: dict[str, Any] = {key: payload[key] for key in keys}
        return Speech(
            **given,
            speaker_embedding=None if embedding is None else torch.as_tensor(embedding),
            reference_codes=None if codes is None else torch.as_tensor(codes).to(torch.int64),
        )

    def take(self, request: Request, row: list[int]) -> bool:
        if row[0] == self._spec.eos_id:
            request.finish_reason = "stop"
            return True
        request.outputs.append(row)
        if request.is_at_limit:
            request.finish_reason = "length"
        return request.finish_reason is not None

    def quiet_rows(self, request: Request) -> int:
        return request.max_outputs - 1 - len(request.outputs)

    def chunk(self, request: Request) -> Payload | None:
        if request.sent == len(request.outputs):
            return None
        made: Payload = {"codes": request.outputs.array(request.sent).astype(np.int16)}
        if request.sent == 0:
            voiced: _Voiced = request.task
            made |= {"speed": voiced.speed, "reference_codes": voiced.reference_codes}
        request.sent = len(request.outputs)
        request.due = next_cut(request.sent)
        return made

    def result(self, request: Request) -> Payload:
        return {
            "finish_reason": request.finish_reason,
            "input_tokens": request.prompt_length,
            "output_tokens": len(request.outputs),
        }
