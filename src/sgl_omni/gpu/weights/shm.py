"""The backend of the CPU platform: an anonymous memory file, sealed once it is filled and mapped read-only by all."""

from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import time
import warnings

import numpy as np
import torch
from torch import Tensor

from sgl_omni.errors import WeightShareError
from sgl_omni.gpu.weights.backend import Handle

FILE_NAME = "sgl-omni-weights"
"""What the mappings are called in /proc/<pid>/smaps."""

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


_SEAL_SECONDS = 10.0


class ShmBackend:
    """Nothing is named, so nothing is left when the last descriptor and mapping are gone."""

    name = "shm"
    outlives_leader = True

    def create(self, size: int, device: torch.device) -> ShmAllocation:
        return ShmAllocation(size)

    def attach(self, handle: Handle, size: int, device: torch.device) -> Tensor:
        assert handle.fd is not None
        found = os.fstat(handle.fd).st_size
        if found != size:
            raise WeightShareError(f"the shared weights have {found} bytes, but their manifest says {size}")
        return _mapped(handle.fd, size)


class ShmAllocation:
    """A memory file, writable until it is sealed."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._fd = os.memfd_create(FILE_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, size)
        self._map = mmap.mmap(self._fd, size)
        # Through numpy, which holds on to the mapping: closing it while a view is in use is then an error.
        self._bytes: Tensor | None = torch.from_numpy(np.frombuffer(self._map, dtype=np.uint8))

    @property
    def bytes(self) -> Tensor:
        assert self._bytes is not None, "a sealed allocation is not written"
        return self._bytes

    def seal(self) -> tuple[Tensor, Handle]:
        self._bytes = None
        try:
            self._close_map()
            _add_seals(self._fd)
            # Descriptors handed on are read-only themselves: what is opened so can never be mapped for writing.
            readable = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(self._fd)
        return _mapped(readable, self._size), Handle(fd=readable)

    def _close_map(self) -> None:
        try:
            self._map.close()
        except BufferError:
            gc.collect()
            try:
                self._map.close()
            except BufferError as error:
                raise WeightShareError(
                    "the weights cannot be shared: what loaded them still holds a writable tensor of them"
                ) from error


def _add_seals(fd: int) -> None:
    """The kernel refuses while it holds a page for itself, moving it for instance; that passes."""
    last = time.monotonic() + _SEAL_SECONDS
    while True:
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            if time.monotonic() > last:
                raise WeightShareError(
                    f"the weights' memory could not be sealed within {_SEAL_SECONDS:g} s: something still writes it"
                ) from error
        time.sleep(0.02)


def _mapped(fd: int, size: int) -> Tensor:
    """The file as a tensor whose memory cannot be written: a write is a segmentation fault."""
    view = np.frombuffer(mmap.mmap(fd, size, prot=mmap.PROT_READ), dtype=np.uint8)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(view)
