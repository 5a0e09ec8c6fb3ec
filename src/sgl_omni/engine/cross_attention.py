"""Attention over an encoder's output: a second pool of keys and values, one fixed place a request.

A request's keys and values are written once, when it first runs, and its place is its own until it ends or goes on
with a sequence over another output, through retractions too. Requests are admitted in order, so places for as many as
may run are enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from sgl_omni.engine.attention import Attend
from sgl_omni.engine.kv_cache import KVShape
from sgl_omni.engine.platform import for_kernels
from sgl_omni.engine.request import Chunk, Request

if TYPE_CHECKING:
    from sgl_omni.engine.model import StepModel


@dataclass(frozen=True, slots=True)
class SourceShape:
    """What one request's encoder output takes: ``kv`` for each of up to ``length`` frames."""

    kv: KVShape
    length: int


class SourcePool:
    """Keys and values of encoder outputs: [layers, 2, places, length, kv_heads, head_dim], allocated once."""

    def __init__(self, shape: SourceShape, places: int, device: torch.device | str = "cpu") -> None:
        self.shape = shape
        kv = shape.kv
        size = (kv.layers, 2, places, shape.length, kv.kv_heads, kv.head_dim)
        self._places = torch.zeros(size, dtype=kv.dtype, device=device)
        self.lengths = torch.zeros(places, dtype=torch.int64, device=device)
        """Frames of each place."""
        self.tables = torch.arange(places, dtype=torch.int32, device=device)[:, None]
        """Each place as the one page of a sequence, int32 [places, 1]."""
        self._free = list(reversed(range(places)))

    @property
    def used(self) -> int:
        return self.lengths.shape[0] - len(self._free)

    @property
    def num_bytes(self) -> int:
        return self._places.nbytes

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, each [places, length, kv_heads, head_dim]."""
        keys, values = self._places[index]
        return keys, values

    def admit(self, request: Request, model: StepModel) -> None:
        """Gives a request that runs for the first time its place."""
        if request.place < 0 and request.source is not None:
            self.enter(request, model.source_kv(request.source))

    def enter(self, request: Request, kv: Tensor) -> None:
        """Writes a request's keys and values [layers, 2, frames, kv_heads, head_dim] into a place of its own."""
        assert request.place < 0, f"request {request.id} has a place already"
        assert self._free, "more requests hold an encoder output than may run"
        request.place = self._free.pop()
        self._places[:, :, request.place, : kv.shape[2]] = kv
        self.lengths[request.place] = kv.shape[2]

    def leave(self, request: Request) -> None:
        """The request has ended. One that never ran has no place."""
        if request.place >= 0:
            self._free.append(request.place)
            request.place = -1


@runtime_checkable
class CrossAttend(Attend, Protocol):
    """An ``Attend`` that can also look at an encoder's output."""

    def cross(self, layer: int, q: Tensor) -> Tensor:
        """q [rows, heads, head_dim] -> as q: each row's attention over all frames of its own request."""
        ...


class SourceAttend:
    """Attention of one step for a decoder with both kinds: over its own sequence (called), and ``cross``."""

    def __init__(self, pool: SourcePool, attend: Attend, chunks: Sequence[Chunk]) -> None:
        self._pool = pool
        self._attend = attend
        self._lengths = [chunk.length for chunk in chunks]
        self._sources = [(chunk.request.place, len(_source(chunk.request))) for chunk in chunks]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
        return self._attend(layer, q, k, v, window=window)

    def cross(self, layer: int, q: Tensor) -> Tensor:
        """q [rows, heads, head_dim] -> as q; rows beyond the chunks' own are zero."""
        keys, values = self._pool.layer(layer)
        rows = sum(self._lengths)
        attended = []
        for query, (place, length) in zip(q[:rows].split(self._lengths), self._sources, strict=True):
            k, v = (part[place, :length].transpose(0, 1)[None] for part in (keys, values))
            grouped = q.shape[1] != k.shape[1]
            result = F.scaled_dot_product_attention(query.transpose(0, 1)[None], k, v, enable_gqa=grouped)
            attended.append(result[0].transpose(0, 1))
        return torch.cat([*attended, torch.zeros_like(q[rows:])])


class RowSourceAttend:
    """The same in device rows: each row's place lies in a tensor."""

    def __init__(self, pool: SourcePool, attend: Attend, places: Tensor) -> None:
        """``places`` int64 [n]."""
        self._pool = pool
        self._attend = attend
        self._places = places
        self._last_frames = (pool.lengths[places] - 1).clamp(min=0)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
        return self._attend(layer, q, k, v, window=window)

    def cross(self, layer: int, q: Tensor) -> Tensor:
        keys, values = self._pool.layer(layer)
        if not for_kernels(q):
            return attend_places(q, keys, values, self._places, self._pool.lengths)
        from sgl_omni.engine.kernels import attention

        # A place is as good as a sequence of one page.
        q = q.contiguous()
        out, splits = torch.empty_like(q), attention.splits_for(q.shape[0], keys.shape[2], q.device)
        attention.decode_attention(
            q, keys, values, self._pool.tables, self._places, self._last_frames, None, splits, out
        )
        return out


def attend_places(q: Tensor, keys: Tensor, values: Tensor, places: Tensor, lengths: Tensor) -> Tensor:
    """The same for rows each with a place of its own, as a function of tensors alone.

    q [n, heads, head_dim], keys and values of a layer, ``places`` int64 [n], ``lengths`` int64 of all places -> as q.
    """
    k, v = keys[places].transpose(1, 2), values[places].transpose(1, 2)
    frames = torch.arange(keys.shape[1], device=q.device)
    seen = frames < lengths[places][:, None]
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q[:, :, None], k, v, seen[:, None, None], enable_gqa=grouped)[:, :, 0]


def _source(request: Request) -> Tensor:
    assert request.source is not None, f"request {request.id} has no encoder output"
    return request.source
