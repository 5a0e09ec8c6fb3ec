"""Paged attention: one row of each sequence (decode), and tiles of rows of one sequence (prefill)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sgl_omni.engine.kernels.elementwise import launches_early, need_contiguous, pdl, prefetch_l2
from sgl_omni.engine.tiles import TILE_ROWS

_DECODE_TILE = 64
_PREFILL_TILE = 64
_MAX_SPLITS = 16
_ENOUGH_PROGRAMS = 512
_INTERPRETED_PROCESSORS = 4


@triton.jit
def _decode(
    q,
    keys,
    values,
    tables,
    rows,
    positions,
    out,
    partial,
    tiled,
    scale,
    window,
    table_stride,
    splits,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    SPLIT: tl.constexpr,
    TILED: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * AT_ONCE
    split = tl.program_id(2)
    member = tl.arange(0, 16)
    d = tl.arange(0, HEAD_BLOCK)
    # Heads of a group that is smaller than a tensor core's 16 rows are padded with copies of nothing.
    is_member = (member < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    length = (tl.load(positions + row) + 1).to(tl.int32)
    table = tables + tl.load(rows + row) * table_stride
    first = tl.maximum(length - window, 0)
    share = tl.cdiv(tl.cdiv(length - first, splits), TILE) * TILE
    start = first + split * share
    stop = tl.minimum(length, start + share)
    tiles = tl.maximum(tl.cdiv(stop - start, TILE), 1)
    if TILED:
        # Rows that are in tiles are the other kernel's; they have nothing to see here.
        is_tiled = (row >= tl.load(tiled)) & (row < tl.load(tiled + 1))
        stop = tl.where(is_tiled, start, stop)
        tiles = tl.where(is_tiled, 0, tiles)
    if EARLY:
        # What earlier steps wrote is on its way before the kernel in front has written this step's own.
        if stop > start:
            early = start + tl.arange(0, TILE)
            page_of = tl.load(table + early // PAGE, mask=early < stop, other=0).to(tl.int64)
            line = tl.arange(0, HEAD_BLOCK // 64 if HEAD_BLOCK >= 64 else 1) * 64
            early_place = ((page_of * PAGE + early % PAGE) * KV_HEADS + first_head)[:, None] * HEAD_DIM + line[None, :]
            prefetch_l2(keys + early_place)
            prefetch_l2(values + early_place)
        gdc_wait()
        gdc_launch_dependents()
    highest = tl.full([16], -1.0e30, tl.float32)
    total = tl.zeros([16], tl.float32)
    acc = tl.zeros([16, HEAD_BLOCK], tl.float32)
    # One loop over the tiles of all heads, so that loads go on where one head ends and the next begins.
    for i in range(AT_ONCE * tiles):
        tile = i % tiles
        kv_head = first_head + i // tiles
        q_at = (row * HEADS + kv_head * GROUP + member)[:, None] * HEAD_DIM + d[None, :]
        query = tl.load(q + q_at, mask=is_member, other=0.0)
        position = start + tile * TILE + tl.arange(0, TILE)
        seen = position < stop
        page = tl.load(table + position // PAGE, mask=seen, other=0).to(tl.int64)
        place = ((page * PAGE + position % PAGE) * KV_HEADS + kv_head)[:, None] * HEAD_DIM + d[None, :]
        inside = seen[:, None] & (d < HEAD_DIM)[None, :]
        k = tl.load(keys + place, mask=inside, other=0.0)
        v = tl.load(values + place, mask=inside, other=0.0)
        scores = tl.dot(query, tl.trans(k), input_precision=PRECISION) * scale
        scores = tl.where(seen[None, :], scores, -1.0e30)
        before = tl.where(tile == 0, -1.0e30, highest)
        highest = tl.maximum(before, tl.max(scores, 1))
        weight = tl.where(seen[None, :], tl.exp2(scores - highest[:, None]), 0.0)
        kept = tl.where(tile == 0, 0.0, tl.exp2(before - highest))
        total = total * kept + tl.sum(weight, 1)
        acc = acc * kept[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
        if tile == tiles - 1:
            if SPLIT:
                # [row, split, head, head_dim + 2]: the sum, and what is needed to weigh it
                base = ((row * splits + split) * HEADS + kv_head * GROUP + member) * (HEAD_DIM + 2)
                tl.store(partial + base[:, None] + d[None, :], acc, mask=is_member)
                tl.store(partial + base + HEAD_DIM, highest, mask=member < GROUP)
                tl.store(partial + base + HEAD_DIM + 1, total, mask=member < GROUP)
            else:
                tl.store(out + q_at, (acc / total[:, None]).to(out.dtype.element_ty), mask=is_member)


@triton.jit
def _combine(
    partial, out, splits, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, HEAD_BLOCK)
    inside = d < HEAD_DIM
    highest = tl.full([1], -1.0e30, tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([HEAD_BLOCK], tl.float32)
    for split in range(splits):
        base = partial + ((row * splits + split) * HEADS + head) * (HEAD_DIM + 2)
        part_highest = tl.load(base + HEAD_DIM)
        part_total = tl.load(base + HEAD_DIM + 1)
        new_highest = tl.maximum(highest, part_highest)
        kept = tl.exp2(highest - new_highest)
        added = tl.exp2(part_highest - new_highest)
        total = total * kept + part_total * added
        acc = acc * kept + tl.load(base + d, mask=inside, other=0.0) * added
        highest = new_highest
    tl.store(out + (row * HEADS + head) * HEAD_DIM + d, (acc / total).to(out.dtype.element_ty), mask=inside)


def splits_for(rows: int, kv_heads: int, device: torch.device) -> int:
    """Parts of each sequence, so that a small batch still fills the GPU."""
    if rows == 0:
        return 1
    on_gpu = device.type == "cuda"
    processors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else _INTERPRETED_PROCESSORS
    return max(1, min(_MAX_SPLITS, 2 * processors // (rows * kv_heads)))


def _heads_at_once(programs: int, kv_heads: int) -> int:
    """KV heads for one program: two, where that leaves programs enough for the GPU."""
    return 2 if kv_heads % 2 == 0 and programs * kv_heads >= 2 * _ENOUGH_PROGRAMS else 1


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    rows: Tensor,
    positions: Tensor,
    window: int | None,
    splits: int,
    out: Tensor,
    tiled: Tensor | None = None,
) -> None:
    """Each row of q sees the positions up to its own of the pages in row ``rows`` of the tables.

    q and out [n, heads, head_dim], keys and values [pages, page_size, kv_heads, head_dim], tables int32 [requests,
    pages of a sequence], rows and positions int64 [n or more]. ``tiled`` int64 [2]: the rows from one to before the
    other are left out.
    """
    need_contiguous(keys=keys, values=values, out=out)
    q = q.contiguous()
    n, heads, head_dim = q.shape
    page, kv_heads = keys.shape[1], keys.shape[2]
    block = max(16, triton.next_power_of_2(head_dim))
    partial = q.new_empty(n, splits, heads, head_dim + 2, dtype=torch.float32) if splits > 1 else out
    group, early = heads // kv_heads, launches_early(q.device)
    if group > 16:
        raise ValueError(f"{group} query heads share a KV head; the kernel takes up to 16")
    at_once = _heads_at_once(n * splits, kv_heads)
    _decode[(n, kv_heads // at_once, splits)](
        q,
        keys,
        values,
        tables,
        rows,
        positions,
        out,
        partial,
        positions if tiled is None else tiled,
        head_dim**-0.5 * 1.4426950408889634,
        window or 2**30,
        tables.stride(0),
        splits,
        heads,
        kv_heads,
        group,
        head_dim,
        block,
        page,
        _DECODE_TILE,
        at_once,
        splits > 1,
        tiled is not None,
        "ieee" if q.dtype == torch.float32 else "tf32",
        early,
        num_warps=4,
        num_stages=3,
        **pdl(early),
    )
    if splits > 1:
        _combine[(n, heads)](partial, out, splits, heads, head_dim, block, early, num_warps=1, **pdl(early))


@triton.jit
def _prefill(
    q,
    keys,
    values,
    tables,
    rows,
    positions,
    tiles,
    out,
    scale,
    window,
    table_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    first_row = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
    count = tl.load(tiles + 2 * tl.program_id(0) + 1).to(tl.int32)
    head = tl.program_id(1)
    kv_head = head // GROUP
    i = tl.arange(0, ROWS)
    d = tl.arange(0, HEAD_BLOCK)
    q_at = ((first_row + i) * HEADS + head)[:, None] * HEAD_DIM + d[None, :]
    q_inside = (i < count)[:, None] & (d < HEAD_DIM)[None, :]
    query = tl.load(q + q_at, mask=q_inside, other=0.0)
    start = tl.load(positions + first_row).to(tl.int32)
    table = tables + tl.load(rows + first_row) * table_stride
    q_position = start + i
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_BLOCK], tl.float32)
    lowest = tl.maximum(start - window + 1, 0) // TILE * TILE
    stop = tl.where(count > 0, start + count, 0)
    for at in range(lowest, stop, TILE):
        position = at + tl.arange(0, TILE)
        known = position < stop
        page = tl.load(table + position // PAGE, mask=known, other=0).to(tl.int64)
        place = ((page * PAGE + position % PAGE) * KV_HEADS + kv_head)[:, None] * HEAD_DIM + d[None, :]
        inside = known[:, None] & (d < HEAD_DIM)[None, :]
        k = tl.load(keys + place, mask=inside, other=0.0)
        v = tl.load(values + place, mask=inside, other=0.0)
        scores = tl.dot(query, tl.trans(k), input_precision=PRECISION) * scale
        distance = q_position[:, None] - position[None, :]
        # A finite floor: a row whose window begins in a later tile has seen nothing yet.
        scores = tl.where((distance >= 0) & (distance < window), scores, -1.0e30)
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weight = tl.where(scores > -1.0e29, tl.exp2(scores - new_highest[:, None]), 0.0)
        kept = tl.exp2(highest - new_highest)
        total = total * kept + tl.sum(weight, 1)
        acc = acc * kept[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
        highest = new_highest
    tl.store(out + q_at, (acc / total[:, None]).to(out.dtype.element_ty), mask=q_inside)


def prefill_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    rows: Tensor,
    positions: Tensor,
    tiles: Tensor,
    window: int | None,
    out: Tensor,
) -> None:
    """Writes to ``out`` the attention of the rows of ``tiles`` int64 [tiles, 2], each up to its own position.

    A tile is a first row and ``TILE_ROWS`` rows or fewer of one sequence; one of no rows is passed over. The other
    arguments are those of ``decode_attention``.
    """
    need_contiguous(keys=keys, values=values, out=out)
    q = q.contiguous()
    _, heads, head_dim = q.shape
    page, kv_heads = keys.shape[1], keys.shape[2]
    _prefill[(tiles.shape[0], heads)](
        q,
        keys,
        values,
        tables,
        rows,
        positions,
        tiles,
        out,
        head_dim**-0.5 * 1.4426950408889634,
        window or 2**30,
        tables.stride(0),
        heads,
        kv_heads,
        heads // kv_heads,
        head_dim,
        max(16, triton.next_power_of_2(head_dim)),
        page,
        TILE_ROWS,
        _PREFILL_TILE,
        "ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=2,
    )
