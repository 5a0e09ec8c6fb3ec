"""What every Triton kernel must compute, on any device: run by Triton's interpreter, and on a GPU.

Each check returns the largest difference from the reference in plain torch, relative to its largest value.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from sgl_omni.engine.attention import QKV
from sgl_omni.engine.cross_attention import SourcePool, SourceShape, attend_places
from sgl_omni.engine.delay import DelayPattern
from sgl_omni.engine.device_rows import Field
from sgl_omni.engine.device_step import StepInputs, advance_rows, begin_rows
from sgl_omni.engine.fixed_cache import TorchFixedAttend, TritonFixedAttend
from sgl_omni.engine.kernels import attention, elementwise, moe, sampling, state
from sgl_omni.engine.kernels.causal import DepthwiseNorm, carry, with_room
from sgl_omni.engine.kernels.convolution import Convolution, Snake
from sgl_omni.engine.kv_cache import KVCache, KVShape
from sgl_omni.engine.moe import routed_one_by_one
from sgl_omni.engine.ops import rms_norm, whole
from sgl_omni.engine.pairs import rotate_pairs, rotation_of
from sgl_omni.engine.repetition import penalise
from sgl_omni.engine.rope import rotate
from sgl_omni.engine.row_attention import RowLayout, Tiled, TorchRowAttention, TritonRowAttention
from sgl_omni.engine.sampler import is_no_choice, sample_masked, seed_key, step_keys

PAGE = 4
NO_TILES = (torch.zeros(2, dtype=torch.int64), torch.zeros(0, 2, dtype=torch.int64))
EPS = 1e-6


def difference(result: Tensor, expected: Tensor) -> float:
    return float((result.float() - expected.float()).abs().max() / expected.float().abs().max())


def check_convolution(device: str, dtype: torch.dtype, module: torch.nn.Module, inputs: int, length: int) -> float:
    """Sums with a residual, and these activated, in both of their uses; ``module`` keeps or multiplies the length."""
    torch.manual_seed(0)
    module = module.to(device).requires_grad_(False)
    alpha = 0.2 + 3 * torch.rand(module.out_channels, device=device)
    ours = Convolution.of(module, Snake(alpha=alpha, inverse=1 / alpha), dtype)
    x = torch.randn(2, length, inputs, device=device)
    with torch.backends.cudnn.flags(allow_tf32=False):
        sums = module(x.transpose(1, 2)).transpose(1, 2)
    residual = torch.randn_like(sums).contiguous()
    lengths = torch.tensor([length, length], dtype=torch.int32, device=device)
    given = x.to(dtype), lengths, 1
    plain, active = ours.both(*given, residual)
    bent = sums + torch.sin(alpha * sums) ** 2 / alpha
    expected = sums + residual
    shorter = torch.tensor([length, length - 2], dtype=torch.int32, device=device)
    with torch.backends.cudnn.flags(allow_tf32=False):
        alone = module(x[1:, : length - 2].transpose(1, 2)).transpose(1, 2)
    found = ours(x.to(dtype), shorter, 1)
    return max(
        difference(ours(*given), sums),
        difference(ours.activated(*given), bent),
        difference(plain, expected),
        difference(active, expected + torch.sin(alpha * expected) ** 2 / alpha),
        difference(found[0], sums[0]),
        difference(found[1, : alone.shape[1]], alone[0]),
    )


CONVOLUTIONS = (
    (torch.nn.Conv1d(24, 40, 7, padding=27, dilation=9), 24, 70),
    (torch.nn.Conv1d(80, 80, 1), 80, 5),
    (torch.nn.Conv1d(16, 1, 7, padding=3, bias=False), 16, 130),
    (torch.nn.ConvTranspose1d(24, 12, 16, stride=8, padding=4), 24, 9),
    (torch.nn.ConvTranspose1d(33, 17, 6, stride=3, padding=2, output_padding=1), 33, 65),
)
"""With the channels and the length of their input."""


def check_causal(device: str, dtype: torch.dtype) -> float:
    """Two rows of unequal pieces through convolutions that begin with their past, GELU, and a depthwise one with its
    norm: all pieces together are the whole."""
    torch.manual_seed(0)
    modules = (
        torch.nn.Conv1d(24, 40, 7, dilation=3),
        torch.nn.ConvTranspose1d(24, 20, 6, stride=3),
        torch.nn.Conv1d(24, 24, 7, groups=24),
    )
    norm, product = torch.nn.LayerNorm(24, eps=1e-6), torch.nn.Linear(24, 40)
    wide, grow, depthwise = (module.to(device).requires_grad_(False) for module in modules)
    for part in (norm, product):
        part.to(device).requires_grad_(False)
    torch.nn.init.normal_(norm.weight), torch.nn.init.normal_(norm.bias)
    parts: list[Any] = [
        Convolution.causal(wide, None, dtype, past=True),
        Convolution.causal(grow, None, dtype, past=True),
        DepthwiseNorm.of(depthwise, norm, past=True),
    ]
    x = torch.randn(2, 44, 24, device=device)
    with torch.backends.cudnn.flags(allow_tf32=False):
        padded = [torch.nn.functional.pad(x.transpose(1, 2), (part.behind, 0)) for part in parts]
        expected = [wide(padded[0]), grow(padded[1])[..., 3 : 3 + 3 * 44], norm(depthwise(padded[2]).mT).mT]
    off = 0.0
    for part, unbroken in zip(parts, expected, strict=True):
        memory = torch.zeros(2, 3 + part.behind * 24, device=device)  # of other parts, too
        seen, pieces = [0, 0], [[], []]
        for counts in ((2, 40), (12, 1), (30, 3)):
            longest = max(counts)
            given = torch.full((2, longest, 24), float("nan"), device=device)
            for row, count in enumerate(counts):
                given[row, :count] = x[row, seen[row] : seen[row] + count]
            lengths = torch.tensor(counts, dtype=torch.int32, device=device)
            ready = with_room(given, part.behind, dtype)
            carry(ready, memory[:, 3:], part.behind, lengths, 1)
            found = part(ready, lengths, 1)
            for row, count in enumerate(counts):
                pieces[row].append(found[row, : count * unbroken.shape[2] // 44])
                seen[row] += count
        off = max(off, *(difference(torch.cat(pieces[row]), unbroken[row].mT) for row in range(2)))
        assert not memory[:, :3].any()
    ours = Convolution.product(product.weight, product.bias, dtype, gelu=True, room=2)
    every = torch.tensor([44, 44], dtype=torch.int32, device=device)
    return max(off, difference(ours.activated(x.to(dtype), every, 1)[:, 2:], torch.nn.functional.gelu(product(x))))


def check_attention(
    device: str,
    dtype: torch.dtype,
    *,
    window: int | None,
    tiled: bool,
    splits: int | None,
    heads: tuple[int, int, int] = (6, 2, 24),
) -> float:
    """Sequences in scattered pages: three rows that decode, prompts of 70 and 5 rows, one row more that stands for
    those to spare; q and k normed and turned."""
    query_heads, kv_heads, head_dim = heads
    torch.manual_seed(0)
    pages = random.Random(0).sample(range(40), 40)
    tables = torch.zeros(6, 20, dtype=torch.int32)
    for row, (first, count) in enumerate([(0, 2), (2, 1), (3, 5), (8, 19), (27, 2), (29, 1)]):
        tables[row, :count] = torch.tensor(pages[first : first + count])
    rows = torch.tensor([0, 1, 2, *[3] * 70, *[4] * 5, 5])
    positions = torch.tensor([5, 0, 17, *range(3, 73), *range(5), 0])
    tiles = torch.tensor([[3, 64], [67, 6], [73, 5], [0, 0]])  # in a captured step some are nobody's
    layout = RowLayout.of(
        positions.to(device),
        rows.to(device),
        tables.to(device),
        PAGE,
        Tiled(torch.tensor([3, 78], device=device), tiles.to(device)) if tiled else None,
    )
    caches = [KVCache(KVShape(2, kv_heads, head_dim, dtype), 40, PAGE, device) for _ in range(2)]
    n = len(rows)
    merged = torch.randn(n, (query_heads + 2 * kv_heads) * head_dim, dtype=dtype, device=device)
    norms = (torch.rand(head_dim, dtype=dtype, device=device), torch.rand(head_dim, dtype=dtype, device=device))
    angles = torch.rand(head_dim // 2, n, device=device).T[:, None]  # laid out as rotation over several axes may be
    rotation = (angles.cos().to(dtype), angles.sin().to(dtype))
    sizes = [query_heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    q, k, v = (part.unflatten(-1, (-1, head_dim)) for part in merged.split(sizes, -1))
    q, k = rotate(rms_norm(q, norms[0], EPS), rotation), rotate(rms_norm(k, norms[1], EPS), rotation)
    known = [torch.randn_like(part) for part in caches[0].layer(1)]
    for cache in caches:
        for part, content in zip(cache.layer(1), known, strict=True):
            part.copy_(content)
    expected = TorchRowAttention(caches[0], layout)(1, q, k, v, window=window)
    result = TritonRowAttention(caches[1], layout, splits=splits).from_qkv(
        1, QKV(merged, query_heads, norms, EPS), rotation, window=window
    )
    written = [difference(b, a) for a, b in zip(caches[0].layer(1), caches[1].layer(1), strict=True)]
    return max(difference(result, expected), *written)


def check_add_norm(device: str, dtype: torch.dtype, width: int) -> float:
    torch.manual_seed(1)
    x, delta = (torch.randn(5, width, dtype=dtype, device=device) for _ in range(2))
    weight = torch.rand(width, dtype=dtype, device=device)
    total = x + delta
    result = elementwise.add_norm(x, delta.T.contiguous().T, weight, EPS)
    first = elementwise.add_norm(total.clone(), None, weight, EPS)
    expected = rms_norm(total, weight, EPS)
    return max(difference(x, total), difference(result, expected), difference(first, expected))


def check_silu_mul(device: str, dtype: torch.dtype, width: int) -> float:
    torch.manual_seed(2)
    gate_up = torch.randn(2 * width, 5, dtype=dtype, device=device).T
    gate, up = gate_up.chunk(2, -1)
    return difference(elementwise.silu_mul(gate_up), torch.nn.functional.silu(gate) * up)


def check_sampling(
    device: str, vocabulary: int, dtype: torch.dtype = torch.float32, first_column: int = 0, times: int = 5
) -> tuple[Tensor, Tensor]:
    """Ids of the kernel and of the reference: greedy and random rows, ties, every option and all of them together.

    ``times``: rows of each kind.
    """
    torch.manual_seed(3)
    options = [
        (0.0, 0, 1.0), (0.7, 0, 1.0), (1.0, 5, 1.0), (1.5, 1, 0.5),
        (1.0, 40, 0.8), (1.0, 3, 0.3), (0.3, 0, 0.9), (2.0, 7, 0.95), (1.0, 200, 1.0), (0.6, 90, 0.5),
    ]  # fmt: skip
    rows = times * len(options)
    logits = torch.randn(rows, 3, vocabulary) * 3
    logits[:, :, 5] = logits[:, :, 9] = logits.amax(-1)
    temperature, top_k, top_p = (torch.tensor(column * times) for column in map(list, zip(*options, strict=True)))
    steps = torch.arange(rows) + 3
    keys = step_keys(torch.tensor([seed_key(i) for i in range(rows)]), steps)
    logits = logits.to(dtype)
    expected = sample_masked(logits, temperature, top_k, top_p, keys, first_column)
    place = torch.randperm(rows)
    fields = torch.zeros(rows, len(Field) + 3, dtype=torch.int32)
    fields[place, Field.TEMPERATURE] = temperature.view(torch.int32)
    fields[place, Field.TOP_P] = top_p.view(torch.int32)
    fields[place, Field.TOP_K] = top_k.to(torch.int32)
    fields[place, Field.SEED] = torch.tensor([seed_key(i) for i in range(rows)]).to(torch.int32)
    fields[place, Field.STEP] = torch.arange(rows, dtype=torch.int32)
    fields[:, Field.DRAWN] = 3
    index = torch.randperm(rows)
    moved = [part.to(device) for part in (logits, fields, place[index], index.argsort())]
    bad = torch.tensor([torch.nan, torch.inf, -torch.inf]).repeat_interleave(len(options)).repeat(2)[:rows]
    moved_bad = bad[:, None, None].expand(logits.shape).to(device, dtype).contiguous()  # each with every option
    ids = sampling.sample(moved_bad, *moved[1:], first_column)
    assert 0 <= int(ids.min()) <= int(ids.max()) < vocabulary, "whatever the logits are, an id is one"
    odd = moved[0][:, :1].clone()
    odd[0, 0, 3], odd[1, 0, 7], odd[2], odd[3, :, 1:] = torch.nan, torch.inf, -torch.inf, -torch.inf
    lost = torch.zeros(rows, dtype=torch.int32, device=device)
    sampling.sample(odd, *moved[1:], first_column, lost)
    assert lost.nonzero()[:, 0].tolist() == is_no_choice(odd).nonzero()[:, 0].tolist() == [0, 1, 2]
    return sampling.sample(*moved, first_column).cpu(), expected


def check_penalty(device: str, vocabulary: int, dtype: torch.dtype) -> None:
    """As plain torch penalises, of the rows that ask for it."""
    torch.manual_seed(5)
    logits = torch.randn(6, vocabulary).to(dtype)
    penalties = torch.tensor([1.0, 1.1, 2.5, 1.0, 0.7, 1.3])
    flags = torch.rand(9, vocabulary) < 0.3
    at, ends = torch.tensor([8, 3, 5, 0, 1, 2, 7, 4]), torch.tensor([6, 0, 2, 3, 7, 1])
    fields = torch.zeros(9, len(Field) + 1, dtype=torch.int32)
    fields[at[ends], Field.PENALTY] = penalties.view(torch.int32)
    expected = penalise(logits, flags[at[ends]], penalties)
    moved = [part.to(device) for part in (logits.clone(), flags, fields, at, ends)]
    assert torch.equal(sampling.penalise(*moved).cpu(), expected)


def check_state(device: str) -> None:
    """Both ends of a step move the same state on as plain torch does."""
    torch.manual_seed(4)
    pattern = DelayPattern((0, 1, 3), eos_id=7, pad_id=9)
    fields = torch.randint(0, 5, (9, len(Field) + 3), dtype=torch.int32)
    fields[:, Field.END] = torch.tensor([-1, -1, 2, 3, -1, 1, -1, -1, -1])
    fields[:, Field.LIMIT] = torch.tensor([99, 2, 99, 99, 99, 99, 1, 99, 99])
    tables = torch.randint(0, 50, (9, 6), dtype=torch.int32)
    rows = torch.tensor([3, 1, 0, 5, 5, 5, 2, 6, 8])
    given = torch.tensor([-1, -1, -1, 7, 8, 9, -1, -1, 0])
    ends, targets = torch.tensor([0, 1, 2, 5, 6, 7, 0]), torch.tensor([3, 1, 0, 5, 2, 6, 8])
    inputs = StepInputs(rows, given, torch.randint(0, 6, (9, 3)), ends, targets, *NO_TILES)
    chosen = torch.randint(0, 6, (7, 3))
    chosen[2, 0] = pattern.eos_id
    moved = StepInputs(*(getattr(inputs, name).to(device) for name in StepInputs.__slots__))
    there = fields.clone().to(device)
    expected = begin_rows(rows, given, inputs.ids, fields, tables, PAGE)
    result = state.begin(moved.rows, moved.given, moved.ids, there, tables.to(device), PAGE)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(result, expected, strict=True))
    filled = advance_rows(chosen, inputs, expected[0], fields, pattern, None)
    ids = chosen.clone().to(device)
    delays = torch.tensor(pattern.delays, dtype=torch.int32, device=device)
    facts = (delays, pattern.eos_id, pattern.pad_id)
    state.advance(ids, moved.rows, moved.ends, moved.targets, result[0], there, facts)
    assert torch.equal(ids.cpu()[:6], filled[:6])
    assert torch.equal(there.cpu()[:8], fields[:8])
    ring, written = torch.zeros(3, 9, 3, dtype=torch.int64, device=device), torch.tensor([4], device=device)
    state.hand_out(ids, ring, written)
    assert torch.equal(ring[1, :7], ids) and not ring[1, 7:].any() and not ring[[0, 2]].any()
    table, offsets = torch.randn(20, 96), torch.tensor([0, 6, 12])
    summed = state.embed(inputs.ids.to(device), offsets.to(device), table.to(device))
    assert difference(summed.cpu(), table[inputs.ids + offsets].sum(1)) < 1e-6


def check_bits(device: str, columns: int = 257) -> None:
    """Rows whose ids are the bits of floats, as wide as a patch of latents, go through both ends as they are."""
    torch.manual_seed(6)

    def bits(n: int) -> torch.Tensor:
        return torch.randn(n, columns).view(torch.int32)

    fields = torch.zeros(7, len(Field) + columns, dtype=torch.int32)
    fields[:, len(Field) :] = bits(7)
    tables = torch.randint(0, 9, (7, 8), dtype=torch.int32)
    rows, given, ids = torch.tensor([3, 1, 6, 0]), torch.tensor([-1, -1, 5, -1]), bits(4).to(torch.int64)
    inputs = StepInputs(rows, given, ids, torch.tensor([0, 1, 3]), torch.tensor([3, 1, 0]), *NO_TILES)
    moved = StepInputs(*(getattr(inputs, name).to(device) for name in StepInputs.__slots__))
    there, chosen = fields.clone().to(device), bits(3).to(torch.int64)
    expected = begin_rows(rows, given, ids, fields, tables, PAGE)
    result = state.begin(moved.rows, moved.given, moved.ids, there, tables.to(device), PAGE)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(result, expected, strict=True))
    advance_rows(chosen, inputs, expected[0], fields, None, None)
    state.advance(chosen.to(device), moved.rows, moved.ends, moved.targets, result[0], there, None)
    assert torch.equal(there.cpu(), fields)


def check_moe(device: str, dtype: torch.dtype, *, rows: int, experts: int, choices: int, hidden: int = 72) -> float:
    """Rows of which most choose the first experts, so that some have many rows and some none."""
    torch.manual_seed(5)
    width = hidden // 2 + 4
    gate_up = torch.randn(experts, 2 * width, hidden, dtype=dtype, device=device) * hidden**-0.5
    down = torch.randn(experts, hidden, width, dtype=dtype, device=device) * width**-0.5
    x = torch.randn(rows, hidden, dtype=dtype, device=device)
    liking = torch.rand(rows, experts, device=device) - torch.arange(experts, device=device) / experts
    liked, chosen = liking.topk(choices, -1)
    weights = liked.softmax(-1).to(dtype)
    result = moe.routed(x, chosen, weights, gate_up, down)
    assert result.shape == (choices, rows, hidden)
    return difference(result.sum(0), routed_one_by_one(x, chosen, weights, gate_up, down))


def check_added(device: str, dtype: torch.dtype = torch.float32) -> float:
    """What has arrived, and the fallback after it, is added to the inputs of outputs and to no others."""
    torch.manual_seed(6)
    ring, fallback = torch.randn(5, 4, 70, dtype=dtype), torch.randn(5, 70, dtype=dtype)
    counts, x = torch.tensor([9, 2, 0, 7, 3]), torch.randn(6, 70, dtype=dtype)
    fields = torch.zeros(5, len(Field) + 2, dtype=torch.int32)
    fields[:, Field.STEP] = torch.tensor([9, 3, 1, 6, 3])
    rows, given = torch.tensor([0, 1, 2, 3, 4, 3]), torch.tensor([-1, -1, -1, -1, -1, 8])
    expected = x.clone()
    for i, added in enumerate((ring[0, 0], fallback[1], fallback[2], ring[3, 1], ring[4, 2])):
        expected[i] += added
    result = x.clone().to(device)
    state.add_arrived(result, *(part.to(device) for part in (rows, given, fields, ring, fallback, counts)))
    return difference(result.cpu(), expected)


def check_places(device: str, dtype: torch.dtype, splits: int) -> float:
    """Attention over an encoder's output by the kernel for pages, each place being one page."""
    torch.manual_seed(7)
    pool = SourcePool(SourceShape(KVShape(2, 4, 24, dtype), 11), 5, device)
    pool.lengths.copy_(torch.tensor([11, 3, 1, 7, 0]))
    keys, values = pool.layer(1)
    keys.normal_()
    values.normal_()
    places = torch.tensor([3, 0, 2, 0, 1, 3], device=device)
    q = torch.randn(6, 4, 24, dtype=dtype, device=device)
    expected, result = attend_places(q, keys, values, places, pool.lengths), torch.empty_like(q)
    last = pool.lengths[places] - 1
    attention.decode_attention(q, keys, values, pool.tables, places, last, None, splits, result)
    return difference(result, expected)


def check_fixed_places(
    device: str,
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    *,
    parts: int = 0,
    has_norms: bool = True,
    neighbours: bool = False,
    length: int = 19,
) -> float:
    """A loop over the places of two rows, the first two at once; what is not written yet is NaN."""
    query_heads, kv_heads, head_dim = heads
    torch.manual_seed(8)
    rows, eps = 2, EPS if has_norms else 0.0
    norms = (torch.rand(head_dim, dtype=dtype, device=device), torch.rand(head_dim, dtype=dtype, device=device))
    circle = rotation_of(torch.arange(length, device=device), head_dim, 100.0)
    table = (circle.real, circle.imag) if neighbours else (circle.real.to(dtype), circle.imag.to(dtype))
    sizes = [query_heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    empty = torch.full((2, 2, rows, length, kv_heads, head_dim), torch.nan, dtype=dtype, device=device)
    known, written, off = empty.clone(), empty.clone(), 0.0
    for start, count in ((0, 2), *((start, 1) for start in range(2, length))):
        shape = (rows * count, sum(sizes))
        merged = torch.randn(parts, *shape, device=device) if parts else torch.randn(shape, dtype=dtype, device=device)
        q, k, v = (part.unflatten(-1, (-1, head_dim)) for part in whole(merged, dtype).split(sizes, -1))
        if has_norms:
            q, k = rms_norm(q, norms[0], EPS), rms_norm(k, norms[1], EPS)
        plain = TorchFixedAttend(known, start, count)
        if neighbours:
            turns = circle[start : start + count].repeat(rows, 1)
            q, k = rotate_pairs(q, turns), rotate_pairs(k, turns)
        else:
            rotation = plain.rotation((table[0][:, None], table[1][:, None]))
            q, k = rotate(q, rotation), rotate(k, rotation)
        expected = plain(1, q, k, v)
        fused = TritonFixedAttend(written, start, count, neighbours=neighbours)
        qkv = QKV(merged, query_heads, norms if has_norms else None, eps)
        off = max(off, difference(fused.from_qkv(1, qkv, fused.rotation(table)), expected))
    assert torch.equal(written[1].isnan(), known[1].isnan()) and written[0].isnan().all()
    return off
