"""Keys and values of a loop within a step, and attention over them.

Every row has its own few places. Shapes depend on the number of rows alone, so that the loop can be a part of a
captured graph.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from sgl_omni.engine.attention import QKV
from sgl_omni.engine.kv_cache import KVShape
from sgl_omni.engine.platform import for_kernels

_MOST_KERNEL_PLACES = 64
"""Places of a row whose keys and values one program of the GPU's kernel holds at once."""


class TorchFixedAttend:
    """The reference."""

    def __init__(self, places: Tensor, start: int, count: int) -> None:
        """``places`` [layers, 2, rows, length, kv_heads, head_dim]: of every row, ``start`` to ``start + count`` are
        now written; each sees its row up to itself. More than one at a time is only possible at the start."""
        self._places = places
        self._start = start
        self._stop = start + count
        self.length = places.shape[3]

    def rotation(self, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Of all rows, from cosines and sines [length, 1, head_dim / 2]: each [rows * count, 1, head_dim / 2]."""
        rows = self._places.shape[2]
        cosine, sine = (part[self._start : self._stop].expand(rows, -1, -1, -1).flatten(0, 1) for part in table)
        return cosine, sine

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
        _need_whole_rows(window, self.length)
        keys, values = self._places[layer]
        n = keys.shape[0]
        keys[:, self._start : self._stop] = k.unflatten(0, (n, -1))
        values[:, self._start : self._stop] = v.unflatten(0, (n, -1))
        attended = F.scaled_dot_product_attention(
            q.unflatten(0, (n, -1)).transpose(1, 2),
            keys[:, : self._stop].transpose(1, 2),
            values[:, : self._stop].transpose(1, 2),
            is_causal=self._start == 0,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return attended.transpose(1, 2).flatten(0, 1)


class TritonFixedAttend:
    """The same in one kernel, norms and rotation with it."""

    def __init__(self, places: Tensor, start: int, count: int, *, neighbours: bool = False) -> None:
        from sgl_omni.engine.kernels import places as kernels

        self._kernels = kernels
        self._places = places
        self._start = start
        self._stop = start + count
        self._neighbours = neighbours
        self.length = places.shape[3]

    def rotation(self, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Of one row, which is that of all: each [count, 1, head_dim / 2]."""
        cosine, sine = table
        return cosine[self._start : self._stop], sine[self._start : self._stop]

    def from_qkv(self, layer: int, qkv: QKV, rotation: tuple[Tensor, Tensor], *, window: int | None = None) -> Tensor:
        _need_whole_rows(window, self.length)
        keys, values = self._places[layer]
        return self._kernels.attend(
            qkv.merged, qkv.norms, qkv.eps, qkv.heads, rotation, keys, values, self._start, neighbours=self._neighbours
        )


FixedAttend = TorchFixedAttend | TritonFixedAttend


class FixedCache:
    """Room for ``length`` places a row, which lives as long as the loop; what is not written is never read."""

    def __init__(self, shape: KVShape, rows: int, length: int, like: Tensor, *, neighbours: bool = False) -> None:
        """``neighbours``: rotation turns elements 2 i and 2 i + 1 of a head, not i and i + head_dim / 2."""
        self._places = like.new_empty(shape.layers, 2, rows, length, shape.kv_heads, shape.head_dim)
        self._neighbours = neighbours
        self._fuses = for_kernels(like) and length <= _MOST_KERNEL_PLACES
        self.length = length

    def at(self, start: int, count: int) -> FixedAttend:
        """Attention of places ``start`` to ``start + count`` of every row."""
        if self._fuses:
            return TritonFixedAttend(self._places, start, count, neighbours=self._neighbours)
        return TorchFixedAttend(self._places, start, count)


def _need_whole_rows(window: int | None, length: int) -> None:
    if window is not None and window < length:
        raise NotImplementedError(f"a window of {window} is smaller than a row of {length} codes")
