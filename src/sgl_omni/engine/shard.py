"""This process's share of a layer under tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from sgl_omni.errors import StartupError


def _alone(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank ``index`` of ``size``. ``reduce`` sums a tensor over all ranks; alone there is nothing to sum."""

    index: int = 0
    size: int = 1
    reduce: Callable[[Tensor], Tensor] = _alone

    def part(self, count: int, what: str) -> int:
        """This rank's share of ``count`` things. Raises ``StartupError`` where they do not divide."""
        if count % self.size:
            raise StartupError(f"{count} {what} cannot be divided among {self.size} ranks")
        return count // self.size

    def kv_heads(self, count: int) -> tuple[int, int]:
        """First KV head and how many. Where ranks outnumber the heads, several ranks hold the same one."""
        if self.size > count:
            if self.size % count:
                raise StartupError(f"{count} KV heads cannot be repeated on {self.size} ranks")
            return self.index * count // self.size, 1
        heads = self.part(count, "KV heads")
        return self.index * heads, heads
