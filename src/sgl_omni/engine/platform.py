"""Which tensors the Triton kernels are for."""

from __future__ import annotations

from torch import Tensor

everywhere = False
"""Set by tests whose Triton interprets its kernels, which run a GPU's path without one."""


def for_kernels(tensor: Tensor) -> bool:
    """On a GPU, and where ``everywhere`` says so on any device."""
    return everywhere or tensor.is_cuda
