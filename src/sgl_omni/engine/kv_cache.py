"""The paged KV cache: tensors of an exact size, and the pool that says whose each page is."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_omni.errors import StartupError


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one position takes: keys and values of ``kv_heads`` heads (those of this shard) in every layer."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.float32

    @property
    def bytes_per_token(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


def count_pages(
    shape: KVShape, page_size: int, *, max_total_tokens: int | None = None, kv_cache_bytes: int | None = None
) -> int:
    """Whole pages in a pool of that many tokens or bytes; exactly one of the two is given.

    Nothing else enters, above all not the memory that happens to be free now. Raises ``StartupError`` for a pool
    of no page.
    """
    if (max_total_tokens is None) == (kv_cache_bytes is None):
        raise StartupError("give the KV pool either max_total_tokens or kv_cache_bytes")
    if page_size < 1:
        raise StartupError(f"page_size must be 1 or more, not {page_size}")
    tokens = max_total_tokens if kv_cache_bytes is None else kv_cache_bytes // shape.bytes_per_token
    assert tokens is not None
    if tokens < page_size:
        raise StartupError(
            f"a KV pool of {tokens} tokens holds no page of {page_size}; give max_total_tokens of at least "
            f"{page_size}, or kv_cache_bytes of {page_size * shape.bytes_per_token}"
        )
    return tokens // page_size


class PagePool:
    """Hands out page numbers, counts who uses each, and remembers what unused ones hold.

    A page is free, used (by one or more requests), or cached: unused, but found again by its content's key
    until its place is wanted. Cached pages go least recently used first.
    """

    def __init__(self, num_pages: int, page_size: int, bytes_per_token: int = 0) -> None:
        """``bytes_per_token`` is what a position takes of memory, for those who ask; 0 where nobody says."""
        self.bytes_per_token = bytes_per_token
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = deque(range(num_pages))
        self._users = [0] * num_pages
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def capacity(self) -> int:
        """Positions that all pages hold together."""
        return self.num_pages * self.page_size

    @property
    def available(self) -> int:
        """Pages that ``allocate`` could give now."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        return self.num_pages - self.available

    @property
    def cached(self) -> int:
        return len(self._cached)

    def pages_for(self, length: int) -> int:
        """Pages that ``length`` positions take."""
        return -(-length // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """``count`` pages of unknown content, now used once. The caller has looked at ``available``."""
        assert count <= self.available, f"{count} pages wanted, {self.available} available"
        pages = [self._free.popleft() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            self._users[page] = 1
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Gives up one use of each page of a sequence; its last pages are the first to be forgotten."""
        for page in reversed(pages):
            assert self._users[page] > 0, f"page {page} is not in use"
            self._users[page] -= 1
            if self._users[page]:
                continue
            if page in self._key_of:
                self._cached[page] = None
            else:
                self._free.append(page)

    def remember(self, page: int, key: bytes) -> None:
        """Says what a used page holds. Content that another page holds already is not remembered twice."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def take_known(self, keys: Sequence[bytes]) -> list[int]:
        """Pages of the longest run of ``keys`` that the pool remembers, each now used once more."""
        pages: list[int] = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            self._cached.pop(page, None)
            self._users[page] += 1
            pages.append(page)
        return pages

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        del self._page_of[self._key_of.pop(page)]
        return page


class KVCache:
    """Keys and values of every layer, allocated once: [layers, 2, pages, page_size, kv_heads, head_dim]."""

    def __init__(self, shape: KVShape, num_pages: int, page_size: int, device: torch.device | str = "cpu") -> None:
        self.shape = shape
        self.num_pages = num_pages
        self.page_size = page_size
        size = (shape.layers, 2, num_pages, page_size, shape.kv_heads, shape.head_dim)
        self._pages = torch.zeros(size, dtype=shape.dtype, device=device)
        self._layers: list[tuple[Tensor, Tensor]] = [(layer[0], layer[1]) for layer in self._pages]
        self._slots = [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in self._layers]

    @property
    def device(self) -> torch.device:
        return self._pages.device

    @property
    def num_bytes(self) -> int:
        return self._pages.nbytes

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, each [pages, page_size, kv_heads, head_dim]."""
        return self._layers[index]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores k and v [n, kv_heads, head_dim] at ``slots`` int64 [n] (page * page_size + offset)."""
        keys, values = self._slots[layer]
        keys.index_copy_(0, slots, k)
        values.index_copy_(0, slots, v)

    def read(self, layer: int, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """A copy of the first ``length`` positions of a page table int64 [n]: two of [length, kv_heads, head_dim]."""
        keys, values = self._layers[layer]
        return keys[pages].flatten(0, 1)[:length], values[pages].flatten(0, 1)[:length]

    def view(self, first_page: int, length: int) -> tuple[Tensor, ...]:
        """Positions 0 to ``length`` of pages that lie side by side, without a copy.

        Views [1, kv_heads, length, head_dim]: keys and values of layer 0, of layer 1, ...
        """
        start = first_page * self.page_size
        run = self._pages.flatten(2, 3)[:, :, start : start + length]
        return run.transpose(2, 3).unsqueeze(2).flatten(0, 1).unbind(0)
