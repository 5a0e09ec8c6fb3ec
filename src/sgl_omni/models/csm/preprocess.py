"""The entry stage: a speech task's text, options and recordings to what the engine takes. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgl_omni.audio.decode import decode_audio
from sgl_omni.audio.kept import LastMade
from sgl_omni.audio.stretch import FASTEST, SLOWEST
from sgl_omni.errors import InvalidRequest
from sgl_omni.models.csm.files import MAX_REFERENCE_SECONDS, MAX_REFERENCES, SPEAKERS
from sgl_omni.models.csm.prompt import Codes, PromptWriter
from sgl_omni.runtime.stage import Payload, Request

Encode = Callable[[NDArray[np.float32]], Codes]
"""float32 [samples] -> codes int64 [frames, codebooks]."""

_DEFAULTS = {"temperature": 0.9, "top_k": 50, "top_p": 1.0}
"""Where the checkpoint's generation_config.json says nothing else: as the model's authors draw codes."""
_RECORDINGS_KEPT = 64


class SpeechPreprocessor:
    """``(payload, request) -> payload``: rows of the prompt, and every option filled in."""

    def __init__(self, writer: PromptWriter, recordings: Recordings, generation: Mapping[str, Any]) -> None:
        """``generation``: the checkpoint's own sampling options."""
        self._writer = writer
        self._recordings = recordings
        given = {key: generation[key] for key in _DEFAULTS if generation.get(key) is not None}
        self._defaults = {**_DEFAULTS, **given}
        if generation.get("do_sample") is False:
            self._defaults["temperature"] = 0.0

    def __call__(self, payload: Payload, request: Request) -> Payload:
        """Raises ``InvalidRequest`` for options out of range and for a reference that cannot be used."""
        text = payload.get("input")
        if not isinstance(text, str) or not text.strip():
            raise InvalidRequest("input must be a text", param="input")
        speaker = payload.get("voice") or SPEAKERS[0]
        if speaker not in SPEAKERS:
            raise InvalidRequest(f"voice must be one of {', '.join(SPEAKERS)}, not {str(speaker)[:40]!r}", "voice")
        if payload.get("repetition_penalty") not in (None, 1, 1.0):
            raise InvalidRequest("this model takes no repetition_penalty", param="repetition_penalty")
        frames = payload.get("max_new_tokens")
        options = {key: value if payload.get(key) is None else payload[key] for key, value in self._defaults.items()}
        return {
            "prompt_ids": self._writer.rows(speaker, text, self._heard(payload.get("references") or [])),
            "speed": _speed(payload.get("speed")),
            "seed": payload.get("seed"),
            **options,
            **({} if frames is None else {"max_frames": frames}),
        }

    def _heard(self, references: list[dict[str, Any]]) -> list[tuple[str, Codes]]:
        if len(references) > MAX_REFERENCES:
            raise InvalidRequest(f"this model takes {MAX_REFERENCES} references, not {len(references)}", "references")
        for i, reference in enumerate(references):
            if not (reference.get("text") or "").strip():
                raise InvalidRequest("this model needs the text of every reference", param=f"references[{i}].text")
        return [
            (reference["text"], self._recordings.codes(reference["audio"], f"references[{i}].audio"))
            for i, reference in enumerate(references)
        ]


class Recordings:
    """Files as codes. The last ones are remembered, so that a voice is encoded once."""

    def __init__(self, encode: Encode, sample_rate: int) -> None:
        self._encode = encode
        self._sample_rate = sample_rate
        self._kept: LastMade[Codes] = LastMade(_RECORDINGS_KEPT)

    def codes(self, file: bytes | memoryview, param: str) -> Codes:
        """int64 [frames, codebooks]. Raises ``InvalidRequest`` that names ``param`` for what is no recording, or too
        long."""
        return self._kept.get(file, lambda: self.encoded(file, param))

    def encoded(self, file: bytes | memoryview, param: str = "references[0].audio") -> Codes:
        """The same, without remembering it."""
        return self._encode(decode_audio(file, self._sample_rate, param=param, max_seconds=MAX_REFERENCE_SECONDS))


def _speed(speed: float | None) -> float:
    speed = 1.0 if speed is None else float(speed)
    if not (math.isfinite(speed) and SLOWEST <= speed <= FASTEST):
        raise InvalidRequest(f"speed must lie between {SLOWEST} and {FASTEST}, not {speed}", param="speed")
    return speed
