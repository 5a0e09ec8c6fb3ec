"""The rows of ids that a request has put out: lists to those who look at one, an array to those who take many."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

_MOST_AT_ONCE = 1024
"""Rows that there is room for at first, at most."""


class OutputRows(Sequence[list[int]]):
    """A list of rows, all as long as the first. Rows that came in a block are handed on as one, never one by one.

    Single rows stay the lists that they were until somebody asks for an array that they are part of.
    """

    __slots__ = ("_block", "_count", "_room", "_single")

    def __init__(self, rows: Iterable[list[int]] = (), *, room: int = 0) -> None:
        """``room``: rows that may come. Memory is touched as they come; to grow would touch new memory each time."""
        self._block: npt.NDArray[np.int32] | None = None  # [room, columns], of which the first `_count` rows are filled
        self._count = 0
        self._room = min(room, _MOST_AT_ONCE)
        self._single = list(rows)

    def append(self, row: list[int]) -> None:
        """The list is kept as it is, so it must not change any more."""
        self._single.append(row)

    def append_block(self, rows: npt.NDArray[np.int32]) -> None:
        """Copies rows [n, columns]."""
        if self._single:
            self._pack()
        self._fill(rows, rows.shape[1])

    def array(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.int32]:
        """A view [n, columns] of the rows from ``start`` to ``stop``; of no rows at all it is [0, 0]."""
        if self._single:
            self._pack()
        if self._block is None:
            return np.empty((0, 0), np.int32)
        return self._block[start : self._count if stop is None else min(stop, self._count)]

    def __len__(self) -> int:
        return self._count + len(self._single)

    @overload
    def __getitem__(self, at: int) -> list[int]: ...

    @overload
    def __getitem__(self, at: slice) -> list[list[int]]: ...

    def __getitem__(self, at: int | slice) -> list[int] | list[list[int]]:
        if isinstance(at, slice):
            start, stop, step = at.indices(len(self))
            if step == 1 and start >= self._count:
                return self._single[start - self._count : max(start, stop) - self._count]
            rows: list[list[int]] = self.array()[at].tolist()
            return rows
        at = range(len(self))[at]
        if at >= self._count:
            return self._single[at - self._count]
        assert self._block is not None
        row: list[int] = self._block[at].tolist()
        return row

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self[:])

    def _pack(self) -> None:
        self._fill(self._single, len(self._single[0]))
        self._single.clear()

    def _fill(self, rows: npt.NDArray[np.int32] | list[list[int]], columns: int) -> None:
        stop = self._count + len(rows)
        if self._block is None or stop > len(self._block):
            grown = np.empty((max(self._room, 2 * stop), columns), np.int32)
            if self._block is not None:
                grown[: self._count] = self._block[: self._count]
            self._block = grown
        self._block[self._count : stop] = rows
        self._count = stop
