"""Chooses the next ids of a batch.

Random numbers are a hash of (seed, output index, column, id), not the state of a generator: what a request draws
depends on nothing else, so it is the same in every batch, after a retraction, and on every device.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from sgl_omni.engine.request import Request

_MASK = 0xFFFFFFFF

LARGE = 4096
"""Of a vocabulary larger than this, a CPU looks for the leading ids instead of sorting it."""

_FEW = (256, 1024)
"""So many are looked at, one after the other, for what top-p alone leaves."""

Word = TypeVar("Word", int, Tensor)


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The sampling options of the rows of a step, one entry a row.

    ``random`` int64 [r]: the rows that are not greedy; the other tensors [r] are of these alone. ``keys`` int64
    [r]: a hash of seed and output index.
    """

    random: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    keys: Tensor

    @classmethod
    def of(cls, requests: Sequence[Request], device: torch.device | str = "cpu") -> SamplingBatch:
        rows = [i for i, request in enumerate(requests) if not request.sampling.is_greedy]
        options = [requests[i].sampling for i in rows]
        seeds = torch.tensor([seed_key(option.seed) for option in options], dtype=torch.int64)
        steps = torch.tensor([requests[i].drawn + len(requests[i].outputs) for i in rows], dtype=torch.int64)
        return cls(
            random=torch.tensor(rows, dtype=torch.int64).to(device),
            temperature=torch.tensor([option.temperature for option in options]).to(device),
            top_k=torch.tensor([min(option.top_k, _MASK) for option in options], dtype=torch.int64).to(device),
            top_p=torch.tensor([option.top_p for option in options]).to(device),
            keys=step_keys(seeds, steps).to(device),
        )


def is_no_choice(logits: Tensor) -> Tensor:
    """bool [rows, 1] of logits [rows, columns, vocabulary]: where the largest is an infinity or no number."""
    largest = logits.flatten(1).amax(1, keepdim=True)
    return largest - largest != 0  # in fewer kernels than ``isfinite`` has


def sample(logits: Tensor, batch: SamplingBatch, first_column: int = 0) -> Tensor:
    """logits [rows, columns, vocabulary] -> ids int64 [rows, columns].

    ``first_column``: where these columns are not the first of their rows, for they have draws of their own.
    """
    ids = logits.argmax(-1)
    if len(batch.random):
        chosen = logits[batch.random].float()
        ids[batch.random] = _draw(chosen, batch.temperature, batch.top_k, batch.top_p, batch.keys, first_column)
    return ids


def sample_masked(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, keys: Tensor, first_column: int = 0
) -> Tensor:
    """Chooses for greedy and random rows alike, without asking the host which are which.

    logits [rows, columns, vocabulary], options [rows], keys int64 [rows] (``step_keys``) -> ids int64 [rows, columns].
    """
    greedy = (temperature == 0) | (top_k == 1)
    # A greedy row's draw is thrown away, but must not be made of infinities.
    temperature = torch.where(greedy, torch.ones_like(temperature), temperature)
    drawn = _draw(logits.float(), temperature, top_k, top_p, keys, first_column)
    return torch.where(greedy[:, None], logits.argmax(-1), drawn)


def seed_key(seed: int) -> int:
    """A hash of all bits of a request's seed, which may be any whole number; 32 bits."""
    if 0 <= seed < 2**63:
        return _mix(_mix(seed) ^ (seed >> 32))
    key = 0
    for word in struct.iter_unpack("<I", seed.to_bytes(4 * (seed.bit_length() // 32 + 1), "little", signed=True)):
        key = _mix(key ^ word[0])
    return key


def step_keys(seed_keys: Tensor, steps: Tensor) -> Tensor:
    """The key of each row's draw: int64 ``seed_key`` and output index, both [rows]."""
    return _mix(seed_keys ^ steps)


def normal(keys: Tensor, count: int) -> Tensor:
    """Normal noise float32 [rows, count] of keys int64 [rows] (``step_keys``), for models whose outputs are floats."""
    ids = torch.arange(2 * -(-count // 2), device=keys.device)
    size, angle = _uniform(_mix(_mix(keys)[:, None] ^ ids)).chunk(2, -1)
    size, angle = (-2 * size.log()).sqrt(), 2 * math.pi * angle
    return torch.cat([size * angle.cos(), size * angle.sin()], -1)[:, :count]


def _draw(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, keys: Tensor, first_column: int) -> Tensor:
    """Gumbel noise on the logits that top-k and top-p leave; the largest wins."""
    scaled = logits / temperature.clamp(1e-5, 1e5)[:, None, None]
    if logits.device.type == "cpu" and logits.shape[-1] > LARGE:
        return _draw_one_by_one(scaled, top_k, top_p, keys, first_column)
    # Stable: of equal logits the lower id goes first, whatever else is in the batch.
    ordered, ids = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(ordered.shape[-1], device=logits.device)
    kept = torch.where(top_k > 0, top_k, ordered.shape[-1])[:, None, None]
    ordered = ordered.masked_fill(rank >= kept, float("-inf"))
    return _draw_ordered(ordered, ids, ordered.softmax(-1), top_p, keys, first_column)


def _draw_ordered(
    ordered: Tensor, ids: Tensor, probabilities: Tensor, top_p: Tensor, keys: Tensor, first_column: int
) -> Tensor:
    """Of the largest logits [rows, columns, n], in order, their ids and probabilities: what is chosen."""
    rank = torch.arange(ordered.shape[-1], device=ordered.device)
    before = probabilities.cumsum(-1) - probabilities
    # Rounding may make ``before`` of a far id reach 1.
    dropped = (before >= top_p[:, None, None]) & (top_p[:, None, None] < 1) & (rank > 0)
    chosen = (ordered + _gumbel(keys, ids, first_column)).masked_fill(dropped, float("-inf")).argmax(-1, keepdim=True)
    return ids.gather(-1, chosen)[..., 0]


def _draw_one_by_one(scaled: Tensor, top_k: Tensor, top_p: Tensor, keys: Tensor, first_column: int) -> Tensor:
    """The same for a large vocabulary on a CPU, where sorting all of it takes longer than many a model's step."""
    ids = torch.empty(scaled.shape[:2], dtype=torch.int64)
    for row, (k, p) in enumerate(zip(top_k.tolist(), top_p.tolist(), strict=True)):
        for column in range(scaled.shape[1]):
            ordered, places, probabilities = _leading(scaled[row, column], k, p)
            ids[row, column] = _draw_ordered(
                ordered[None, None],
                places[None, None],
                probabilities[None, None],
                top_p[row : row + 1],
                keys[row : row + 1],
                first_column + column,
            )
    return ids


def _leading(logits: Tensor, k: int, p: float) -> tuple[Tensor, Tensor, Tensor]:
    """All that top-k and top-p may leave of logits [vocabulary], its ids and its probabilities; in order if it must."""
    size = len(logits)
    k = k or size
    if k >= size and p >= 1:
        return logits, torch.arange(size), logits
    if k < LARGE:
        ordered, ids = _largest(logits, k)
        if len(ids) >= k:
            return ordered[:k], ids[:k], ordered[:k].softmax(-1)
    elif k >= size:
        total = logits.logsumexp(-1)
        for count in _FEW:
            ordered, ids = _largest(logits, count)
            probabilities = (ordered - total).exp()
            if len(ids) >= count and bool(probabilities[:count].sum() - probabilities[count - 1] >= p):
                return ordered, ids, probabilities
    ordered, ids = logits.sort(descending=True, stable=True)
    ordered = ordered[:k]
    return ordered, ids[:k], ordered.softmax(-1)


def _largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest and those equal to the last of them, in order; fewer where there are no numbers."""
    ids = (logits >= logits.topk(count).values[-1]).nonzero()[:, 0]
    ordered, order = logits[ids].sort(descending=True, stable=True)
    return ordered, ids[order]


def _gumbel(keys: Tensor, ids: Tensor, first_column: int) -> Tensor:
    """Noise of each id [rows, columns, n], float32."""
    columns = torch.arange(first_column, first_column + ids.shape[1], device=ids.device)
    hashed = _mix(_mix(keys[:, None] ^ (columns * 0x632BE5AB))[..., None] ^ ids)
    return -torch.log(-torch.log(_uniform(hashed)))


def _uniform(hashed: Tensor) -> Tensor:
    """23 bits and a half: in float32 this is neither 0 nor 1."""
    return ((hashed >> 9).float() + 0.5) * 2.0**-23


def _mix(x: Word) -> Word:
    """A permutation of 32-bit numbers (held in int64) in which every input bit moves every output bit."""
    x = (x + 0x9E3779B9) & _MASK
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _MASK
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _MASK
    return x ^ (x >> 15)
