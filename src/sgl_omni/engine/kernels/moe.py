"""A mixture of experts as grouped products: the rows of each expert together, with shapes that the host knows.

Pairs (row, choice) are ordered by their experts on the device. As each row chooses an expert once at most, every expert
gets as many tiles as all rows could need; the programs of tiles that are empty end at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_SCAN = 1024
_OUTPUTS = 64
_INPUTS = 64


@triton.jit(do_not_specialize=["pairs"])
def _order(experts, order, starts, pairs, SCAN: tl.constexpr):
    """One program an expert: where its pairs begin among all, and which they are."""
    expert = tl.program_id(0)
    i = tl.arange(0, SCAN)
    start = 0
    count = 0
    for at in range(0, pairs, SCAN):
        chosen = tl.load(experts + at + i, mask=at + i < pairs, other=2**30)
        start += tl.sum((chosen < expert).to(tl.int32), 0)
    for at in range(0, pairs, SCAN):
        chosen = tl.load(experts + at + i, mask=at + i < pairs, other=2**30)
        mine = (chosen == expert).to(tl.int32)
        place = start + count + tl.cumsum(mine, 0) - mine
        tl.store(order + place, at + i, mask=mine > 0)
        count += tl.sum(mine, 0)
    tl.store(starts + expert, start)
    tl.store(starts + expert + 1, start + count, mask=expert == tl.num_programs(0) - 1)


@triton.jit
def _gate_up(
    x,
    weight,
    order,
    starts,
    out,
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    CHOICES: tl.constexpr,
    PAIRS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    expert = tl.program_id(1).to(tl.int64)
    first = tl.load(starts + expert) + tl.program_id(2) * PAIRS
    stop = tl.load(starts + expert + 1)
    if first >= stop:
        return
    place = first + tl.arange(0, PAIRS)
    known = place < stop
    row = (tl.load(order + place, mask=known, other=0) // CHOICES).to(tl.int64)
    column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    k = tl.arange(0, INPUTS)
    gates = weight + (expert * 2 * WIDTH + column)[None, :] * HIDDEN
    ups = gates + WIDTH * HIDDEN
    gate = tl.zeros([PAIRS, OUTPUTS], tl.float32)
    up = tl.zeros([PAIRS, OUTPUTS], tl.float32)
    for at in range(0, HIDDEN, INPUTS):
        inside = at + k < HIDDEN
        part = tl.load(x + row[:, None] * HIDDEN + at + k[None, :], mask=known[:, None] & inside[None, :], other=0.0)
        there = inside[:, None] & (column < WIDTH)[None, :]
        a = tl.load(gates + at + k[:, None], mask=there, other=0.0)
        b = tl.load(ups + at + k[:, None], mask=there, other=0.0)
        gate = tl.dot(part, a, gate, input_precision=PRECISION)
        up = tl.dot(part, b, up, input_precision=PRECISION)
    dtype = out.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)
    done = (gate * tl.sigmoid(gate)).to(dtype) * up.to(dtype)
    target = out + place.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(target, done, mask=known[:, None] & (column < WIDTH)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _down(
    x,
    weight,
    order,
    starts,
    weights,
    out,
    rows,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    CHOICES: tl.constexpr,
    PAIRS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    expert = tl.program_id(1).to(tl.int64)
    first = tl.load(starts + expert) + tl.program_id(2) * PAIRS
    stop = tl.load(starts + expert + 1)
    if first >= stop:
        return
    place = first + tl.arange(0, PAIRS)
    known = place < stop
    pair = tl.load(order + place, mask=known, other=0)
    column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    k = tl.arange(0, INPUTS)
    source = x + place.to(tl.int64)[:, None] * WIDTH
    lines = weight + (expert * HIDDEN + column)[None, :] * WIDTH
    acc = tl.zeros([PAIRS, OUTPUTS], tl.float32)
    for at in range(0, WIDTH, INPUTS):
        inside = at + k < WIDTH
        part = tl.load(source + at + k[None, :], mask=known[:, None] & inside[None, :], other=0.0)
        there = inside[:, None] & (column < HIDDEN)[None, :]
        acc = tl.dot(part, tl.load(lines + at + k[:, None], mask=there, other=0.0), acc, input_precision=PRECISION)
    share = tl.load(weights + pair, mask=known, other=0.0).to(tl.float32)
    acc = acc.to(x.dtype.element_ty).to(tl.float32) * share[:, None]
    target = out + ((pair % CHOICES).to(tl.int64) * rows + pair // CHOICES)[:, None] * HIDDEN + column[None, :]
    tl.store(target, acc, mask=known[:, None] & (column < HIDDEN)[None, :])


def _pairs_at_once(rows: int, choices: int, experts: int) -> int:
    """Rows of a tile: as many as an expert has when all are chosen alike, but at least a tensor core's 16."""
    return max(16, min(64, triton.next_power_of_2(rows * choices // experts)))


def routed(x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Each row through its experts: float32 [choices, n, hidden], whose sum is the result (``ops.whole``).

    x [n, hidden], experts int64 and weights [n, choices], gate_up [experts, 2 * width, hidden], down [experts, hidden,
    width].
    """
    rows, hidden = x.shape
    choices, count, width = experts.shape[1], down.shape[0], down.shape[2]
    pairs = rows * choices
    order = torch.empty(pairs, dtype=torch.int32, device=x.device)
    starts = torch.empty(count + 1, dtype=torch.int32, device=x.device)
    _order[(count,)](experts.contiguous(), order, starts, pairs, _SCAN, num_warps=4)
    tile = _pairs_at_once(rows, choices, count)
    tiles = triton.cdiv(rows, tile)
    precision = "ieee" if x.dtype == torch.float32 else "tf32"
    activated = x.new_empty(pairs, width)
    _gate_up[(triton.cdiv(width, _OUTPUTS), count, tiles)](
        x.contiguous(),
        gate_up,
        order,
        starts,
        activated,
        width,
        hidden,
        choices,
        tile,
        _OUTPUTS,
        _INPUTS,
        precision,
        num_warps=4,
        num_stages=3,
    )
    out = torch.empty(choices, rows, hidden, dtype=torch.float32, device=x.device)
    _down[(triton.cdiv(hidden, _OUTPUTS), count, tiles)](
        activated,
        down,
        order,
        starts,
        weights.contiguous(),
        out,
        rows,
        hidden,
        width,
        choices,
        tile,
        _OUTPUTS,
        _INPUTS,
        precision,
        num_warps=4,
        num_stages=3,
    )
    return out
