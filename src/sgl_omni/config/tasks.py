"""What a pipeline serves, as facts the API process can know without loading the model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechTask:
    """The pipeline answers ``/v1/audio/speech``.

    Its entry stage takes ``{"input": str, "voice": str, "speed": float, "seed": int | None,
    "temperature": float | None, "top_k": int | None, "max_new_tokens": int | None}`` (the last four only
    where the caller gave them); its terminal stage streams chunks ``{"audio": float32 array [samples] in
    [-1, 1], "sample_rate": int}``, already at the asked speed, and ends with a payload that holds at least
    ``{"finish_reason": str, "input_tokens": int, "output_tokens": int}``.
    """

    voices: tuple[str, ...]
    default_voice: str
    sample_rate: int
    max_input_characters: int = 4096
