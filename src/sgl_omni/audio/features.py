"""What a codec's encoder makes of a recording, before the nearest codes are looked for."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_omni.errors import NotFinite


def check_features(features: Tensor) -> None:
    """Raises ``NotFinite``: the codes nearest to no number are some codes, and nobody would know."""
    if not bool(torch.isfinite(features).all()):
        raise NotFinite("the features of the reference's audio are")
