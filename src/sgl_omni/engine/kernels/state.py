"""What happens to the rows' state before and after the layers, each in one kernel instead of a dozen small ones."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_omni.engine.device_rows import Field
from sgl_omni.engine.kernels.elementwise import need_contiguous

_POSITION = tl.constexpr(int(Field.POSITION))
_ROPE_OFFSET = tl.constexpr(int(Field.ROPE_OFFSET))
_STEP = tl.constexpr(int(Field.STEP))
_END = tl.constexpr(int(Field.END))
_LIMIT = tl.constexpr(int(Field.LIMIT))
_FIELDS = tl.constexpr(len(Field))
_HANDED_AT_ONCE = 1024


@triton.jit
def _begin(
    rows,
    given,
    given_ids,
    fields,
    tables,
    positions,
    rope_positions,
    slots,
    ids,
    width,
    pages,
    PAGE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + i)
    told = tl.load(given + i)
    state = fields + row * width
    position = tl.where(told >= 0, told, tl.load(state + _POSITION).to(tl.int64))
    page = tl.load(tables + row * pages + position // PAGE).to(tl.int64)
    tl.store(positions + i, position)
    tl.store(rope_positions + i, position + tl.load(state + _ROPE_OFFSET))
    tl.store(slots + i, page * PAGE + position % PAGE)
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    known = tl.load(given_ids + i * COLUMNS + column, mask=inside, other=0)
    last = tl.load(state + _FIELDS + column, mask=inside, other=0).to(tl.int64)
    tl.store(ids + i * COLUMNS + column, tl.where(told >= 0, known, last), mask=inside)


def begin(
    rows: Tensor, given: Tensor, given_ids: Tensor, fields: Tensor, tables: Tensor, page_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As ``device_step.begin_rows``."""
    n, columns = given_ids.shape
    positions, rope_positions, slots = torch.empty(3, n, dtype=torch.int64, device=rows.device).unbind()
    ids = torch.empty_like(given_ids)
    _begin[(n,)](
        rows,
        given,
        given_ids,
        fields,
        tables,
        positions,
        rope_positions,
        slots,
        ids,
        fields.shape[1],
        tables.shape[1],
        page_size,
        columns,
        triton.next_power_of_2(columns),
        num_warps=1,
    )
    return positions, rope_positions, slots, ids


@triton.jit
def _advance(
    chosen,
    rows,
    ends,
    targets,
    positions,
    fields,
    delays,
    width,
    eos,
    pad,
    HAS_PATTERN: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    at = tl.load(ends + i)
    before = fields + tl.load(rows + at) * width
    after = fields + tl.load(targets + i) * width
    step = tl.load(before + _STEP)
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    ids = tl.load(chosen + i * COLUMNS + column, mask=inside, other=0)
    if HAS_PATTERN:
        end = tl.load(before + _END)
        first = tl.load(chosen + i * COLUMNS)
        end = tl.where((end < 0) & ((first == eos) | (step >= tl.load(before + _LIMIT))), step, end)
        late = step - tl.load(delays + column, mask=inside, other=0)
        outside = (late < 0) | ((end >= 0) & (late >= end))
        ids = tl.where(outside, tl.where((step == end) & (column == 0), eos, pad), ids)
        tl.debug_barrier()
        tl.store(chosen + i * COLUMNS + column, ids, mask=inside)
        tl.store(after + _END, end)
    tl.store(after + _POSITION, (tl.load(positions + at) + 1).to(tl.int32))
    tl.store(after + _STEP, step + 1)
    tl.store(after + _FIELDS + column, ids.to(tl.int32), mask=inside)


def advance(
    chosen: Tensor,
    rows: Tensor,
    ends: Tensor,
    targets: Tensor,
    positions: Tensor,
    fields: Tensor,
    pattern: tuple[Tensor, int, int] | None,
) -> None:
    """As ``device_step.advance_rows``. ``pattern``: delays int32 [columns], and the ids of end and padding."""
    s, columns = chosen.shape
    delays, eos, pad = pattern if pattern is not None else (chosen, 0, 0)
    _advance[(s,)](
        chosen,
        rows,
        ends,
        targets,
        positions,
        fields,
        delays,
        fields.shape[1],
        eos,
        pad,
        pattern is not None,
        columns,
        triton.next_power_of_2(columns),
        num_warps=1,
    )


@triton.jit
def _hand_out(ids, ring, written, count, size, places, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(written) % places
    tl.store(ring + place * size + at, tl.load(ids + at, mask=at < count), mask=at < count)


def hand_out(ids: Tensor, ring: Tensor, written: Tensor) -> None:
    """ids int64 [n, columns] to the place of ``ring`` int64 [places, rows, columns] that comes after so many as
    ``written`` int64 [1] says. On a GPU the ring may be pinned memory of the host."""
    if not ids.numel():
        return
    ids = ids.contiguous()
    places, rows, columns = ring.shape
    grid = (triton.cdiv(ids.numel(), _HANDED_AT_ONCE),)
    _hand_out[grid](ids, ring, written, ids.numel(), rows * columns, places, _HANDED_AT_ONCE)


@triton.jit
def _embed(ids, offsets, table, out, width, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < width
    total = tl.zeros([BLOCK], tl.float32)
    for column in range(COLUMNS):
        row = tl.load(ids + i * COLUMNS + column) + tl.load(offsets + column)
        total += tl.load(table + row * width + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + i * width + d, total.to(out.dtype.element_ty), mask=inside)


def embed(ids: Tensor, offsets: Tensor, table: Tensor) -> Tensor:
    """ids and offsets int64 [n, columns] and [columns], table [rows, width] -> the rows' sums [n, width]."""
    ids = ids.contiguous()
    n, columns = ids.shape
    width = table.shape[1]
    out = table.new_empty(n, width)
    _embed[(n, triton.cdiv(width, 512))](ids, offsets, table, out, width, columns, 512, num_warps=2)
    return out


@triton.jit
def _add_arrived(
    x, rows, given, fields, ring, fallback, counts, width, state_width, PLACES: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64)
    if tl.load(given + i) >= 0:
        return
    row = tl.load(rows + i)
    output = tl.maximum(tl.load(fields + row * state_width + _STEP) - 1, 0)
    arrived = output < tl.load(counts + row)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < width
    value = tl.load(
        ring + (row * PLACES + output % PLACES) * width + d, mask=d < tl.where(arrived, width, 0), other=0.0
    )
    value += tl.load(fallback + row * width + d, mask=d < tl.where(arrived, 0, width), other=0.0)
    at = x + i * width + d
    tl.store(at, tl.load(at, mask=inside, other=0.0) + value, mask=inside)


def add_arrived(
    x: Tensor, rows: Tensor, given: Tensor, fields: Tensor, ring: Tensor, fallback: Tensor, counts: Tensor
) -> None:
    """As ``AddedRows.add``, in place: ring [rows, places, hidden], fallback [rows, hidden], counts int64 [rows]."""
    need_contiguous(x=x, ring=ring, fallback=fallback)
    n, width = x.shape
    _add_arrived[(n, triton.cdiv(width, 512))](
        x, rows, given, fields, ring, fallback, counts, width, fields.shape[1], ring.shape[1], 512, num_warps=2
    )
