"""The entry stage: a speech task's text, options and reference to a prompt and samples. Imports no torch."""

from __future__ import annotations

import math
import secrets
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgl_omni.audio.decode import decode_audio
from sgl_omni.audio.stretch import FASTEST, SLOWEST
from sgl_omni.errors import InvalidRequest
from sgl_omni.models.ming_omni_tts.files import MAX_REFERENCE_SECONDS
from sgl_omni.models.ming_omni_tts.prompt import PromptWriter
from sgl_omni.models.ming_omni_tts.spec import SPEAKER_RATE
from sgl_omni.runtime.stage import Payload, Request

_OFF = {"top_k": (0, -1), "top_p": (1,), "repetition_penalty": (1,)}
"""Options of models that choose among ids, and the values with which they ask for nothing."""


class SpeechPreprocessor:
    """``(payload, request) -> payload``: ``ids`` and ``speaker_at``, every option, and of a reference ``samples``,
    from which its latents are made, and ``voice`` at 16 kHz, by which its speaker is told."""

    def __init__(
        self, writer: PromptWriter, sample_rate: int, step_samples: int, *, hears_speakers: bool = False
    ) -> None:
        """``step_samples``: a reference is filled up to a multiple of these, as one step of the model makes.

        ``hears_speakers``: the next stage can tell the speaker of a reference, which then needs no text.
        """
        self._writer = writer
        self._sample_rate = sample_rate
        self._step_samples = step_samples
        self._hears_speakers = hears_speakers

    def __call__(self, payload: Payload, request: Request) -> Payload:
        """Raises ``InvalidRequest`` for options out of range and for a reference that cannot be heard."""
        text = payload.get("input")
        if not isinstance(text, str) or not text.strip():
            raise InvalidRequest("input must be a text", param="input")
        if payload.get("voice"):
            raise InvalidRequest("this model has no voices of its own; give a reference instead", param="voice")
        for name, off in _OFF.items():
            if payload.get(name) is not None and payload[name] not in off:
                raise InvalidRequest(f"this model takes no {name}", param=name)
        spoken, heard = self._reference(payload.get("references") or [])
        written = self._writer.write(
            text, spoken=spoken, hears_speaker="voice" in heard, instructions=payload.get("instructions")
        )
        seed, steps = payload.get("seed"), payload.get("max_new_tokens")
        return {
            "ids": np.asarray(written.ids, dtype=np.int64),
            "speaker_at": written.speaker_at,
            "seed": secrets.randbits(62) if seed is None else seed,
            "temperature": payload.get("temperature") or 0.0,
            "speed": _speed(payload.get("speed")),
            **heard,
            **({} if steps is None else {"max_steps": steps}),
        }

    def _reference(self, references: list[dict[str, Any]]) -> tuple[str | None, dict[str, NDArray[np.float32]]]:
        """What is said in it, and its samples."""
        if not references:
            return None, {}
        if len(references) > 1:
            raise InvalidRequest("this model takes one reference", param="references")
        audio, spoken = references[0]["audio"], (references[0].get("text") or "").strip()
        if not spoken and not self._hears_speakers:
            raise InvalidRequest(
                "this model needs what is said in the reference as its text", param="references[0].text"
            )
        heard = {"voice": _decoded(audio, SPEAKER_RATE)} if self._hears_speakers else {}
        if not spoken:
            return None, heard
        samples = _decoded(audio, self._sample_rate)
        return spoken, {**heard, "samples": np.pad(samples, (0, -len(samples) % self._step_samples))}


def _decoded(audio: bytes | memoryview, rate: int) -> NDArray[np.float32]:
    return decode_audio(audio, rate, param="references[0].audio", max_seconds=MAX_REFERENCE_SECONDS)


def _speed(speed: float | None) -> float:
    speed = 1.0 if speed is None else float(speed)
    if not (math.isfinite(speed) and SLOWEST <= speed <= FASTEST):
        raise InvalidRequest(f"speed must lie between {SLOWEST} and {FASTEST}, not {speed}", param="speed")
    return speed
