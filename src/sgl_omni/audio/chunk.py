"""A piece of audio as vocoders hand it on."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_omni.errors import NotFinite


def audio_chunk(samples: npt.NDArray[np.float32], sample_rate: int) -> dict[str, Any]:
    """``{"audio": float32 [samples], "sample_rate": int}``. Raises ``NotFinite``: such samples would be silence."""
    _check_finite(samples)
    return {"audio": samples, "sample_rate": sample_rate}


def clipped(samples: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Samples within -1 to 1. Raises ``NotFinite``: an infinity would be full scale, and nobody would know."""
    _check_finite(samples)
    return np.clip(samples, -1.0, 1.0)


def _check_finite(samples: npt.NDArray[np.float32]) -> None:
    if not np.isfinite(samples).all():
        raise NotFinite("the vocoder's samples are")
