"""Blocks of memory through which a tensor passes from one process to another, whatever device they lie on.

A block belongs to the process that made it, which hands on a file descriptor of it; another process opens that. Nothing
is named, and the memory goes when no process has it any more, however they ended. The CUDA form is in `cuda_blocks.py`;
`HostMemory` stands for it where there is no GPU.
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, Protocol

from sgl_omni.errors import OmniError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class DeviceMemoryError(OmniError):
    """This driver or container does not pass device memory between processes, or has none left. Host memory is used."""

    code = "device_memory"


class Block(Protocol):
    """One allocation, made here or opened."""

    @property
    def size(self) -> int: ...

    def export(self) -> int:
        """A file descriptor of a block that was made here; the caller closes it."""
        ...

    def write(self, tensor: Tensor) -> None:
        """Copies a tensor's elements to the beginning; returns when they are there."""
        ...

    def read(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """A tensor of this process's own, on its device, with the elements at the beginning; it is complete."""
        ...

    def close(self) -> None:
        """Gives up this process's hold."""
        ...


class DeviceMemory(Protocol):
    """The memory of the device that this process computes on."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in this memory, so that it may pass through blocks of it."""
        ...

    def rounded(self, size: int) -> int:
        """The bytes that a block for `size` takes."""
        ...

    def create(self, size: int) -> Block:
        """Raises ``DeviceMemoryError``."""
        ...

    def open(self, fd: int, size: int) -> Block:
        """A block of another process; does not close `fd`. Raises ``DeviceMemoryError`` where it cannot be reached."""
        ...


class HostMemory:
    """Stands for a device on the CPU platform: its blocks are memory files, and every tensor lies in it."""

    def holds(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu"

    def rounded(self, size: int) -> int:
        return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE

    def create(self, size: int) -> HostBlock:
        try:
            fd = os.memfd_create("sgl-omni-block", os.MFD_CLOEXEC)
        except OSError as error:
            raise DeviceMemoryError(f"no block of {size} bytes: {error}") from error
        try:
            os.ftruncate(fd, size)
            return HostBlock(fd, size)
        except OSError as error:
            os.close(fd)
            raise DeviceMemoryError(f"no block of {size} bytes: {error}") from error

    def open(self, fd: int, size: int) -> HostBlock:
        own = _duplicate(fd)
        try:
            return HostBlock(own, size)
        except OSError as error:
            os.close(own)
            raise DeviceMemoryError(f"another process's block cannot be reached: {error}") from error


def _duplicate(fd: int) -> int:
    try:
        return os.dup(fd)
    except OSError as error:
        raise DeviceMemoryError(f"a block cannot be handed on: {error}") from error


class HostBlock:
    """Takes over the descriptor."""

    def __init__(self, fd: int, size: int) -> None:
        self._fd = fd
        self.size = size
        self._map = mmap.mmap(fd, size)

    def export(self) -> int:
        return _duplicate(self._fd)

    def write(self, tensor: Tensor) -> None:
        import torch

        plain = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        torch.frombuffer(self._map, dtype=torch.uint8, count=plain.numel()).copy_(plain)

    def read(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        import torch

        own = torch.empty(shape, dtype=dtype)
        raw = own.reshape(-1).view(torch.uint8)
        raw.copy_(torch.frombuffer(self._map, dtype=torch.uint8, count=raw.numel()))
        return own

    def close(self) -> None:
        self._map.close()
        os.close(self._fd)
