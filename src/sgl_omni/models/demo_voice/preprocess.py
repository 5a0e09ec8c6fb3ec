"""The entry stage: a speech task's text and options to what the engine takes. Imports no torch."""

from __future__ import annotations

import math

from sgl_omni.errors import InvalidRequest
from sgl_omni.models.demo_voice.spec import VoiceSpec
from sgl_omni.models.demo_voice.text import normalise, split
from sgl_omni.runtime.stage import Payload, Request

SLOWEST, FASTEST = 0.25, 4.0


class SpeechPreprocessor:
    """``(payload, request) -> payload``: normalised pieces, a voice index, and every option filled in.

    Greedy unless the caller gives a temperature: sampling repeated words once in long input.
    """

    def __init__(self, spec: VoiceSpec) -> None:
        self._spec = spec

    def __call__(self, payload: Payload, request: Request) -> Payload:
        """Raises ``InvalidRequest`` for a text that cannot be spoken and for options out of range."""
        pieces = self._pieces(payload.get("input"))
        max_new_tokens = payload.get("max_new_tokens")
        return {
            "pieces": pieces,
            "voice": self._voice(payload.get("voice")),
            "speed": self._speed(payload.get("speed")),
            "temperature": float(payload.get("temperature") or 0.0),
            "top_k": self._spec.top_k if payload.get("top_k") is None else payload["top_k"],
            "seed": payload.get("seed"),
            "max_frames": self._spec.max_frames * len(pieces) if max_new_tokens is None else max_new_tokens,
        }

    def _pieces(self, text: object) -> list[str]:
        if not isinstance(text, str):
            raise InvalidRequest("input must be a text", param="input")
        pieces = split(normalise(text))
        if not pieces:
            raise InvalidRequest("the input holds no word that can be spoken", param="input")
        return pieces

    def _voice(self, name: str | None) -> int:
        name = name or self._spec.default_voice
        if name not in self._spec.voices:
            raise InvalidRequest(f"unknown voice {name!r}; choose from {', '.join(self._spec.voices)}", param="voice")
        return self._spec.voices.index(name)

    def _speed(self, speed: float | None) -> float:
        speed = 1.0 if speed is None else float(speed)
        if not (math.isfinite(speed) and SLOWEST <= speed <= FASTEST):
            raise InvalidRequest(f"speed must lie between {SLOWEST} and {FASTEST}, not {speed}", param="speed")
        return speed
