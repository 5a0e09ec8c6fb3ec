"""The entry stage: a speech task's text, references and options to what the next stages take. Imports no torch."""

from __future__ import annotations

import math
from typing import Any

from sgl_omni.errors import InvalidRequest
from sgl_omni.models.higgs_tts.checkpoint import Defaults
from sgl_omni.models.higgs_tts.prompts import PromptWriter
from sgl_omni.runtime.stage import Payload, Request

SLOWEST, FASTEST = 0.25, 4.0
"""82 s at 25 frames a second."""


class SpeechPreprocessor:
    """``(payload, request) -> payload``: ``pieces`` of prompt ids, the ``references``' files, and every option."""

    def __init__(self, prompts: PromptWriter, defaults: Defaults, max_references: int) -> None:
        self._prompts = prompts
        self._defaults = defaults
        self._max_references = max_references

    def __call__(self, payload: Payload, request: Request) -> Payload:
        """Raises ``InvalidRequest`` for what cannot be spoken and for options that this model does not have."""
        references = self._references(payload.get("references"))
        text = payload.get("input")
        if not isinstance(text, str) or not text.strip():
            raise InvalidRequest("input must be a text", param="input")
        if payload.get("voice") is not None:
            raise InvalidRequest("this model has no voices of its own; give references", param="voice")
        transcripts = [each.get("text") for each in references]
        frames = payload.get("max_new_tokens")
        return {
            "pieces": self._prompts.pieces(text, transcripts, payload.get("instructions")),
            "references": [each["audio"] for each in references],
            **({} if frames is None else {"max_frames": frames}),
            "speed": _speed(payload.get("speed")),
            **self._sampling(payload),
        }

    def _references(self, given: Any) -> list[dict[str, Any]]:
        found = [] if given is None else given
        if not isinstance(found, list) or not all(isinstance(each, dict) and each.get("audio") for each in found):
            raise InvalidRequest("references must be a list of recordings", param="references")
        if len(found) > self._max_references:
            raise InvalidRequest(
                f"{len(found)} references are given; the limit is {self._max_references}", param="references"
            )
        return found

    def _sampling(self, payload: Payload) -> Payload:
        if payload.get("repetition_penalty") not in (None, 1, 1.0):
            raise InvalidRequest("this model knows no repetition_penalty", param="repetition_penalty")
        options = {
            key: getattr(self._defaults, key) if payload.get(key) is None else payload[key]
            for key in ("temperature", "top_k", "top_p")
        }
        return options | {"seed": payload.get("seed")}


def _speed(speed: Any) -> float:
    found = 1.0 if speed is None else float(speed)
    if not (math.isfinite(found) and SLOWEST <= found <= FASTEST):
        raise InvalidRequest(f"speed must lie between {SLOWEST} and {FASTEST}, not {found}", param="speed")
    return found
