"""Kernels that are bound by memory: residual and norm, SiLU and product, norm and rotation of q and k."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add_norm(x, delta, weight, normed, width, eps, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        value += tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(x.dtype.element_ty)
        tl.store(x + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    result = (value * scale).to(x.dtype.element_ty) * tl.load(weight + column, mask=inside, other=0.0)
    tl.store(normed + at, result.to(x.dtype.element_ty), mask=inside)


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """x [n, width] gets ``delta`` added in place; returns the RMS norm of the sum, scaled by ``weight``."""
    rows, width = x.shape
    normed = torch.empty_like(x)
    block = triton.next_power_of_2(width)
    warps = 8 if block >= 2048 else 4
    _add_norm[(rows,)](
        x, x if delta is None else delta, weight, normed, width, eps, delta is not None, block, num_warps=warps
    )
    return normed


@triton.jit
def _silu_mul(gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0)
    activated = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty)
    tl.store(out + row * width + column, activated * up, mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """[n, 2 * width], the gates first -> silu(gate) * up [n, width]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    block = min(1024, triton.next_power_of_2(width))
    _silu_mul[(rows, triton.cdiv(width, block))](gate_up, out, width, block, num_warps=4)
    return out


@triton.jit
def _norm_rotate_write(
    qkv,
    q_weight,
    k_weight,
    cosine,
    sine,
    slots,
    q_out,
    keys,
    values,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    pair = tl.arange(0, HALF_BLOCK)
    inside = pair < HALF
    dtype = qkv.dtype.element_ty
    source = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * 2 * HALF + pair
    first = tl.load(source, mask=inside, other=0.0)
    second = tl.load(source + HALF, mask=inside, other=0.0)
    slot = tl.load(slots + row)
    if head >= HEADS + KV_HEADS:
        target = values + (slot * KV_HEADS + head - HEADS - KV_HEADS) * 2 * HALF + pair
        tl.store(target, first, mask=inside)
        tl.store(target + HALF, second, mask=inside)
        return
    if HAS_NORM:
        weight = q_weight if head < HEADS else k_weight
        a, b = first.to(tl.float32), second.to(tl.float32)
        scale = tl.rsqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / (2 * HALF) + eps)
        first = (a * scale).to(dtype) * tl.load(weight + pair, mask=inside, other=0.0)
        second = (b * scale).to(dtype) * tl.load(weight + HALF + pair, mask=inside, other=0.0)
    c = tl.load(cosine + row * HALF + pair, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sine + row * HALF + pair, mask=inside, other=0.0).to(tl.float32)
    a, b = first.to(tl.float32), second.to(tl.float32)
    turned_first = (a * c - b * s).to(dtype)
    turned_second = (b * c + a * s).to(dtype)
    if head < HEADS:
        target = q_out + (row * HEADS + head) * 2 * HALF + pair
        tl.store(target, turned_first, mask=inside)
        tl.store(target + HALF, turned_second, mask=inside)
    else:
        target = keys + (slot * KV_HEADS + head - HEADS) * 2 * HALF + pair
        tl.store(target, turned_first, mask=inside)
        tl.store(target + HALF, turned_second, mask=inside)


def norm_rotate_write(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    rotation: tuple[Tensor, Tensor],
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    heads: int,
) -> Tensor:
    """Norms and rotates q and k, writes k and v to the cache in one go.

    qkv [n, (heads + 2 * kv_heads) * head_dim], ``rotation`` two of [n, 1, head_dim / 2], ``slots`` int64 [n],
    keys and values [pages, page_size, kv_heads, head_dim] -> q [n, heads, head_dim].
    """
    rows = qkv.shape[0]
    kv_heads, head_dim = keys.shape[2], keys.shape[3]
    q = qkv.new_empty(rows, heads, head_dim)
    q_weight, k_weight = norms if norms is not None else (qkv, qkv)
    _norm_rotate_write[(rows, heads + 2 * kv_heads)](
        qkv,
        q_weight,
        k_weight,
        rotation[0],
        rotation[1],
        slots,
        q,
        keys,
        values,
        eps,
        heads,
        kv_heads,
        head_dim // 2,
        triton.next_power_of_2(head_dim // 2),
        norms is not None,
        num_warps=1,
    )
    return q
