"""Operations of a layer that have a fused kernel on a GPU: the same function on both platforms."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dimension, in float32, rounded, and scaled by ``weight``."""
    return F.rms_norm(x.float(), (x.shape[-1],), None, eps).to(x.dtype) * weight


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum of x and ``delta`` [n, width], and its RMS norm. On a GPU the sum takes the place of x."""
    if x.is_cuda:
        from sgl_omni.engine.kernels import elementwise

        return x, elementwise.add_norm(x, delta, weight, eps)
    total = x if delta is None else x + delta
    return total, rms_norm(total, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """[n, 2 * width], the gates first -> silu(gate) * up [n, width]."""
    if gate_up.is_cuda:
        from sgl_omni.engine.kernels import elementwise

        return elementwise.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up
