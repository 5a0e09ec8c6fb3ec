"""The last part of many codecs as one kernel a convolution, which activates what it has summed: convolutions that make
steps of channels more and channels fewer, each followed by residual units, with snakes between all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sgl_omni.engine.kernels.convolution import Convolution

Past = Callable[[Any, Tensor, int], None]
"""Called with a part, its input and the input's steps a frame before a part with ``behind`` reads its input."""


def ready(part: Any, x: Tensor, scale: int, past: Past | None) -> Tensor:
    """x, with the past that a part looks back to."""
    if part.behind:
        assert past is not None, "a part looks back to a past that is not given"
        past(part, x, scale)
    return x


@dataclass(frozen=True, slots=True)
class Block:
    """Units are a wide convolution and a narrow one, whose sum is added to what the unit began with."""

    grow: Convolution
    units: tuple[tuple[Convolution, Convolution], ...]


@dataclass(frozen=True, slots=True)
class SnakeDecoder:
    """On a GPU such a decoder is bound by reading and writing what lies between its hundreds of small operations.

    The snakes are those of the convolutions that stand before them.
    """

    first: Convolution
    blocks: Sequence[Block]
    last: Convolution

    def __call__(self, active: Tensor, lengths: Tensor, scale: int = 1, past: Past | None = None) -> Tensor:
        """active [batch, behind + steps, width] of the factors' type -> float32 [batch, samples].

        ``lengths`` int32 [batch]: frames of each row, of ``scale`` steps each; samples behind these are anything.
        ``past`` must be given where parts have ``behind``.
        """
        active = self.first.activated(ready(self.first, active, scale, past), lengths, scale)
        for block in self.blocks:
            plain, active = block.grow.both(ready(block.grow, active, scale, past), lengths, scale)
            scale *= block.grow.stride
            *units, (last_wide, last_narrow) = block.units
            for wide, narrow in units:
                inner = wide.activated(ready(wide, active, scale, past), lengths, scale)
                plain, active = narrow.both(inner, lengths, scale, plain)
            inner = last_wide.activated(ready(last_wide, active, scale, past), lengths, scale)
            active = last_narrow.activated(inner, lengths, scale, plain)
        return self.last(ready(self.last, active, scale, past), lengths, scale)[..., 0]
