"""Attention over the paged cache: one interface, and its reference in plain torch.

A backend for a device is one more class with the methods of ``AttentionBackend``, tested against
``TorchAttention``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from sgl_omni.engine.kv_cache import KVCache


class AttentionSpan(NamedTuple):
    """Rows ``start`` to ``stop`` of one sequence, which lies in ``pages``."""

    start: int
    stop: int
    pages: Sequence[int]

    @property
    def length(self) -> int:
        return self.stop - self.start


class Attend(Protocol):
    """Attention of one step, as a decoder layer sees it."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
        """Writes k and v [rows, kv_heads, head_dim] to the cache; returns q's [rows, heads, head_dim] attention.

        Row i sees its own sequence up to itself, and of that the last ``window`` positions where one is given.
        Rows beyond the step's spans are padding: they are not written, and their result is zero.
        """
        ...


class QKV(NamedTuple):
    """What a layer's merged projection gives: [rows, (heads + 2 * kv_heads) * head_dim], not normed or rotated.

    ``norms``: the weights of the norms of each head of q and k, if there are any.
    """

    merged: Tensor
    heads: int
    norms: tuple[Tensor, Tensor] | None
    eps: float


@runtime_checkable
class FusedAttend(Protocol):
    """As ``Attend``, with norms, rotation and writing in one kernel."""

    def from_qkv(
        self, layer: int, qkv: QKV, rotation: tuple[Tensor, Tensor], *, window: int | None = None
    ) -> Tensor: ...


AnyAttend = Attend | FusedAttend


class AttentionBackend(Protocol):
    def begin(self, cache: KVCache, spans: Sequence[AttentionSpan]) -> Attend:
        """Prepares a step: the spans' rows follow one another in q, k and v."""
        ...


class _Sequence(NamedTuple):
    length: int
    """Rows that run."""
    stop: int
    pages: Tensor | None
    views: tuple[Tensor, ...]
    """Of pages that lie side by side there is no need for a copy: keys and values of each layer in turn."""

    def keys_and_values(self, cache: KVCache, layer: int) -> tuple[Tensor, Tensor]:
        """Each [1, kv_heads, stop, head_dim]."""
        if self.pages is None:
            return self.views[2 * layer], self.views[2 * layer + 1]
        k, v = cache.read(layer, self.pages, self.stop)
        return k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)


class TorchAttention:
    """The reference: each sequence by itself, over exactly its own length, so no other can touch its result."""

    def begin(self, cache: KVCache, spans: Sequence[AttentionSpan]) -> Attend:
        slots = [slot for span in spans for slot in _slots(span, cache.page_size)]
        sequences = [_sequence(cache, span) for span in spans]
        return partial(self._attend, cache, torch.tensor(slots, device=cache.device), sequences)

    def _attend(
        self,
        cache: KVCache,
        slots: Tensor,
        sequences: Sequence[_Sequence],
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        window: int | None = None,
    ) -> Tensor:
        rows = slots.shape[0]
        cache.write(layer, slots, k[:rows], v[:rows])
        idle = q.shape[0] - rows
        pairs = [sequence.keys_and_values(cache, layer) for sequence in sequences]
        if rows == len(sequences):
            if window is not None:
                pairs = [(keys[:, :, -window:], values[:, :, -window:]) for keys, values in pairs]
            # The heads that share keys are as good as queries of one sequence that all see everything.
            grouped = q.view(q.shape[0], 1, k.shape[1], -1, q.shape[2])
            attended = [
                F.scaled_dot_product_attention(query, keys, values)
                for query, (keys, values) in zip(grouped.unbind(), pairs, strict=False)
            ]
            return torch.cat([*attended, torch.zeros_like(grouped[rows:, 0])] if idle else attended).flatten(1, 2)
        queries = q[:rows].split([sequence.length for sequence in sequences])
        attended = [_attend_prompt(query, *pair, window) for query, pair in zip(queries, pairs, strict=True)]
        return torch.cat([*attended, torch.zeros_like(q[rows:])] if idle else attended)


def _slots(span: AttentionSpan, page_size: int) -> list[int]:
    """Where the span's own rows are written."""
    if span.length == 1:
        return [span.pages[span.start // page_size] * page_size + span.start % page_size]
    return [span.pages[i // page_size] * page_size + i % page_size for i in range(span.start, span.stop)]


def _sequence(cache: KVCache, span: AttentionSpan) -> _Sequence:
    pages = span.pages[: -(-span.stop // cache.page_size)]
    first = pages[0]
    if all(page == first + i for i, page in enumerate(pages)):
        return _Sequence(span.length, span.stop, None, cache.view(first, span.stop))
    return _Sequence(span.length, span.stop, torch.tensor(pages, device=cache.device), ())


def _attend_prompt(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """q [n, heads, head_dim], the last n positions of k and v [1, kv_heads, length, head_dim] -> as q."""
    n, length = q.shape[0], k.shape[2]
    plain = n == length and (window is None or window >= length)
    mask = None if plain else _mask(n, length, window, q.device)
    heads_first = q.transpose(0, 1).unsqueeze(0)
    grouped = q.shape[1] != k.shape[1]
    attended = F.scaled_dot_product_attention(heads_first, k, v, mask, is_causal=plain, enable_gqa=grouped)
    return attended[0].transpose(0, 1)


def _mask(n: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """[n, length]: what each of the last n positions sees."""
    seen = torch.ones(n, length, dtype=torch.bool, device=device).tril(length - n)
    return seen if window is None else seen.triu(length - n - window + 1)
