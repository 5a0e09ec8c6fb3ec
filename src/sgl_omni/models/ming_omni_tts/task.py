"""The host side of Ming-Omni-TTS: prompts in, audio out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sgl_omni.audio.chunk import audio_chunk, clipped
from sgl_omni.audio.stretch import TimeStretch
from sgl_omni.engine.interface import Payload
from sgl_omni.engine.request import Prompt, Request, Sampling
from sgl_omni.engine.task import Task, number, whole_number
from sgl_omni.errors import InvalidRequest
from sgl_omni.models.ming_omni_tts.model import MingModel, Speech
from sgl_omni.models.ming_omni_tts.vae import Piece


class MingTask(Task):
    """``ids`` [length], ``speaker_at``, and ``latents`` [n, latent_size] and ``speaker`` [192] of a reference;
    ``seed``, ``temperature``, ``speed``. Chunks are ``{"audio": float32 [samples], "sample_rate": int}``.
    """

    embeds_prompts = True

    def __init__(self, model: MingModel, *, default_max_steps: int = 200) -> None:
        self._model = model
        self._vae = model.vae
        self._default_max_steps = default_max_steps

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
            task=Speech(history=self._history(latents), speed=number(payload, "speed", 1.0)),
        )

    def _history(self, latents: Tensor) -> Tensor:
        spec = self._model.spec
        history = torch.zeros(spec.history, spec.latent_size)
        known = latents[-spec.history :]
        history[spec.history - len(known) :] = known
        return history

    def take_all(self, rows: Sequence[tuple[Request, list[int]]]) -> list[tuple[Request, bool]]:
        """All speeches that have something new go through the VAE's decoder together."""
        taken = super().take_all(rows)
        pieces: list[Piece] = []
        for request, ended in taken:
            speech: Speech = request.task
            pieces.append(Piece(torch.cat(speech.latents[request.sent :]), speech.stream, ended))
            request.sent = len(speech.latents)
        for (request, _), samples in zip(taken, self._vae.decode(pieces), strict=True):
            request.task.samples = samples
        return taken

    def take(self, request: Request, row: list[int]) -> bool:
        request.outputs.append(row)
        request.task.say(self._model.latents_of(torch.tensor([row]))[0])
        if row[0] == 1:
            request.finish_reason = "stop"
        elif request.is_at_limit:
            request.finish_reason = "length"
        return request.finish_reason is not None

    def chunk(self, request: Request) -> Payload | None:
        speech: Speech = request.task
        samples = clipped(speech.samples.numpy())
        audio = self._at_speed(speech, samples, request.finish_reason is not None)
        return audio_chunk(audio, self._vae.spec.sample_rate) if len(audio) else None

    def _at_speed(self, speech: Speech, samples: NDArray[np.float32], ended: bool) -> NDArray[np.float32]:
        if speech.speed == 1:
            return samples
        if speech.stretch is None:
            speech.stretch = TimeStretch(speech.speed, self._vae.spec.sample_rate)
        parts = [speech.stretch.feed(samples), *([speech.stretch.flush()] if ended else [])]
        return np.concatenate(parts)

    def result(self, request: Request) -> Payload:
        return {
            "finish_reason": request.finish_reason,
            "input_tokens": request.prompt_length,
            "output_tokens": len(request.outputs),
        }
