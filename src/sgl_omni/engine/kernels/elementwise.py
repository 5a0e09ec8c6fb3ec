"""Kernels that are bound by memory: residual and norm, SiLU and product, norm and rotation of q and k."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def launches_early(device: torch.device) -> bool:
    """Whether a kernel may start before the one in front of it has ended (Hopper and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def pdl(early: bool) -> dict[str, bool]:
    """The launch option for it; Triton's interpreter knows none."""
    return {"launch_pdl": True} if early else {}


def need_contiguous(**tensors: Tensor) -> None:
    """Raises ``ValueError`` for a tensor whose rows do not follow one another, as these kernels take for granted."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, its strides are {tensor.stride()} for {tuple(tensor.shape)}")


@triton.jit
def prefetch_l2(pointers):
    """Asks for the cache lines behind a block of pointers."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.uint64, bitcast=True)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def summed(source, inside, part_stride, PARTS: tl.constexpr):
    total = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(source + part * part_stride, mask=inside, other=0.0)
    return total


@triton.jit
def _add_norm(
    x,
    delta,
    weight,
    normed,
    width,
    eps,
    part_stride,
    PARTS: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    scale = tl.load(weight + column, mask=inside, other=0.0)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        added = summed(delta + at, inside, part_stride, PARTS)
        value += added.to(x.dtype.element_ty).to(tl.float32)
        rounded = value.to(x.dtype.element_ty)
        tl.store(x + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    result = (value * inverse).to(x.dtype.element_ty) * scale
    tl.store(normed + at, result.to(x.dtype.element_ty), mask=inside)


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """x [n, width] gets ``delta`` added in place; returns the RMS norm of the sum, scaled by ``weight``.

    ``delta`` is [n, width], or float32 [parts, n, width] to be summed.
    """
    need_contiguous(x=x)
    delta = None if delta is None else delta.contiguous()
    rows, width = x.shape
    normed = torch.empty_like(x)
    block = triton.next_power_of_2(width)
    parts = delta.shape[0] if delta is not None and delta.dim() == 3 else 1
    early = launches_early(x.device)
    _add_norm[(rows,)](
        x,
        x if delta is None else delta,
        weight,
        normed,
        width,
        eps,
        rows * width,
        parts,
        delta is not None,
        block,
        early,
        num_warps=16 if block >= 4096 else 4,
        **pdl(early),
    )
    return normed


@triton.jit
def _silu_mul(gate_up, out, width, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0)
    activated = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty)
    tl.store(out + row * width + column, activated * up, mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """[n, 2 * width], the gates first -> silu(gate) * up [n, width]."""
    gate_up = gate_up.contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    block = min(1024, triton.next_power_of_2(width))
    early = launches_early(gate_up.device)
    _silu_mul[(rows, triton.cdiv(width, block))](gate_up, out, width, block, early, num_warps=4, **pdl(early))
    return out


_HEADS_AT_ONCE = 8


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
    part_stride,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
    EARLY: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    # Heads of q, of k and of v are cut into blocks by themselves, so that a program does one kind only.
    q_blocks: tl.constexpr = (HEADS + AT_ONCE - 1) // AT_ONCE
    kv_blocks: tl.constexpr = (KV_HEADS + AT_ONCE - 1) // AT_ONCE
    block = tl.program_id(1)
    is_q = block < q_blocks
    is_v = block >= q_blocks + kv_blocks
    kind_block = tl.where(is_q, block, tl.where(is_v, block - q_blocks - kv_blocks, block - q_blocks))
    head = kind_block * AT_ONCE + tl.arange(0, AT_ONCE)
    count = tl.where(is_q, HEADS, KV_HEADS)
    offset = tl.where(is_q, 0, tl.where(is_v, HEADS + KV_HEADS, HEADS))
    pair = tl.arange(0, HALF_BLOCK)
    inside = (head < count)[:, None] & (pair < HALF)[None, :]
    in_head = pair < HALF
    dtype = q_out.dtype.element_ty
    within = head[:, None] * 2 * HALF + pair[None, :]
    source = qkv + (row * (HEADS + 2 * KV_HEADS) + offset) * 2 * HALF + within
    slot = tl.load(slots + row)
    c = tl.load(cosine + row * HALF + pair, mask=in_head, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sine + row * HALF + pair, mask=in_head, other=0.0).to(tl.float32)[None, :]
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    first = summed(source, inside, part_stride, PARTS).to(dtype)
    second = summed(source + HALF, inside, part_stride, PARTS).to(dtype)
    if is_v:
        target = values + slot * KV_HEADS * 2 * HALF + within
        tl.store(target, first, mask=inside)
        tl.store(target + HALF, second, mask=inside)
    else:
        if HAS_NORM:
            weight = q_weight if is_q else k_weight
            a, b = first.to(tl.float32), second.to(tl.float32)
            scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
            first = (a * scale).to(dtype) * tl.load(weight + pair, mask=in_head, other=0.0)[None, :]
            second = (b * scale).to(dtype) * tl.load(weight + HALF + pair, mask=in_head, other=0.0)[None, :]
        a, b = first.to(tl.float32), second.to(tl.float32)
        target = (q_out + row * HEADS * 2 * HALF if is_q else keys + slot * KV_HEADS * 2 * HALF) + within
        tl.store(target, (a * c - b * s).to(dtype), mask=inside)
        tl.store(target + HALF, (b * c + a * s).to(dtype), mask=inside)


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

    qkv [n, (heads + 2 * kv_heads) * head_dim], or float32 [parts, n, the same] to be summed; ``rotation`` two of
    [n, 1, head_dim / 2], ``slots`` int64 [n], keys and values [pages, page_size, kv_heads, head_dim]
    -> q [n, heads, head_dim].
    """
    need_contiguous(keys=keys, values=values)
    qkv, slots, cosine, sine = (part.contiguous() for part in (qkv, slots, *rotation))
    rows, parts = qkv.shape[-2], qkv.shape[0] if qkv.dim() == 3 else 1
    kv_heads, head_dim = keys.shape[2], keys.shape[3]
    q = keys.new_empty(rows, heads, head_dim)
    early = launches_early(qkv.device)
    q_weight, k_weight = norms if norms is not None else (qkv, qkv)
    blocks = triton.cdiv(heads, _HEADS_AT_ONCE) + 2 * triton.cdiv(kv_heads, _HEADS_AT_ONCE)
    _norm_rotate_write[(rows, blocks)](
        qkv,
        q_weight,
        k_weight,
        cosine,
        sine,
        slots,
        q,
        keys,
        values,
        eps,
        qkv.stride(0),
        parts,
        heads,
        kv_heads,
        head_dim // 2,
        triton.next_power_of_2(head_dim // 2),
        norms is not None,
        early,
        _HEADS_AT_ONCE,
        num_warps=4,
        **pdl(early),
    )
    return q
