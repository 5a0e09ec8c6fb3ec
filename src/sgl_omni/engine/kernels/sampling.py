"""Chooses one id of each row and column without sorting: thresholds are found bit by bit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_omni.engine.device_rows import Field


@triton.jit
def _mix(x):
    x = x + 0x9E3779B9
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def _largest(ordered, weights, wanted, BITS: tl.constexpr):
    """The largest threshold at or above which lie ``wanted`` of the weights, found bit by bit from the top."""
    threshold = tl.zeros([1], tl.uint32)
    for bit in range(BITS):
        candidate = threshold | (tl.full([1], 0x80000000, tl.uint32) >> bit)
        above = tl.sum(tl.where(ordered >= candidate, weights, 0.0), 0)
        threshold = tl.where(above >= wanted, candidate, threshold)
    return threshold


@triton.jit(do_not_specialize=["first_column"])
def _sample(
    logits,
    fields,
    rows,
    ends,
    out,
    lost,
    vocabulary,
    columns,
    width,
    first_column,
    NOTES: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    SEED: tl.constexpr,
    STEP: tl.constexpr,
    DRAWN: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1)
    state = fields + tl.load(rows + tl.load(ends + row)) * width
    i = tl.arange(0, BLOCK)
    inside = i < vocabulary
    x = tl.load(logits + (row * columns + column) * vocabulary + i, mask=inside, other=float("-inf")).to(tl.float32)
    if NOTES:
        # Forbidden, a number, or neither: there is a choice where a number is the most of all.
        kind = tl.max(tl.where(x < float("inf"), tl.where(x > float("-inf"), 1, 0), 2), 0)
        tl.store(lost + row, 1, mask=kind != 1)
    temperature = tl.load(state + TEMPERATURE).to(tl.float32, bitcast=True)
    top_k = tl.load(state + TOP_K)
    if (temperature == 0) | (top_k == 1):
        first = tl.argmax(x, 0, tie_break_left=True)
        tl.store(out + row * columns + column, tl.minimum(first, vocabulary - 1).to(tl.int64))
        return
    # Unsigned numbers in the order of the logits; those of 16 bits differ in the upper half only.
    bits = x.to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000
    ordered = tl.where(inside, (ordered >> (32 - BITS)) << (32 - BITS), 0)
    x = x / tl.minimum(tl.maximum(temperature, 1e-5), 1e5)
    kept = inside
    if (top_k > 0) & (top_k < vocabulary):
        threshold = _largest(ordered, inside.to(tl.float32), top_k, BITS)
        higher = inside & (ordered > threshold)
        tie = inside & (ordered == threshold)
        room = top_k - tl.sum(higher.to(tl.int32), 0)
        kept = higher | (tie & (tl.cumsum(tie.to(tl.int32), 0) <= room))
    top_p = tl.load(state + TOP_P).to(tl.float32, bitcast=True)
    if top_p < 1:
        weight = tl.where(kept, tl.exp(x - tl.max(x, 0)), 0.0)
        share = weight / tl.sum(weight, 0)
        threshold = _largest(ordered, share, top_p, BITS)
        higher = kept & (ordered > threshold)
        tie = kept & (ordered == threshold)
        tied = tl.where(tie, share, 0.0)
        before = tl.sum(tl.where(higher, share, 0.0), 0) + tl.cumsum(tied, 0) - tied
        kept = higher | (tie & (before < top_p))
    seed = tl.load(state + SEED).to(tl.uint32, bitcast=True)
    key = _mix(seed ^ (tl.load(state + STEP) + tl.load(state + DRAWN)).to(tl.uint32, bitcast=True))
    hashed = _mix(_mix(key ^ ((column + first_column).to(tl.uint32) * 0x632BE5AB)) ^ i.to(tl.uint32))
    uniform = ((hashed >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    noisy = tl.where(kept, x - tl.log(-tl.log(uniform)), float("-inf"))
    drawn = tl.argmax(noisy, 0, tie_break_left=True)
    tl.store(out + row * columns + column, tl.minimum(drawn, vocabulary - 1).to(tl.int64))


def sample(
    logits: Tensor, fields: Tensor, rows: Tensor, ends: Tensor, first_column: int = 0, lost: Tensor | None = None
) -> Tensor:
    """As ``sgl_omni.engine.sampler.sample_masked``, with the options of the state.

    logits [s, columns, vocabulary], fields int32 (``DeviceRows``), rows int64 [n], ends int64 [s]: the state of
    logits i is in row ``rows[ends[i]]`` -> ids int64 [s, columns]. Of logits that are no numbers comes some id of the
    vocabulary; ``lost`` int32 [s], where it is given, becomes 1 there.
    """
    s, columns, vocabulary = logits.shape
    out = torch.empty(s, columns, dtype=torch.int64, device=logits.device)
    block = triton.next_power_of_2(vocabulary)
    _sample[(s, columns)](
        logits.contiguous(),
        fields,
        rows,
        ends,
        out,
        out if lost is None else lost,
        vocabulary,
        columns,
        fields.shape[1],
        first_column,
        lost is not None,
        int(Field.TEMPERATURE),
        int(Field.TOP_K),
        int(Field.TOP_P),
        int(Field.SEED),
        int(Field.STEP),
        int(Field.DRAWN),
        16 if logits.dtype == torch.bfloat16 else 32,
        block,
        num_warps=4 if block <= 2048 else 8,
    )
    return out
