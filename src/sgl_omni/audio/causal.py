"""Causal networks piece by piece: what their parts remember of a stream, and several streams in one batch.

A part looks back a fixed number of steps. It remembers that many of its last inputs, which stand before the next piece;
so pieces are the whole but for rounding, and no step is computed twice.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

Codes = NDArray[np.integer[Any]]


@dataclass(slots=True)
class CausalStream:
    """What all parts remember of one stream, float32 [numbers], and how many frames have gone by."""

    memory: Tensor
    frames: int = 0


class Layout:
    """Where in the memory of a stream the numbers of each part lie."""

    def __init__(self, shapes: Mapping[Hashable, tuple[int, ...]]) -> None:
        """``shapes``: of what each part remembers, without the batch."""
        self.places: dict[Hashable, tuple[slice, tuple[int, ...]]] = {}
        self.numbers = 0
        for part, shape in shapes.items():
            self.places[part] = slice(self.numbers, self.numbers + prod(shape)), shape
            self.numbers += prod(shape)

    def open(self, device: torch.device) -> CausalStream:
        """A stream at its beginning, before which there is nothing but zeros."""
        return CausalStream(torch.zeros(self.numbers, device=device))


class Batch:
    """Rows of steps on their way through a network, and what its parts remember of the streams that they go on.

    The network is causal, so what fills a row up is not heard in it; and its stream remembers nothing of it.
    """

    def __init__(self, layout: Layout, memory: Tensor, seen: Tensor, frames: Tensor | None, longest: int) -> None:
        """``memory`` float32 [batch, numbers], which is written. int64 [batch] each: ``seen``, the frames that have
        gone by, and ``frames``, those of each row; None where all have the ``longest``."""
        self._layout, self._memory, self._seen = layout, memory, seen
        self._ends, self._longest = frames, longest

    def kept(self, part: Hashable) -> Tensor:
        """What a part remembers, float32 [batch, its numbers]; to be written by who does not call ``behind``."""
        return self._memory[:, self._layout.places[part][0]]

    def lengths(self) -> Tensor:
        """Frames of each row, int32 [batch]."""
        if self._ends is None:
            return torch.full_like(self._seen, self._longest, dtype=torch.int32)
        return self._ends.to(torch.int32)

    def filled(self, x: Tensor) -> Tensor:
        """x [batch, steps, width] with zeros behind the end of each row, where there may be anything: what attention
        does not look at must be numbers, too."""
        if self._ends is None:
            return x
        beyond = torch.arange(x.shape[1], device=x.device) >= self._steps(self._ends, x.shape[1])[:, None]
        return x.masked_fill(beyond[..., None], 0)

    def behind(self, part: Hashable, x: Tensor, dim: int = -1) -> Tensor:
        """x [batch, ..., steps, ...] behind what the part remembers along ``dim``; it then remembers the end of it."""
        kept = self.kept(part).view(-1, *self._layout.places[part][1])
        joined, left = torch.cat([kept, x], dim), kept.shape[dim]
        if self._ends is None:
            kept.copy_(joined.narrow(dim, x.shape[dim], left))
        else:
            kept.copy_(_window(joined, dim, self._steps(self._ends, x.shape[dim]), left))
        return joined

    def attention(self, part: Hashable, q: Tensor, k: Tensor, v: Tensor, near: Tensor) -> Tensor:
        """q, k, v [batch, steps, heads, head_dim] -> [batch, steps, heads * head_dim]; ``near`` as below.

        What the part remembers is [2, window - 1, heads of k and v, head_dim].
        """
        keys, values = self.behind(part, torch.stack([k, v], 1), 2).transpose(2, 3).unbind(1)
        gqa = q.shape[2] != k.shape[2]
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, near, enable_gqa=gqa)
        return mixed.transpose(1, 2).flatten(2)

    def near(self, window: int, steps: int) -> Tensor:
        """What each of so many steps sees of ``window - 1`` before the piece and the piece, itself among the window:
        bool [batch, 1, steps, window - 1 + steps]."""
        before = window - 1
        at = torch.arange(before + steps, device=self._seen.device)
        distance = at[before:, None] - at
        known = at >= before - self._steps(self._seen, steps)[:, None, None]
        return ((distance >= 0) & (distance < window) & known)[:, None]

    def positions(self, steps: int) -> Tensor:
        """Of each step in its stream, int64 [batch, steps]."""
        return self._steps(self._seen, steps)[:, None] + torch.arange(steps, device=self._seen.device)

    def _steps(self, frames: Tensor, steps: int) -> Tensor:
        """Frames as steps, of which the longest row has so many."""
        return frames * (steps // self._longest)


class Pieces(Batch):
    """The next frames of several streams, all filled up to the longest at their ends."""

    def __init__(self, layout: Layout, streams: Sequence[CausalStream], frames: Sequence[int]) -> None:
        """``frames`` of each stream's piece, 1 or more."""
        memory = torch.stack([stream.memory for stream in streams])
        seen = torch.tensor([stream.frames for stream in streams], device=memory.device)
        super().__init__(layout, memory, seen, None, max(frames))
        self._streams = streams
        self._frames = frames
        self._fill(list(frames))

    def keep_last(self, x: Tensor, most: int) -> Tensor:
        """x [batch, channels, frames] -> the last frames of each piece, ``most`` at most. The others go no further."""
        lengths = [min(length, most) for length in self._lengths]
        starts = [whole - kept for whole, kept in zip(self._lengths, lengths, strict=True)]
        self._fill(lengths)
        padded = F.pad(x, (0, self._longest))  # the last frames of one piece may be fewer than those of another
        return _window(padded, -1, self._ints(starts), self._longest)

    def finish(self) -> None:
        """Once all parts are through: streams remember what their parts do, and their frames have gone by."""
        for stream, row, frames in zip(self._streams, self._memory, self._frames, strict=True):
            stream.memory.copy_(row)
            stream.frames += frames

    def _fill(self, lengths: list[int]) -> None:
        self._lengths, self._longest = lengths, max(lengths)
        self._ends = None if min(lengths) == self._longest else self._ints(lengths)

    def _ints(self, values: list[int]) -> Tensor:
        return torch.tensor(values, device=self._memory.device)


def filled_up(codes: Sequence[Codes]) -> Tensor:
    """Pieces [frames, codebooks] -> int64 [batch, most frames, codebooks], with zeros after the ends of the others."""
    filled = np.zeros((len(codes), max(map(len, codes)), codes[0].shape[1]), np.int64)
    for row, each in zip(filled, codes, strict=True):
        row[: len(each)] = each
    return torch.from_numpy(filled)


def _window(x: Tensor, dim: int, starts: Tensor, length: int) -> Tensor:
    """Of each row of x [batch, ...] so many places along ``dim``, from its own start."""
    dim %= x.dim()
    index = starts[:, None] + torch.arange(length, device=x.device)
    index = index.view(-1, *(length if at == dim else 1 for at in range(1, x.dim())))
    return x.gather(dim, index.expand([length if at == dim else size for at, size in enumerate(x.shape)]))
