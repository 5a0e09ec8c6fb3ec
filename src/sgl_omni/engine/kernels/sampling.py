"""Chooses one id of each row and column without sorting: thresholds are found bit by bit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _mix(x):
    x = x + 0x9E3779B9
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def _sample(logits, temperatures, top_ks, top_ps, keys, out, vocabulary, columns, option_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1)
    i = tl.arange(0, BLOCK)
    inside = i < vocabulary
    x = tl.load(logits + (row * columns + column) * vocabulary + i, mask=inside, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperatures + row * option_stride)
    top_k = tl.load(top_ks + row * option_stride)
    if (temperature == 0) | (top_k == 1):
        tl.store(out + row * columns + column, tl.argmax(x, 0, tie_break_left=True).to(tl.int64))
        return
    x = x / tl.minimum(tl.maximum(temperature, 1e-5), 1e5)
    bits = x.to(tl.int32, bitcast=True)
    # Unsigned numbers in the order of the floats.
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000
    ordered = tl.where(inside, ordered, 0)
    kept = inside
    if (top_k > 0) & (top_k < vocabulary):
        threshold = tl.zeros([1], tl.uint32)
        for bit in range(32):
            candidate = threshold | (tl.full([1], 0x80000000, tl.uint32) >> bit)
            above = tl.sum((inside & (ordered >= candidate)).to(tl.int32), 0)
            threshold = tl.where(above >= top_k, candidate, threshold)
        higher = inside & (ordered > threshold)
        tie = inside & (ordered == threshold)
        room = top_k - tl.sum(higher.to(tl.int32), 0)
        kept = higher | (tie & (tl.cumsum(tie.to(tl.int32), 0) <= room))
    top_p = tl.load(top_ps + row * option_stride)
    if top_p < 1:
        weight = tl.where(kept, tl.exp(x - tl.max(x, 0)), 0.0)
        share = weight / tl.sum(weight, 0)
        threshold = tl.zeros([1], tl.uint32)
        for bit in range(32):
            candidate = threshold | (tl.full([1], 0x80000000, tl.uint32) >> bit)
            mass = tl.sum(tl.where(ordered >= candidate, share, 0.0), 0)
            threshold = tl.where(mass >= top_p, candidate, threshold)
        higher = kept & (ordered > threshold)
        tie = kept & (ordered == threshold)
        tied = tl.where(tie, share, 0.0)
        before = tl.sum(tl.where(higher, share, 0.0), 0) + tl.cumsum(tied, 0) - tied
        kept = higher | (tie & (before < top_p))
    key = tl.load(keys + row).to(tl.uint32)
    hashed = _mix(_mix(key ^ (column.to(tl.uint32) * 0x632BE5AB)) ^ i.to(tl.uint32))
    uniform = ((hashed >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    noisy = tl.where(kept, x - tl.log(-tl.log(uniform)), float("-inf"))
    tl.store(out + row * columns + column, tl.argmax(noisy, 0, tie_break_left=True).to(tl.int64))


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, keys: Tensor) -> Tensor:
    """As ``sgl_omni.engine.sampler.sample_masked``; the options may be strided, all alike."""
    rows, columns, vocabulary = logits.shape
    out = torch.empty(rows, columns, dtype=torch.int64, device=logits.device)
    block = triton.next_power_of_2(vocabulary)
    _sample[(rows, columns)](
        logits.contiguous(),
        temperature,
        top_k,
        top_p,
        keys,
        out,
        vocabulary,
        columns,
        temperature.stride(0),
        block,
        num_warps=4 if block <= 2048 else 8,
    )
    return out
