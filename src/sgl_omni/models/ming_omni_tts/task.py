"""The host side of Ming-Omni-TTS: prompts in, latents out."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sgl_omni.engine.interface import Payload
from sgl_omni.engine.request import Prompt, Request, Sampling
from sgl_omni.engine.task import HandOver, Task, number, whole_number
from sgl_omni.errors import InvalidRequest
from sgl_omni.models.ming_omni_tts.model import ENDS, MingModel, Speech


class MingTask(Task):
    """``ids`` [length], ``speaker_at``, and ``latents`` [n, latent_size] and ``speaker`` [192] of a reference;
    ``seed``, ``temperature``, ``speed``. Chunks are ``latents`` float32 [n, latent_size] and the asked ``speed``.
    """

    embeds_prompts = True
    end_ids = frozenset([ENDS])

    def __init__(self, model: MingModel, *, default_max_steps: int = 200, hand_over: HandOver | None = None) -> None:
        """``hand_over``: of steps."""
        self._model = model
        self._default_max_steps = default_max_steps
        self._hand_over = hand_over or HandOver()

    def parse(self, request_id: str, payload: Payload) -> Request:
        spec = self._model.spec
        steps = whole_number(payload, "max_steps", self._default_max_steps)
        if steps < 1:
            raise InvalidRequest(f"max_new_tokens must be 1 or more, not {steps}", param="max_new_tokens")
        ids = torch.as_tensor(np.asarray(payload["ids"], dtype=np.int64))
        latents = torch.as_tensor(np.asarray(payload.get("latents", np.zeros((0, spec.latent_size))), np.float32))
        speaker = torch.as_tensor(payload["speaker"]) if "speaker" in payload else None
        prompt = self._model.embed_prompt(ids, whole_number(payload, "speaker_at", -1), latents, speaker)
        return Request(
            request_id,
            Prompt(embeddings=prompt),
            max_outputs=steps,
            sampling=Sampling(temperature=number(payload, "temperature", 0.0), seed=whole_number(payload, "seed", 0)),
            due=self._hand_over.first,
            task=Speech(heard=self._heard(latents), speed=number(payload, "speed", 1.0)),
        )

    def _heard(self, latents: Tensor) -> Tensor:
        spec = self._model.spec
        heard = torch.zeros(spec.history, spec.latent_size)
        known = latents[-spec.history :]
        heard[spec.history - len(known) :] = known
        return heard

    def take(self, request: Request, row: list[int]) -> bool:
        request.outputs.append(row)
        if row[0] == ENDS:
            request.finish_reason = "stop"
        elif request.is_at_limit:
            request.finish_reason = "length"
        return request.finish_reason is not None

    def quiet_rows(self, request: Request) -> int:
        return request.max_outputs - 1 - len(request.outputs)

    def chunk(self, request: Request) -> Payload | None:
        if request.sent == len(request.outputs):
            return None
        latents = self._model.latents_said(request, request.sent)
        request.sent = len(request.outputs)
        request.due = request.sent + self._hand_over.frames_after(request.sent)
        return {"latents": latents.flatten(0, 1).numpy(), "speed": request.task.speed}

    def result(self, request: Request) -> Payload:
        return {
            "finish_reason": request.finish_reason,
            "input_tokens": request.prompt_length,
            "output_tokens": len(request.outputs),
        }
