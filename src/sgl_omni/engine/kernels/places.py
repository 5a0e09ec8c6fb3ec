"""Attention over a handful of fixed places a row, from the merged projection to the result in one kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sgl_omni.engine.kernels.elementwise import launches_early, need_contiguous, pdl, summed


@triton.jit
def _turned(a, b, cosine, sine, weight_a, weight_b, eps, SIZE: tl.constexpr, HAS_NORM: tl.constexpr):
    """Both halves of heads, whose elements are pairs: normed over the last axis, and turned."""
    dtype = a.dtype
    if HAS_NORM:
        axis: tl.constexpr = len(a.shape) - 1
        x, y = a.to(tl.float32), b.to(tl.float32)
        squares = tl.sum(x * x + y * y, axis, keep_dims=True)
        scale = tl.rsqrt(squares / SIZE + eps)
        a, b = (x * scale).to(dtype) * weight_a, (y * scale).to(dtype) * weight_b
    x, y = a.to(tl.float32), b.to(tl.float32)
    return (x * cosine - y * sine).to(dtype), (y * cosine + x * sine).to(dtype)


@triton.jit(do_not_specialize=["start"])
def _attend(
    qkv,
    q_weight,
    k_weight,
    cosine,
    sine,
    keys,
    values,
    out,
    eps,
    scale,
    start,
    length,
    part_stride,
    turn_stride,
    PAIR_STRIDE: tl.constexpr,
    PARTS: tl.constexpr,
    COUNT: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    BEFORE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    dtype = out.dtype.element_ty
    group: tl.constexpr = HEADS // KV_HEADS
    merged_heads: tl.constexpr = HEADS + 2 * KV_HEADS
    pair = tl.arange(0, HALF_BLOCK)
    in_head = pair < HALF
    # Where the two elements of a pair are in a head. Keys are kept with the halves apart, however they came.
    first = pair * 2 if NEIGHBOURS else pair
    second = first + (1 if NEIGHBOURS else HALF)
    query = tl.arange(0, QUERIES)
    place = query // group
    inside = (query < COUNT * group)[:, None] & in_head[None, :]
    cache = row * length * KV_HEADS * 2 * HALF + kv_head * 2 * HALF
    if BEFORE > 0:
        # Written by a kernel before the one in front, so there is no need to wait for it.
        before = tl.arange(0, BEFORE)
        at = cache + before[:, None] * KV_HEADS * 2 * HALF + pair[None, :]
        known = (before < start)[:, None] & in_head[None, :]
        k_first = tl.load(keys + at, mask=known, other=0.0)
        k_second = tl.load(keys + at + HALF, mask=known, other=0.0)
        v_first = tl.load(values + at, mask=known, other=0.0)
        v_second = tl.load(values + at + HALF, mask=known, other=0.0)
    turn = place[:, None] * turn_stride + pair[None, :] * PAIR_STRIDE
    c = tl.load(cosine + turn, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sine + turn, mask=inside, other=0.0).to(tl.float32)
    q_weight_first, q_weight_second, k_weight_first, k_weight_second = c, c, c, c
    if HAS_NORM:
        q_weight_first = tl.load(q_weight + first, mask=in_head, other=0.0)
        q_weight_second = tl.load(q_weight + second, mask=in_head, other=0.0)
        k_weight_first = tl.load(k_weight + first, mask=in_head, other=0.0)
        k_weight_second = tl.load(k_weight + second, mask=in_head, other=0.0)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    source = qkv + ((row * COUNT + place) * merged_heads + kv_head * group + query % group)[:, None] * 2 * HALF
    a = summed(source + first[None, :], inside, part_stride, PARTS).to(dtype)
    b = summed(source + second[None, :], inside, part_stride, PARTS).to(dtype)
    q_first, q_second = _turned(a, b, c, s, q_weight_first, q_weight_second, eps, 2 * HALF, HAS_NORM)
    highest = tl.full([QUERIES], -1.0e30, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc_first = tl.zeros([QUERIES, HALF_BLOCK], tl.float32)
    acc_second = tl.zeros([QUERIES, HALF_BLOCK], tl.float32)
    if BEFORE > 0:
        scores = tl.dot(q_first, tl.trans(k_first), input_precision=PRECISION)
        scores = tl.dot(q_second, tl.trans(k_second), scores, input_precision=PRECISION) * scale
        scores = tl.where((before < start)[None, :], scores, -1.0e30)
        highest = tl.max(scores, 1)
        weight = tl.where((before < start)[None, :], tl.exp2(scores - highest[:, None]), 0.0)
        total = tl.sum(weight, 1)
        acc_first = tl.dot(weight.to(dtype), v_first, input_precision=PRECISION)
        acc_second = tl.dot(weight.to(dtype), v_second, input_precision=PRECISION)
    for own in tl.static_range(COUNT):
        source = qkv + ((row * COUNT + own) * merged_heads + HEADS + kv_head) * 2 * HALF
        a = summed(source + first, in_head, part_stride, PARTS).to(dtype)
        b = summed(source + second, in_head, part_stride, PARTS).to(dtype)
        turn = own * turn_stride + pair * PAIR_STRIDE
        c = tl.load(cosine + turn, mask=in_head, other=0.0).to(tl.float32)
        s = tl.load(sine + turn, mask=in_head, other=0.0).to(tl.float32)
        a, b = _turned(a, b, c, s, k_weight_first, k_weight_second, eps, 2 * HALF, HAS_NORM)
        source += KV_HEADS * 2 * HALF
        v_a = summed(source + pair, in_head, part_stride, PARTS).to(dtype)
        v_b = summed(source + HALF + pair, in_head, part_stride, PARTS).to(dtype)
        at = cache + (start + own) * KV_HEADS * 2 * HALF + pair
        tl.store(keys + at, a, mask=in_head)
        tl.store(keys + at + HALF, b, mask=in_head)
        tl.store(values + at, v_a, mask=in_head)
        tl.store(values + at + HALF, v_b, mask=in_head)
        products = q_first.to(tl.float32) * a.to(tl.float32)[None, :]
        products += q_second.to(tl.float32) * b.to(tl.float32)[None, :]
        seen = place >= own
        score = tl.where(seen, tl.sum(products, 1) * scale, -1.0e30)
        new_highest = tl.maximum(highest, score)
        kept = tl.exp2(highest - new_highest)
        weight = tl.where(seen, tl.exp2(score - new_highest), 0.0)
        total = total * kept + weight
        acc_first = acc_first * kept[:, None] + weight[:, None] * v_a.to(tl.float32)[None, :]
        acc_second = acc_second * kept[:, None] + weight[:, None] * v_b.to(tl.float32)[None, :]
        highest = new_highest
    target = out + ((row * COUNT + place) * HEADS + kv_head * group + query % group)[:, None] * 2 * HALF + pair[None, :]
    tl.store(target, (acc_first / total[:, None]).to(dtype), mask=inside)
    tl.store(target + HALF, (acc_second / total[:, None]).to(dtype), mask=inside)


def attend(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    heads: int,
    rotation: tuple[Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    start: int,
    *,
    neighbours: bool = False,
) -> Tensor:
    """Norms and rotates q and k, writes k and v, and attends over the row's places up to each one's own.

    qkv [n, (heads + 2 * kv_heads) * head_dim], or float32 [parts, n, the same] to be summed: places from ``start`` on
    of each row, those of a row one after another; keys and values [rows, length, kv_heads, head_dim]; ``rotation``
    cosines and sines of the places [places, ..., head_dim / 2] -> [n, heads, head_dim]. ``neighbours``: elements 2 i
    and 2 i + 1 of a head are a pair, in place of i and i + head_dim / 2; keys are then kept in another order. One
    program holds all places before ``start`` at once, so they should be few.
    """
    need_contiguous(keys=keys, values=values)
    qkv = qkv.contiguous()
    cosine, sine = rotation
    rows, length, kv_heads, head_dim = keys.shape
    n, parts = qkv.shape[-2], qkv.shape[0] if qkv.dim() == 3 else 1
    count = cosine.shape[0]
    out = keys.new_empty(n, heads, head_dim)
    q_weight, k_weight = norms if norms is not None else (qkv, qkv)
    before = max(16, triton.next_power_of_2(start)) if start else 0
    early = launches_early(qkv.device)
    _attend[(rows, kv_heads)](
        qkv,
        q_weight,
        k_weight,
        cosine,
        sine,
        keys,
        values,
        out,
        eps,
        head_dim**-0.5 * 1.4426950408889634,
        start,
        length,
        qkv.stride(0),
        cosine.stride(0),
        cosine.stride(-1),
        parts,
        count,
        heads,
        kv_heads,
        head_dim // 2,
        max(16, triton.next_power_of_2(head_dim // 2)),
        triton.next_power_of_2(count * heads // kv_heads),
        before,
        norms is not None,
        neighbours,
        "ieee" if keys.dtype.itemsize == 4 else "tf32",
        early,
        num_warps=4,
        **pdl(early),
    )
    return out
