"""Shared memory for one direction of one channel: pooled segments that a sender fills and a receiver maps.

A segment is an anonymous memory file, so nothing is named, and nothing is left when both processes are gone,
however they went. The descriptor crosses once; afterwards both ends hold only mappings. A segment
belongs to the sender until it is handed over and to the receiver until it says `Release`.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

INLINE_LIMIT = 64 * 1024
"""Values up to this many bytes travel inside the message."""

RETAINED_BYTES = 64 * 1024 * 1024
"""Free segments kept for reuse by one channel; beyond this a released segment is unmapped."""

Bytes = npt.NDArray[np.uint8]


def size_class(size: int) -> int:
    """The next power of two, so that a pool serves payloads of varying size with few segments."""
    return 1 << max(size - 1, INLINE_LIMIT).bit_length()


class Allowance:
    """What all pools of a process together may take, in bytes. ``refused`` counts what did not fit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self.refused = 0

    def take(self, size: int) -> bool:
        if self.taken + size > self.limit:
            self.refused += 1
            return False
        self.taken += size
        return True

    def give_back(self, size: int) -> None:
        self.taken -= size


def machine_share() -> int:
    """What the segments of one process may take: a quarter of the machine's memory."""
    return int(psutil.virtual_memory().total) // 4


class SegmentPool:
    """The sender's side: which segments are free and which are with the receiver."""

    def __init__(self, allowance: Allowance | None = None) -> None:
        """``allowance``: what all pools of the process may take; None: no limit."""
        self._allowance = allowance
        self._maps: dict[int, mmap.mmap] = {}
        self._free: dict[int, list[int]] = {}
        self._free_bytes = 0
        self._next = 0

    @property
    def leased(self) -> int:
        """Segments now with the receiver."""
        return len(self._maps) - sum(len(ids) for ids in self._free.values())

    @property
    def mapped_bytes(self) -> int:
        return sum(len(m) for m in self._maps.values())

    def take(self, size: int) -> tuple[int, mmap.mmap, int | None]:
        """A segment of at least `size` bytes: (id, mapping, descriptor to send or None if the receiver has it).

        The caller closes the descriptor once it was sent.

        Raises:
            MemoryError: the process's pools may take no more.
        """
        size = size_class(size)
        free = self._free.get(size)
        if free:
            segment = free.pop()
            self._free_bytes -= size
            return segment, self._maps[segment], None
        if self._allowance is not None and not self._allowance.take(size):
            raise MemoryError(f"{self._allowance.taken} of {self._allowance.limit} bytes are in use")
        fd = -1
        try:
            fd = os.memfd_create("sgl-omni", os.MFD_CLOEXEC)
            os.ftruncate(fd, size)
            mapping = mmap.mmap(fd, size)
        except BaseException:
            if fd >= 0:
                os.close(fd)
            self._took_back(size)
            raise
        segment = self._next
        self._next += 1
        self._maps[segment] = mapping
        return segment, mapping, fd

    def give_back(self, segment: int) -> bool:
        """Takes a released segment back. False: it was surplus and is gone, on the receiver's side too."""
        mapping = self._maps[segment]
        size = len(mapping)
        if self._free_bytes + size > RETAINED_BYTES:
            self._unmap(segment)
            return False
        self._free.setdefault(size, []).append(segment)
        self._free_bytes += size
        return True

    def shrink(self) -> list[int]:
        """Unmaps all free segments; returns them, which the receiver is to forget."""
        dropped = [segment for segments in self._free.values() for segment in segments]
        for segment in dropped:
            self._unmap(segment)
        self._free.clear()
        self._free_bytes = 0
        return dropped

    def _unmap(self, segment: int) -> None:
        mapping = self._maps.pop(segment)
        self._took_back(len(mapping))
        mapping.close()

    def _took_back(self, size: int) -> None:
        if self._allowance is not None:
            self._allowance.give_back(size)

    def close(self) -> None:
        """Unmaps everything; a receiver's mappings stay valid until it drops them."""
        for mapping in self._maps.values():
            self._took_back(len(mapping))
            mapping.close()
        self._maps.clear()
        self._free.clear()
        self._free_bytes = 0


class SegmentViews:
    """The receiver's side: maps segments and notices when the last view of one is dropped."""

    def __init__(self, on_drop: Callable[[int], None]) -> None:
        self._maps: dict[int, mmap.mmap] = {}
        self._leases: dict[int, weakref.ref[Bytes]] = {}
        self._on_drop = on_drop

    @property
    def leased(self) -> int:
        return len(self._leases)

    def map(self, segment: int, size: int, fd: int) -> None:
        """Maps an announced segment and closes its descriptor."""
        try:
            self._maps[segment] = mmap.mmap(fd, size)
        finally:
            os.close(fd)

    def view(self, segment: int, size: int) -> Bytes:
        """The first `size` bytes; `on_drop(segment)` is called when nothing refers to them any more."""
        array: Bytes = np.frombuffer(self._maps[segment], dtype=np.uint8, count=size)

        def dropped(_: Any) -> None:
            if self._leases.pop(segment, None) is not None:
                self._on_drop(segment)

        self._leases[segment] = weakref.ref(array, dropped)
        return array

    def forget(self, segment: int) -> None:
        """Unmaps a segment that the sender will not use again."""
        self._maps.pop(segment, None)

    def close(self) -> None:
        """Drops all mappings; views still held keep theirs alive and report nothing any more."""
        self._leases.clear()
        self._maps.clear()
