"""What makes frames of samples, held against the models that hear with Whisper's. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sgl_omni.errors import InvalidRequest

RATE, HOP, WINDOW = 16_000, 160, 400
"""Samples a second, between frames, and in each: what all of these models were trained with."""
_USUAL_BINS = 80


def check_mel(found: Mapping[str, Any], file: Path, bins: int) -> None:
    """``found``: what a preprocessor's ``file`` says; what it does not say is as transformers has it.

    Raises ``InvalidRequest`` that names file and field where its frames are not those of a model with ``bins``.
    """
    heard = {
        "feature_size": (_USUAL_BINS, bins, "bins"),
        "sampling_rate": (RATE, RATE, "samples a second"),
        "hop_length": (HOP, HOP, "samples from frame to frame"),
        "n_fft": (WINDOW, WINDOW, "samples in a frame"),
    }
    for name, (usual, wanted, what) in heard.items():
        if found.get(name, usual) != wanted:
            said = found.get(name, f"absent, which means {usual}")
            raise InvalidRequest(f"{file}: {name} is {said}; the model hears {wanted} {what}", param="model_path")
