"""Device tensors in one direction of one channel: pooled blocks of device memory that a sender fills.

A block is offered once, with its descriptor, and used when the receiver has said that it can open it; until then, and
where it cannot, tensors take the way through host memory. Who can wait asks for `room` first, and so keeps to the
device: first come, first served, so that nobody waits for ever beside others.
A filled block is the receiver's until it says `BlocksRead`, which is as soon as it has made a copy of its own; an abort
changes nothing of that, and with the end of either process the other frees what it holds.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Hashable, Iterable
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
        self.pools: list[BlockPool] = []
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
        self._reserved: dict[Hashable, set[int]] = {}
        self._waiting: dict[Hashable, tuple[list[int], Callable[[], None]]] = {}
        self._next = 0
        self._stopped = False
        device.pools.append(self)

    @property
    def leased(self) -> int:
        """Blocks now with the receiver."""
        reserved = sum(len(numbers) for numbers in self._reserved.values())
        return len(self._blocks) - len(self._free) - len(self._offered) - reserved

    @property
    def held_bytes(self) -> int:
        return sum(block.size for block in self._blocks.values())

    def fill(self, tensor: Tensor, holder: Hashable = None) -> int | None:
        """The block that holds a copy of the tensor; None where it has to go through host memory.

        So it is with a tensor that does not lie on the device or is small, with a receiver that cannot open blocks or
        has not answered yet, and where the pools are full. `holder`: who asked `room` before.
        """
        if not self._may_go(tensor):
            return None
        reserved = self._reserved.get(holder)
        source = reserved if reserved is not None else set[int]() if self._waiting else self._free
        number = self._smallest(source, tensor.nbytes)
        if number is None:
            if reserved is None:
                self._try_to_grow(tensor.nbytes)
            return None
        self._blocks[number].write(tensor)
        source.discard(number)
        self._device.sent += 1
        self._device.sent_bytes += tensor.nbytes
        return number

    def room(self, holder: Hashable, tensors: Iterable[Tensor], wake: Callable[[], None]) -> bool:
        """Reserves blocks for all of these until `release`, and what is missing is offered; True where that is done.

        Else `holder` has its turn behind those that wait already, and `wake` is called when its blocks are there. Where
        waiting would bring nothing the reservation is of what there is, and the rest goes by the host.
        """
        if self._stopped or holder in self._reserved:
            return True
        if holder in self._waiting:
            return False
        sizes = sorted((t.nbytes for t in tensors if self._may_go(t)), reverse=True)
        if not sizes or self._stopped:
            return True
        self._waiting[holder] = (sizes, wake)
        self._serve(asking=holder)
        return holder in self._reserved

    def release(self, holder: Hashable) -> None:
        """Gives up what is reserved for a holder, or its place among those that wait."""
        was_waiting = self._waiting.pop(holder, None) is not None
        reserved = self._reserved.pop(holder, None)
        if reserved is not None:
            self._free |= reserved
        if reserved is not None or was_waiting:
            self._settle()

    def _may_go(self, tensor: Tensor) -> bool:
        import torch

        if self._stopped or tensor.layout != torch.strided or tensor.nbytes <= INLINE_LIMIT:
            return False
        try:
            return self._device.memory().holds(tensor)
        except DeviceMemoryError as error:
            self._stop(str(error))
            return False

    def _try_to_grow(self, size: int) -> None:
        try:
            self._grow(self._device.memory(), size)
        except DeviceMemoryError as error:
            self._stop(str(error))

    def _serve(self, asking: Hashable = None) -> None:
        """Gives those that wait what they need, the first one first, as far as there are blocks."""
        while self._waiting and not self._stopped:
            holder, (sizes, wake) = next(iter(self._waiting.items()))
            try:
                found = self._found(sizes)
            except DeviceMemoryError as error:
                self._stop(str(error))
                return
            if found is None:
                return
            del self._waiting[holder]
            self._free -= found
            self._reserved[holder] = found
            if holder != asking:
                wake()

    def _found(self, sizes: list[int]) -> set[int] | None:
        """Blocks for all of these; fewer where no more can be had; None where they are on their way."""
        memory, found, missing = self._device.memory(), set[int](), list[int]()
        for size in sizes:
            number = self._smallest(self._free - found, size)
            if number is None:
                missing.append(size)
            else:
                found.add(number)
        for size in missing:
            self._grow(memory, size, found)
        if not missing:
            return found
        if self._offered or self.leased or self._reserved:
            return None
        together = sum(self._block_size(memory, size) for size in sizes)
        if together <= self._device.allowance.limit - self._device.allowance.taken + self.held_bytes:
            self._drop_free()  # they are of other sizes than are needed now
            for size in missing:
                self._grow(memory, size)
            return None if self._offered else set()
        return found

    def _smallest(self, numbers: Collection[int], size: int) -> int | None:
        fitting = [number for number in numbers if self._blocks[number].size >= size]
        return min(fitting, key=lambda n: self._blocks[n].size, default=None)

    def _block_size(self, memory: DeviceMemory, size: int) -> int:
        """A power of two, so that tensors of about one size use the same blocks, where the pools have room for it."""
        wide = memory.rounded(max(SMALLEST_BLOCK, 1 << (size - 1).bit_length()))
        return wide if wide <= self._device.allowance.limit else memory.rounded(size)

    def _by_size(self, numbers: Collection[int]) -> list[int]:
        return sorted(numbers, key=lambda n: self._blocks[n].size)

    def _grow(self, memory: DeviceMemory, size: int, kept: Collection[int] = ()) -> None:
        """Offers one more block, after giving up free ones where that makes room: here all but `kept`, then those that
        lie ready for other receivers and for nobody who waits."""
        allowance = self._device.allowance
        if any(self._blocks[number].size >= size for number in self._offered):
            return
        wanted = self._block_size(memory, size)
        if wanted > allowance.limit:
            return
        spare = [(self, number) for number in self._by_size(self._free.difference(kept))]
        for pool in self._device.pools:
            if pool is not self and not pool._waiting:
                spare += [(pool, number) for number in pool._by_size(pool._free)]
        if allowance.taken - sum(pool._blocks[number].size for pool, number in spare) + wanted <= allowance.limit:
            for pool, number in spare:
                if allowance.taken + wanted > allowance.limit:
                    pool._drop(number)
        if not allowance.take(wanted):
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
        self._settle()

    def give_back(self, number: int) -> None:
        """The receiver has read a block, or it was never sent."""
        if number in self._blocks:
            self._free.add(number)
            self._settle()

    def _settle(self) -> None:
        """Blocks are free: for those that wait here, else for what other receivers lack."""
        if self._stopped:
            self._drop_free()
        self._serve()
        for pool in self._device.pools if self._free else ():
            if pool is not self:
                pool._serve()

    def _stop(self, reason: str) -> None:
        """From here on all goes through host memory; said once."""
        if self._stopped:
            return
        self._stopped = True
        log.warning("tensors to '%s' go through host memory: %s", self._peer(), reason)
        self._drop_free()
        self._wake_all()

    def _wake_all(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for _, wake in waiting.values():
            wake()

    def _drop_free(self) -> None:
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
        self._stopped = True
        self._device.pools.remove(self)
        for held in (self._blocks, self._free, self._offered, self._reserved):
            held.clear()
        self._wake_all()


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
