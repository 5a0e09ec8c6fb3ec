"""Attention whose every fact lies in tensors: rows of any sequences, each up to its own position.

Nothing depends on a value that the host would have to know, so that a step can be captured into a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sgl_omni.engine.attention import QKV
from sgl_omni.engine.kv_cache import KVCache


@dataclass(frozen=True, slots=True, eq=False)
class Tiled:
    """Rows that are attended in tiles: ``within`` int64 [2], from one to before the other, if any at all.

    ``tiles`` int64 [tiles, 2]: the first row and the number of rows of each, 0 where there is none.
    """

    within: Tensor
    tiles: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RowLayout:
    """Where the rows of a pass belong.

    ``positions`` int64 [n] within their sequences, ``rows`` int64 [n]: the row of ``tables`` int32 [requests, pages
    of a sequence] that each uses, ``slots`` int64 [n]: where keys and values go. ``tiled``: where some rows may be
    attended in tiles; all others are on their own.
    """

    positions: Tensor
    rows: Tensor
    tables: Tensor
    slots: Tensor
    tiled: Tiled | None = None

    @classmethod
    def of(
        cls, positions: Tensor, rows: Tensor, tables: Tensor, page_size: int, tiled: Tiled | None = None
    ) -> RowLayout:
        page = tables.view(-1)[rows * tables.shape[1] + positions // page_size]
        return cls(positions, rows, tables, page.to(torch.int64) * page_size + positions % page_size, tiled)


class TorchRowAttention:
    """The reference: pages gathered for each row, and what it may not see masked."""

    def __init__(self, cache: KVCache, layout: RowLayout) -> None:
        self._cache = cache
        self._layout = layout

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
        layout, page_size = self._layout, self._cache.page_size
        self._cache.write(layer, layout.slots, k, v)
        used = int(layout.positions.max()) // page_size + 1
        pages = layout.tables[layout.rows, :used].to(torch.int64)
        length = used * page_size
        distance = layout.positions[:, None] - torch.arange(length, device=q.device)
        seen = (distance >= 0) & (distance < (window or length))
        # What others left on the pages may be NaN, which a weight of 0 does not take away.
        unseen = ~seen[:, None, :, None]
        keys, values = (
            part[pages].flatten(1, 2).transpose(1, 2).masked_fill(unseen, 0) for part in self._cache.layer(layer)
        )
        attended = F.scaled_dot_product_attention(
            q[:, :, None], keys, values, seen[:, None, None], enable_gqa=keys.shape[1] != q.shape[1]
        )
        return attended[:, :, 0]


class TritonRowAttention:
    """Both kernels: one row of a sequence at a time, and the layout's tiles."""

    def __init__(self, cache: KVCache, layout: RowLayout, *, splits: int | None = None) -> None:
        """``splits``: parts of each single row's sequence; by default as many as fill the GPU."""
        from sgl_omni.engine.kernels import attention, elementwise

        self._elementwise = elementwise
        self._kernels = attention
        self._cache = cache
        self._layout = layout
        self._splits = splits or attention.splits_for(layout.positions.shape[0], cache.shape.kv_heads, cache.device)

    def from_qkv(self, layer: int, qkv: QKV, rotation: tuple[Tensor, Tensor], *, window: int | None = None) -> Tensor:
        keys, values = self._cache.layer(layer)
        q = self._elementwise.norm_rotate_write(
            qkv.merged, qkv.norms, qkv.eps, rotation, self._layout.slots, keys, values, qkv.heads
        )
        return self._attend(q, keys, values, window)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
        self._cache.write(layer, self._layout.slots, k, v)
        return self._attend(q.contiguous(), *self._cache.layer(layer), window)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
        layout, tiled, out = self._layout, self._layout.tiled, torch.empty_like(q)
        where = (q, keys, values, layout.tables, layout.rows, layout.positions)
        within = None if tiled is None else tiled.within
        self._kernels.decode_attention(*where, window, self._splits, out, within)
        if tiled is not None:
            self._kernels.prefill_attention(*where, tiled.tiles, window, out)
        return out
