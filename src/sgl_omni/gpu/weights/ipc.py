"""The backend for drivers and containers that forbid the other: a classic CUDA IPC handle of the leader's memory.

Nothing protects the memory from writes, and it goes with the leader, so the whole group ends with it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_omni.gpu.weights.backend import Handle
from sgl_omni.gpu.weights.cuda_driver import CudaDriver
from sgl_omni.gpu.weights.cuda_tensor import bytes_at, enter_context


class IpcBackend:
    name = "ipc"
    outlives_leader = False

    def create(self, size: int, device: torch.device) -> IpcAllocation:
        return IpcAllocation(size, device)

    def attach(self, handle: Handle, size: int, device: torch.device) -> Tensor:
        enter_context(device)
        address = CudaDriver(device.index or 0).open_ipc(handle.data)
        return bytes_at(address, size, device)


class IpcAllocation:
    """Device memory of the driver's own allocator: torch's would give a handle of a larger block."""

    def __init__(self, size: int, device: torch.device) -> None:
        enter_context(device)
        self._device = device
        self._driver = CudaDriver(device.index or 0)
        self._address = self._driver.allocate(size)
        self.bytes: Tensor = bytes_at(self._address, size, device)

    def seal(self) -> tuple[Tensor, Handle]:
        torch.cuda.synchronize(self._device)
        return self.bytes, Handle(data=self._driver.ipc_handle(self._address))
