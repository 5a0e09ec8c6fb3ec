"""The entry stage: a speech task's text, options and reference voice to what the engine takes. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgl_omni.audio.decode import decode_channels
from sgl_omni.audio.kept import LastMade
from sgl_omni.audio.stretch import FASTEST, SLOWEST
from sgl_omni.errors import InvalidRequest
from sgl_omni.models.moss_tts_local.files import MAX_REFERENCE_SECONDS
from sgl_omni.models.moss_tts_local.languages import LANGUAGES
from sgl_omni.models.moss_tts_local.prompt import Codes, PromptWriter
from sgl_omni.runtime.stage import Payload, Request

Encode = Callable[[NDArray[np.float32]], Codes]
"""float32 [channels, samples] -> codes int64 [frames, codebooks]."""

TEMPERATURE, TOP_P, TOP_K = 1.7, 0.8, 25
"""How the model's authors draw codes."""

_TARGET_DECIBELS, _MOST_DECIBELS = -20.0, 3.0
_VOICES_KEPT = 64
_AUDIO = "references[0].audio"


class SpeechPreprocessor:
    """``(payload, request) -> payload``: rows of the prompt, and every option filled in."""

    def __init__(self, writer: PromptWriter, voices: ReferenceVoices) -> None:
        self._writer = writer
        self._voices = voices

    def __call__(self, payload: Payload, request: Request) -> Payload:
        """Raises ``InvalidRequest`` for options out of range and for a reference that cannot be heard."""
        text = payload.get("input")
        if not isinstance(text, str) or not text.strip():
            raise InvalidRequest("input must be a text", param="input")
        if payload.get("voice"):
            raise InvalidRequest("this model has no voices of its own; give a reference instead", param="voice")
        if payload.get("repetition_penalty") not in (None, 1, 1.0):
            raise InvalidRequest("this model takes no repetition_penalty", param="repetition_penalty")
        rows = self._writer.rows(
            text,
            references=self._references(payload.get("references") or []),
            instructions=payload.get("instructions"),
            language=_language(payload.get("language")),
        )
        frames = payload.get("max_new_tokens")
        return {
            "prompt_ids": rows,
            "speed": _speed(payload.get("speed")),
            "temperature": _given(payload, "temperature", TEMPERATURE),
            "top_p": _given(payload, "top_p", TOP_P),
            "top_k": _given(payload, "top_k", TOP_K),
            "seed": payload.get("seed"),
            **({} if frames is None else {"max_frames": frames}),
        }

    def _references(self, references: list[dict[str, Any]]) -> list[Codes]:
        if len(references) > 1:
            raise InvalidRequest("this model takes one reference", param="references")
        return [self._voices.codes(reference["audio"]) for reference in references]


class ReferenceVoices:
    """Recordings as codes. The last ones are remembered, so that a voice is encoded once."""

    def __init__(self, encode: Encode, sample_rate: int, channels: int) -> None:
        self._encode = encode
        self._sample_rate = sample_rate
        self._channels = channels
        self._kept: LastMade[Codes] = LastMade(_VOICES_KEPT)

    def codes(self, file: bytes | memoryview) -> Codes:
        """int64 [frames, codebooks]. Raises ``InvalidRequest`` for what is no recording, or too short or long."""
        return self._kept.get(file, lambda: self.encoded(file))

    def encoded(self, file: bytes | memoryview) -> Codes:
        """The same, without remembering it."""
        samples = decode_channels(
            file, self._sample_rate, self._channels, param=_AUDIO, max_seconds=MAX_REFERENCE_SECONDS
        )
        codes = self._encode(level(samples))
        if not len(codes):
            raise InvalidRequest("the reference is shorter than one frame of audio", param=_AUDIO)
        return codes


def level(samples: NDArray[np.float32]) -> NDArray[np.float32]:
    """As loud as the references that the model was trained with, or at most 3 dB nearer to it."""
    decibels = 10 * math.log10(float(np.mean(np.square(samples, dtype=np.float64))) + 1e-9)
    gain = max(-_MOST_DECIBELS, min(_TARGET_DECIBELS - decibels, _MOST_DECIBELS))
    return (samples * 10 ** (gain / 20)).astype(np.float32)


def _language(name: str | None) -> str | None:
    """As the model was told it. Names and codes are known."""
    if name is None or name.casefold() == "auto":
        return None
    found = LANGUAGES.get(name.casefold())
    if found is None:
        raise InvalidRequest(f"language {name!r} is not one of {', '.join(sorted(LANGUAGES))}", param="language")
    return found


def _speed(speed: float | None) -> float:
    speed = 1.0 if speed is None else float(speed)
    if not (math.isfinite(speed) and SLOWEST <= speed <= FASTEST):
        raise InvalidRequest(f"speed must lie between {SLOWEST} and {FASTEST}, not {speed}", param="speed")
    return speed


def _given(payload: Payload, key: str, default: float) -> float:
    value: float | None = payload.get(key)
    return default if value is None else value
