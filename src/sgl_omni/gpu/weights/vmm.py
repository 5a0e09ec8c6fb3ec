"""The backend of choice on CUDA: memory that the driver hands on as a file descriptor, mapped read-only by all.

Seen on an H200 with CUDA 13: a write to it faults instead of corrupting, and the mapping stays valid after the process
that made the memory has ended, with and without MPS.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from sgl_omni.gpu.weights.backend import Handle
from sgl_omni.gpu.weights.cuda_driver import READ, READ_WRITE, CudaDriver, DriverError
from sgl_omni.gpu.weights.cuda_tensor import bytes_at, enter_context


class VmmBackend:
    name = "vmm"
    outlives_leader = True

    @staticmethod
    def refusal(device: torch.device) -> str | None:
        """Why this driver or container cannot share memory so; None where it can."""
        enter_context(device)
        driver = CudaDriver(device.index or 0)
        if not driver.shares_descriptors():
            return "the device does not share memory by file descriptor"
        try:
            handle = driver.create(driver.rounded(1))
            os.close(driver.export(handle))
            driver.release(handle)
        except DriverError as error:
            return str(error)
        return None

    def create(self, size: int, device: torch.device) -> VmmAllocation:
        return VmmAllocation(size, device)

    def attach(self, handle: Handle, size: int, device: torch.device) -> Tensor:
        assert handle.fd is not None
        enter_context(device)
        driver = CudaDriver(device.index or 0)
        memory = driver.import_descriptor(handle.fd)
        address = driver.map(memory, driver.rounded(size), READ)
        driver.release(memory)
        return bytes_at(address, size, device)


class VmmAllocation:
    """Device memory mapped for writing until it is sealed. Its read-only mapping lives as long as the process."""

    def __init__(self, size: int, device: torch.device) -> None:
        enter_context(device)
        self._size = size
        self._device = device
        self._driver = CudaDriver(device.index or 0)
        self._rounded = self._driver.rounded(size)
        self._memory = self._driver.create(self._rounded)
        self._address = self._driver.map(self._memory, self._rounded, READ_WRITE)
        self._bytes: Tensor | None = bytes_at(self._address, size, device)

    @property
    def bytes(self) -> Tensor:
        assert self._bytes is not None, "a sealed allocation is not written"
        return self._bytes

    def seal(self) -> tuple[Tensor, Handle]:
        """A view that was kept in spite of the contract points to no memory from here on."""
        self._bytes = None
        torch.cuda.synchronize(self._device)
        readable = self._driver.map(self._memory, self._rounded, READ)
        self._driver.unmap(self._address, self._rounded)
        fd = self._driver.export(self._memory)
        self._driver.release(self._memory)
        return bytes_at(readable, self._size, self._device), Handle(fd=fd)
