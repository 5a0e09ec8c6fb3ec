"""Which tensors the Triton kernels are for."""

from __future__ import annotations

import os

from torch import Tensor

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def for_kernels(tensor: Tensor) -> bool:
    """On a GPU; and anywhere where Triton interprets its kernels, so that tests run a GPU's path without one."""
    return tensor.is_cuda or _INTERPRETED
