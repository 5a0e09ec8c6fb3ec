"""Operations of a layer that have a fused kernel on a GPU: the same function on both platforms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sgl_omni.engine.platform import for_kernels


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dimension, in float32, rounded, and scaled by ``weight``."""
    return F.rms_norm(x.float(), (x.shape[-1],), None, eps).to(x.dtype) * weight


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum of x and ``delta`` [n, width], and its RMS norm. On a GPU the sum takes the place of a contiguous x.

    ``delta`` may be what ``partial_linear`` returns.
    """
    if for_kernels(x):
        from sgl_omni.engine.kernels import elementwise

        x = x.contiguous()
        return x, elementwise.add_norm(x, delta, weight, eps)
    total = x if delta is None else x + delta
    return total, rms_norm(total, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """[n, 2 * width], the gates first -> silu(gate) * up [n, width]."""
    if for_kernels(gate_up):
        from sgl_omni.engine.kernels import elementwise

        return elementwise.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [n, in], weight [2 * width, in], the gates first -> silu(gate) * up [n, width]."""
    if bias is None and x.is_cuda:
        from sgl_omni.engine.kernels import linear

        if linear.is_few_rows(x, weight):
            return linear.gated_linear(x, weight)
    return silu_mul(F.linear(x, weight, bias))


def partial_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [n, in], weight [out, in] -> [n, out], or float32 [parts, n, out] whose sum it is.

    Only for what ``add_norm`` or ``FusedAttend`` takes next.
    """
    if bias is None and x.is_cuda:
        from sgl_omni.engine.kernels import linear

        if linear.is_few_rows(x, weight):
            return linear.partial_linear(x, weight)
        if linear.is_split_well(x, weight):
            return linear.halved_linear(x, weight)
    return F.linear(x, weight, bias)


def whole(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """What ``partial_linear`` returned, summed."""
    return parts.sum(0).to(dtype) if parts.dim() == 3 else parts


def embed(ids: Tensor, offsets: Tensor, table: Tensor) -> Tensor:
    """ids int64 [n, columns], offsets int64 [columns], table [rows, width] -> sums of the columns' rows [n, width]."""
    if for_kernels(table):
        from sgl_omni.engine.kernels import state

        return state.embed(ids, offsets, table)
    return F.embedding(ids + offsets, table).sum(1)
