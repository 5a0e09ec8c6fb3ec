"""Chooses one id of each row and column without sorting: thresholds are found bit by bit.

A small vocabulary is held by one program at once. Of a larger one each program takes a part first: it says the best of
it, or for a request with a small top-k the few that may be among these; then one program a row chooses from what the
parts said. Only where neither is enough (top-p without top-k, or a large top-k) it goes over the whole row again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_omni.engine.device_rows import Field
from sgl_omni.engine.sampler import is_no_choice

LARGEST_AT_ONCE = 8192
"""Ids that one program holds."""
_PART = 4096
"""Ids of a large vocabulary that one program looks at first."""
_CANDIDATES = 64
"""Largest top-k of which each part hands on all that may be among these."""


@triton.jit
def _mix(x):
    x = x + 0x9E3779B9
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def _number(x):
    """What is no number is never chosen."""
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def _read(place, inside):
    return _number(tl.load(place, mask=inside, other=float("-inf")).to(tl.float32))


@triton.jit
def _in_order(x, inside, BITS: tl.constexpr):
    """Unsigned numbers in the order of float32 logits, above 0; those of 16 bits differ in the upper half only."""
    bits = x.to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000
    return tl.where(inside, (ordered >> (32 - BITS)) << (32 - BITS), 0)


@triton.jit
def _logit(ordered):
    """The logit of a number in order, as ``_in_order`` has it."""
    bits = (ordered ^ 0x80000000).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _scaled(x, temperature):
    return x / tl.minimum(tl.maximum(temperature, 1e-5), 1e5)


@triton.jit
def _largest(ordered, weights, wanted, BITS: tl.constexpr):
    """The largest threshold at or above which lie ``wanted`` of the weights, found bit by bit from the top."""
    threshold = tl.zeros([1], tl.uint32)
    for bit in range(BITS):
        candidate = threshold | (tl.full([1], 0x80000000, tl.uint32) >> bit)
        above = tl.sum(tl.where(ordered >= candidate, weights, 0.0), 0)
        threshold = tl.where(above >= wanted, candidate, threshold)
    return threshold


@triton.jit
def _first_k(ordered, inside, top_k, BITS: tl.constexpr):
    """The ``top_k`` largest; of equal ones the first."""
    threshold = _largest(ordered, inside.to(tl.float32), top_k, BITS)
    higher = inside & (ordered > threshold)
    tie = inside & (ordered == threshold)
    room = top_k - tl.sum(higher.to(tl.int32), 0)
    return higher | (tie & (tl.cumsum(tie.to(tl.int32), 0) <= room))


@triton.jit
def _kept(x, ordered, inside, top_k, top_p, vocabulary, BITS: tl.constexpr):
    """What top-k and top-p leave of the scaled logits x."""
    kept = inside
    if (top_k > 0) & (top_k < vocabulary):
        kept = _first_k(ordered, inside, top_k, BITS)
    if top_p < 1:
        weight = tl.where(kept, tl.exp(x - tl.max(x, 0)), 0.0)
        share = weight / tl.sum(weight, 0)
        threshold = _largest(ordered, share, top_p, BITS)
        higher = kept & (ordered > threshold)
        tie = kept & (ordered == threshold)
        tied = tl.where(tie, share, 0.0)
        before = tl.sum(tl.where(higher, share, 0.0), 0) + tl.cumsum(tied, 0) - tied
        kept = higher | (tie & (before < top_p))
    return kept


@triton.jit
def _key(state, column, SEED: tl.constexpr, STEP: tl.constexpr, DRAWN: tl.constexpr):
    """Of the draws of a row's column."""
    seed = tl.load(state + SEED).to(tl.uint32, bitcast=True)
    key = _mix(seed ^ (tl.load(state + STEP) + tl.load(state + DRAWN)).to(tl.uint32, bitcast=True))
    return _mix(key ^ (column.to(tl.uint32) * 0x632BE5AB))


@triton.jit
def _noisy(x, ids, kept, key):
    uniform = ((_mix(key ^ ids.to(tl.uint32)) >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return tl.where(kept, x - tl.log(-tl.log(uniform)), float("-inf"))


@triton.jit
def _choose(out, drawn, vocabulary):
    """Whatever the logits were, an id is one."""
    tl.store(out, tl.minimum(tl.maximum(drawn, 0), vocabulary - 1).to(tl.int64))


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
    x = _number(x)
    temperature = tl.load(state + TEMPERATURE).to(tl.float32, bitcast=True)
    top_k = tl.load(state + TOP_K)
    if (temperature == 0) | (top_k == 1):
        first = tl.argmax(x, 0, tie_break_left=True)
        _choose(out + row * columns + column, first, vocabulary)
        return
    ordered = _in_order(x, inside, BITS)
    x = _scaled(x, temperature)
    top_p = tl.load(state + TOP_P).to(tl.float32, bitcast=True)
    kept = _kept(x, ordered, inside, top_k, top_p, vocabulary, BITS)
    key = _key(state, column + first_column, SEED, STEP, DRAWN)
    drawn = tl.argmax(_noisy(x, i, kept, key), 0, tie_break_left=True)
    _choose(out + row * columns + column, drawn, vocabulary)


@triton.jit(do_not_specialize=["first_column"])
def _sample_parts(
    logits,
    fields,
    rows,
    ends,
    best,
    ids,
    counts,
    vocabulary,
    columns,
    width,
    first_column,
    TEMPERATURE: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    SEED: tl.constexpr,
    STEP: tl.constexpr,
    DRAWN: tl.constexpr,
    BITS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of each part: its best and where that is, or all of it that may be among the row's top-k, in the order of ids."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1)
    state = fields + tl.load(rows + tl.load(ends + row)) * width
    part = (row * columns + column) * tl.num_programs(2) + tl.program_id(2)
    i = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = i < vocabulary
    x = _read(logits + (row * columns + column) * vocabulary + i, inside)
    temperature = tl.load(state + TEMPERATURE).to(tl.float32, bitcast=True)
    top_k = tl.load(state + TOP_K)
    top_p = tl.load(state + TOP_P).to(tl.float32, bitcast=True)
    chosen = x
    if (temperature != 0) & (top_k > 1) & (top_k <= CANDIDATES):
        kept = _first_k(_in_order(x, inside, BITS), inside, top_k, BITS)
        place = part * CANDIDATES + tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(best + place, x, mask=kept)
        tl.store(ids + place, i, mask=kept)
        tl.store(counts + part, tl.sum(kept.to(tl.int32), 0))
        return
    if (temperature != 0) & (top_k != 1) & (top_p >= 1) & ((top_k <= 0) | (top_k >= vocabulary)):
        chosen = _noisy(_scaled(x, temperature), i, inside, _key(state, column + first_column, SEED, STEP, DRAWN))
    tl.store(best + part * CANDIDATES, tl.max(chosen, 0))
    first = tl.argmax(chosen, 0, tie_break_left=True)
    tl.store(ids + part * CANDIDATES, tl.program_id(2) * BLOCK + first)


@triton.jit
def _piece(row, start, vocabulary, temperature, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Ids from ``start`` on, which of them there are, their logits scaled, and those as numbers in order."""
    i = start + tl.arange(0, BLOCK)
    inside = i < vocabulary
    x = _read(row + i, inside)
    return i, inside, _scaled(x, temperature), _in_order(x, inside, BITS)


@triton.jit
def _is_left(i, ordered, least, cut):
    """Ids above ``least``, and those equal to it up to the id ``cut``."""
    return (ordered > least) | ((ordered == least) & (i <= cut))


@triton.jit
def _weight(i, x, ordered, top, least, cut, WEIGHED: tl.constexpr):
    """1 of each that is left, or exp(x - top)."""
    return tl.where(_is_left(i, ordered, least, cut), tl.exp(x - top) if WEIGHED else 1.0, 0.0)


@triton.jit
def _row_above(
    row, vocabulary, temperature, top, least, cut, than, WEIGHED: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr
):
    """The weights of what is left above a threshold."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        i, inside, x, ordered = _piece(row, start, vocabulary, temperature, BITS, BLOCK)
        weight = _weight(i, x, ordered, top, least, cut, WEIGHED)
        total += tl.where(inside & (ordered > than), weight, 0.0)
    return tl.sum(total, 0)


@triton.jit
def _row_largest(
    row, vocabulary, temperature, top, least, cut, wanted,
    WEIGHED: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As ``_largest``, of what is left of a whole row, two bits each time that it is gone over."""
    threshold = tl.zeros([1], tl.uint32)
    for pair in range(BITS // 2):
        one = threshold | (tl.full([1], 0x40000000, tl.uint32) >> (2 * pair))
        two = threshold | (tl.full([1], 0x80000000, tl.uint32) >> (2 * pair))
        three = one | two
        above_one = tl.zeros([BLOCK], tl.float32)
        above_two = tl.zeros([BLOCK], tl.float32)
        above_three = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocabulary, BLOCK):
            i, inside, x, ordered = _piece(row, start, vocabulary, temperature, BITS, BLOCK)
            weight = _weight(i, x, ordered, top, least, cut, WEIGHED)
            above_one += tl.where(inside & (ordered >= one), weight, 0.0)
            above_two += tl.where(inside & (ordered >= two), weight, 0.0)
            above_three += tl.where(inside & (ordered >= three), weight, 0.0)
        lower = tl.where(tl.sum(above_one, 0) >= wanted, one, threshold)
        threshold = tl.where(tl.sum(above_two, 0) >= wanted, two, lower)
        threshold = tl.where(tl.sum(above_three, 0) >= wanted, three, threshold)
    return threshold


@triton.jit
def _row_cut(row, vocabulary, temperature, threshold, room, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """The last id of the first ``room`` that are equal to a threshold."""
    cut = -1
    seen = 0
    for start in range(0, vocabulary, BLOCK):
        i, inside, _, ordered = _piece(row, start, vocabulary, temperature, BITS, BLOCK)
        tie = (inside & (ordered == threshold)).to(tl.int32)
        within = (tie != 0) & (seen + tl.cumsum(tie, 0) <= room)
        cut = tl.maximum(cut, tl.max(tl.where(within, i, -1), 0))
        seen += tl.sum(tie, 0)
    return cut


@triton.jit(do_not_specialize=["first_column", "parts"])
def _sample_rows(
    logits,
    fields,
    rows,
    ends,
    best,
    ids,
    counts,
    out,
    parts,
    vocabulary,
    columns,
    width,
    first_column,
    TEMPERATURE: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    SEED: tl.constexpr,
    STEP: tl.constexpr,
    DRAWN: tl.constexpr,
    BITS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Chooses of each row from what its parts said."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1)
    state = fields + tl.load(rows + tl.load(ends + row)) * width
    at = row * columns + column
    temperature = tl.load(state + TEMPERATURE).to(tl.float32, bitcast=True)
    top_k = tl.load(state + TOP_K)
    top_p = tl.load(state + TOP_P).to(tl.float32, bitcast=True)
    limited = (top_k > 0) & (top_k < vocabulary)
    key = _key(state, column + first_column, SEED, STEP, DRAWN)
    part = tl.arange(0, PARTS)
    if (top_k <= 1) | (top_k > CANDIDATES) | (temperature == 0):
        most = tl.load(best + (at * parts + part) * CANDIDATES, mask=part < parts, other=float("-inf"))
        if (temperature == 0) | (top_k == 1) | ((top_p >= 1) & (limited == 0)):
            chosen = tl.minimum(tl.argmax(most, 0, tie_break_left=True), parts - 1)
            _choose(out + at, tl.load(ids + (at * parts + chosen) * CANDIDATES), vocabulary)
            return
        whole = logits + at * vocabulary
        top = _scaled(tl.max(most, 0), temperature)
        none = tl.zeros([1], tl.uint32)
        least = none
        cut = vocabulary
        if limited:
            least = _row_largest(whole, vocabulary, temperature, top, none, cut, top_k, False, BITS, BLOCK)
            more = _row_above(whole, vocabulary, temperature, top, none, cut, least, False, BITS, BLOCK)
            cut = _row_cut(whole, vocabulary, temperature, least, top_k - more.to(tl.int32), BITS, BLOCK)
        if top_p < 1:
            wanted = top_p * _row_above(whole, vocabulary, temperature, top, least, cut, none, True, BITS, BLOCK)
            edge = _row_largest(whole, vocabulary, temperature, top, least, cut, wanted, True, BITS, BLOCK)
            higher = _row_above(whole, vocabulary, temperature, top, least, cut, edge, True, BITS, BLOCK)
            # Equal ones weigh the same, so that their weight says how many of them are wanted.
            room = tl.ceil((wanted - higher) / tl.exp(_scaled(_logit(edge), temperature) - top))
            room = tl.minimum(tl.maximum(tl.max(room, 0), 1.0), vocabulary).to(tl.int32)
            first = _row_cut(whole, vocabulary, temperature, edge, room, BITS, BLOCK)
            cut = tl.where(tl.max(edge, 0) == tl.max(least, 0), tl.minimum(first, cut), first)
            least = edge
        most_here = tl.full([BLOCK], float("-inf"), tl.float32)
        id_here = tl.arange(0, BLOCK)
        for start in range(0, vocabulary, BLOCK):
            i, inside, x, ordered = _piece(whole, start, vocabulary, temperature, BITS, BLOCK)
            noisy = _noisy(x, i, inside & _is_left(i, ordered, least, cut), key)
            better = noisy > most_here
            id_here = tl.where(better, i, id_here)
            most_here = tl.where(better, noisy, most_here)
        _choose(out + at, tl.min(tl.where(most_here == tl.max(most_here, 0), id_here, vocabulary), 0), vocabulary)
        return
    place = tl.arange(0, PARTS * CANDIDATES)
    count = tl.load(counts + at * parts + place // CANDIDATES, mask=place // CANDIDATES < parts, other=0)
    is_one = place % CANDIDATES < count
    logit = tl.load(best + at * parts * CANDIDATES + place, mask=is_one, other=float("-inf"))
    candidate = tl.load(ids + at * parts * CANDIDATES + place, mask=is_one, other=0)
    x = _scaled(logit, temperature)
    kept = _kept(x, _in_order(logit, is_one, BITS), is_one, top_k, top_p, vocabulary, BITS)
    noisy = _noisy(x, candidate, kept, key)
    _choose(out + at, tl.min(tl.where(noisy == tl.max(noisy, 0), candidate, vocabulary), 0), vocabulary)


@triton.jit
def _penalise(logits, seen, fields, rows, ends, vocabulary, width, PENALTY: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    own = tl.load(rows + tl.load(ends + row))
    penalty = tl.load(fields + own * width + PENALTY).to(tl.float32, bitcast=True)
    if penalty == 1:
        return
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = logits + row * vocabulary + i
    was_seen = tl.load(seen + own * vocabulary + i, mask=i < vocabulary, other=0) != 0
    x = tl.load(place, mask=was_seen, other=0.0).to(tl.float32)
    tl.store(place, tl.where(x < 0, x * penalty, tl.div_rn(x, penalty)).to(logits.dtype.element_ty), mask=was_seen)


def penalise(logits: Tensor, seen: Tensor, fields: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """As ``sgl_omni.engine.repetition.penalise``, in place, with the penalties of the state; returns ``logits``.

    logits [s, vocabulary], contiguous; seen bool [rows of state, vocabulary], the others as ``sample`` has them. Of
    rows whose penalty is 1 nothing is read.
    """
    s, vocabulary = logits.shape
    grid = (s, triton.cdiv(vocabulary, _PART))
    flags = seen.view(torch.uint8)
    _penalise[grid](logits, flags, fields, rows, ends, vocabulary, fields.shape[1], int(Field.PENALTY), _PART)
    return logits


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
    given = (logits.contiguous(), fields, rows, ends)
    sizes = (vocabulary, columns, fields.shape[1], first_column)
    names = (Field.TEMPERATURE, Field.TOP_K, Field.TOP_P, Field.SEED, Field.STEP, Field.DRAWN)
    constants = (*map(int, names), 16 if logits.dtype == torch.bfloat16 else 32)
    if vocabulary <= LARGEST_AT_ONCE:
        block = triton.next_power_of_2(vocabulary)
        noting = (out if lost is None else lost, *sizes, lost is not None)
        _sample[(s, columns)](*given, out, *noting, *constants, block, num_warps=4 if block <= 2048 else 8)
        return out
    if lost is not None:
        lost |= is_no_choice(logits)[:, 0]
    parts = triton.cdiv(vocabulary, _PART)
    best = torch.empty(s, columns, parts, _CANDIDATES, device=logits.device)
    ids = torch.empty(s, columns, parts, _CANDIDATES, dtype=torch.int32, device=logits.device)
    counts = torch.empty(s, columns, parts, dtype=torch.int32, device=logits.device)
    said = (best, ids, counts)
    _sample_parts[(s, columns, parts)](*given, *said, *sizes, *constants, _CANDIDATES, _PART, num_warps=8)
    most = triton.next_power_of_2(parts)
    _sample_rows[(s, columns)](
        *given, *said, out, parts, *sizes, *constants, _CANDIDATES, most, LARGEST_AT_ONCE, num_warps=16
    )
    return out
