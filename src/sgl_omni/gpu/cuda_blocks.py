"""Blocks of GPU memory: the driver's own allocations, handed on as file descriptors.

The same calls as those that share weights (`weights/vmm.py`). A mapping stays valid after the process that made the
memory has ended, so neither end's death makes the other's copy fault. Copies go through the driver, since torch takes
memory of another GPU only by copying it: under peer access one copy crosses.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import torch

from sgl_omni.gpu.device_memory import DeviceMemoryError
from sgl_omni.gpu.weights.cuda_driver import READ_WRITE, CudaDriver, DriverError
from sgl_omni.gpu.weights.cuda_tensor import enter_context

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("sgl_omni.channel")


class CudaMemory:
    """The GPU that this process uses, by its ordinal here.

    Raises:
        DeviceMemoryError: the device or the container does not share memory by file descriptor.
    """

    def __init__(self, ordinal: int) -> None:
        self._device = torch.device("cuda", ordinal)
        enter_context(self._device)
        try:
            self._driver = CudaDriver(ordinal)
            if not self._driver.shares_descriptors():
                raise DeviceMemoryError(f"GPU {ordinal} does not share memory by file descriptor")
        except DriverError as error:
            raise DeviceMemoryError(str(error)) from error

    def holds(self, tensor: Tensor) -> bool:
        return tensor.device == self._device

    def rounded(self, size: int) -> int:
        return self._driver.rounded(size)

    def create(self, size: int) -> CudaBlock:
        try:
            memory = self._driver.create(size)
            return CudaBlock(self._driver, memory, size, self._device)
        except DriverError as error:
            raise DeviceMemoryError(f"no block of {size} bytes: {error}") from error

    def open(self, fd: int, size: int) -> CudaBlock:
        """Of another GPU too, where this one has peer access to it."""
        try:
            return CudaBlock(self._driver, self._driver.import_descriptor(fd), size, self._device)
        except DriverError as error:
            raise DeviceMemoryError(f"another process's block cannot be reached: {error}") from error


class CudaBlock:
    """Takes over the driver's handle `memory`, and maps it for this process's GPU."""

    def __init__(self, driver: CudaDriver, memory: int, size: int, device: torch.device) -> None:
        self._driver = driver
        self._memory = memory
        self._device = device
        self.size = size
        try:
            self._address = driver.map(memory, size, READ_WRITE)
        except DriverError:
            driver.release(memory)
            raise

    def export(self) -> int:
        try:
            return self._driver.export(self._memory)
        except DriverError as error:
            raise DeviceMemoryError(str(error)) from error

    def write(self, tensor: Tensor) -> None:
        plain = tensor.detach().contiguous()
        self._copy(self._address, plain.data_ptr(), plain.nbytes)

    def read(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        try:
            own = torch.empty(shape, dtype=dtype, device=self._device)
        except torch.OutOfMemoryError:
            log.warning("no GPU memory for a tensor that arrives; it comes to the host's")
            own = torch.empty(shape, dtype=dtype)
            self._driver.copy_to_host(own.data_ptr(), self._address, own.nbytes)
            return own
        self._copy(own.data_ptr(), self._address, own.nbytes)
        return own

    def _copy(self, target: int, source: int, size: int) -> None:
        """Behind the work of the stream that is current here, as a copy to the host would be; complete on return."""
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream(self._device)
            self._driver.copy(target, source, size, stream.cuda_stream)
            stream.synchronize()

    def close(self) -> None:
        self._driver.unmap(self._address, self.size)
        self._driver.release(self._memory)


def device_memory(ordinal: int) -> CudaMemory:
    """`CudaMemory` after one block was made, handed on and opened here, which some containers forbid.

    Raises:
        DeviceMemoryError: what the driver refused.
    """
    memory = CudaMemory(ordinal)
    block = memory.create(memory.rounded(1))
    try:
        fd = block.export()
        try:
            memory.open(fd, block.size).close()
        finally:
            os.close(fd)
    finally:
        block.close()
    return memory
