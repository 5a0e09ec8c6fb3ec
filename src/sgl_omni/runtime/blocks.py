"""Device tensors in one direction of one channel: pooled blocks of device memory that a sender fills.

A block is offered once, with its descriptor, and used when the receiver has said that it can open it; until then, and
where it cannot, tensors take the way through host memory. Who can wait asks `room` first, and so keeps to the device.
A filled block is the receiver's until it says `BlocksRead`, which is as soon as it has made a copy of its own; an abort
changes nothing of that, and with the end of either process the other frees what it holds.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

from sgl_omni.gpu.device_memory import Block, DeviceMemory, DeviceMemoryError
from sgl_omni.runtime.segments import INLINE_LIMIT, Allowance

if TYPE_CHECKING:
    import torch
    from torch import Tensor

log = logging.getLogger("sgl_omni.channel")

SMALLEST_BLOCK = 2 * 1024 * 1024
"""What the driver gives at least."""


class Device:
    """This process's device memory and what its pools may take of it. The driver is asked at the first use.

    ``sent``, ``sent_bytes``: the tensors that left this process by device memory.
    """

    def __init__(self, make: Callable[[], DeviceMemory], limit: int) -> None:
        self._make = make
        self._memory: DeviceMemory | None = None
        self.refusal = ""
        self.allowance = Allowance(limit)
        self.sent = self.sent_bytes = 0

    def memory(self) -> DeviceMemory:
        """Raises ``DeviceMemoryError``, the first reason again at every call."""
        if self.refusal:
            raise DeviceMemoryError(self.refusal)
        if self._memory is None:
            try:
                self._memory = self._make()
            except DeviceMemoryError as error:
                self.refusal = str(error)
                raise
        return self._memory


Offer = Callable[[int, int, int], None]
"""Announces a block to the receiver: (block, size, descriptor, which is closed once it was sent)."""


class BlockPool:
    """The sender's side: which blocks are free, and which are with the receiver."""

    def __init__(self, device: Device, offer: Offer, forget: Callable[[int], None], peer: Callable[[], str]) -> None:
        """`forget(block)` tells the receiver that a block is gone; `peer()` is what it is called in the log."""
        self._device = device
        self._offer = offer
        self._forget = forget
        self._peer = peer
        self._blocks: dict[int, Block] = {}
        self._offered: set[int] = set()
        self._free: set[int] = set()
        self._next = 0
        self._stopped = False

    @property
    def leased(self) -> int:
        """Blocks now with the receiver."""
        return len(self._blocks) - len(self._free) - len(self._offered)

    @property
    def held_bytes(self) -> int:
        return sum(block.size for block in self._blocks.values())

    def fill(self, tensor: Tensor) -> int | None:
        """The block that holds a copy of the tensor; None where it has to go through host memory.

        So it is with a tensor that does not lie on the device or is small, with a receiver that cannot open blocks or
        has not answered yet, and where the pools are full.
        """
        if self._stopped or tensor.nbytes <= INLINE_LIMIT:
            return None
        try:
            memory = self._device.memory()
            if not memory.holds(tensor):
                return None
            fitting = [number for number in self._free if self._blocks[number].size >= tensor.nbytes]
            if not fitting:
                self._grow(memory, tensor.nbytes)
                return None
        except DeviceMemoryError as error:
            self._stop(str(error))
            return None
        number = min(fitting, key=lambda n: self._blocks[n].size)
        self._blocks[number].write(tensor)
        self._free.discard(number)
        self._device.sent += 1
        self._device.sent_bytes += tensor.nbytes
        return number

    def room(self, tensors: Iterable[Tensor]) -> bool:
        """Whether `fill` would find blocks for all of these; False where it is worth to ask again once one comes back.

        What is missing is offered. True as well where waiting would change nothing, so that they go by the host.
        """
        if self._stopped:
            return True
        ours: set[int] = set()
        missing: list[int] = []
        try:
            memory = self._device.memory()
            sizes = [t.nbytes for t in tensors if t.nbytes > INLINE_LIMIT and memory.holds(t)]
            for size in sorted(sizes, reverse=True):
                fitting = [number for number in self._free - ours if self._blocks[number].size >= size]
                if fitting:
                    ours.add(min(fitting, key=lambda n: self._blocks[n].size))
                else:
                    missing.append(size)
            for size in missing:
                self._grow(memory, size, ours)
        except DeviceMemoryError as error:
            self._stop(str(error))
        return not missing or self._stopped or not (self._offered or self.leased)

    def _grow(self, memory: DeviceMemory, size: int, kept: Collection[int] = ()) -> None:
        """Offers one more block, after giving up free ones other than `kept` where there is no room."""
        if any(self._blocks[number].size >= size for number in self._offered):
            return
        wanted = memory.rounded(max(SMALLEST_BLOCK, 1 << (size - 1).bit_length()))
        if wanted > self._device.allowance.limit:
            return
        for number in sorted(self._free.difference(kept), key=lambda n: self._blocks[n].size):
            if self._device.allowance.taken + wanted <= self._device.allowance.limit:
                break
            self._drop(number)
        if not self._device.allowance.take(wanted):
            return
        try:
            block = memory.create(wanted)
        except DeviceMemoryError:
            self._device.allowance.give_back(wanted)
            raise
        try:
            fd = block.export()
        except DeviceMemoryError:
            self._device.allowance.give_back(wanted)
            block.close()
            raise
        number = self._next
        self._next += 1
        self._blocks[number] = block
        self._offered.add(number)
        self._offer(number, wanted, fd)

    def answered(self, number: int, refusal: str) -> None:
        """The receiver has opened an offered block, or says why it cannot."""
        if number not in self._offered:
            return
        self._offered.discard(number)
        self._free.add(number)
        if refusal:
            self._stop(refusal)

    def give_back(self, number: int) -> None:
        """The receiver has read a block, or it was never sent."""
        if number in self._blocks:
            self._free.add(number)
            if self._stopped:
                self._drop(number)

    def _stop(self, reason: str) -> None:
        """From here on all goes through host memory; said once."""
        self._stopped = True
        log.warning("tensors to '%s' go through host memory: %s", self._peer(), reason)
        for number in list(self._free):
            self._drop(number)

    def _drop(self, number: int) -> None:
        self._free.discard(number)
        block = self._blocks.pop(number)
        self._device.allowance.give_back(block.size)
        block.close()
        self._forget(number)

    def close(self) -> None:
        """Frees everything; what a receiver has opened stays valid until it closes it."""
        for block in self._blocks.values():
            self._device.allowance.give_back(block.size)
            block.close()
        self._blocks.clear()
        self._free.clear()
        self._offered.clear()


class OpenedBlocks:
    """The receiver's side: the sender's blocks that are open here."""

    def __init__(self, device: Device | None) -> None:
        self._device = device
        self._blocks: dict[int, Block] = {}

    @property
    def count(self) -> int:
        return len(self._blocks)

    def open(self, number: int, size: int, fd: int) -> str:
        """Opens an offered block and closes its descriptor; "" or why it cannot be opened."""
        try:
            if self._device is None:
                return "the receiver computes on no device"
            self._blocks[number] = self._device.memory().open(fd, size)
        except DeviceMemoryError as error:
            return str(error)
        finally:
            os.close(fd)
        return ""

    def read(self, number: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        return self._blocks[number].read(dtype, shape)

    def forget(self, number: int) -> None:
        block = self._blocks.pop(number, None)
        if block is not None:
            block.close()

    def close(self) -> None:
        for block in self._blocks.values():
            block.close()
        self._blocks.clear()
