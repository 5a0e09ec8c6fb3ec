"""The few calls of the CUDA driver that sharing memory takes, through ctypes. Structures and numbers are those of
cuda.h (CUDA 12 and 13)."""

from __future__ import annotations

import ctypes
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_int,
    c_size_t,
    c_ubyte,
    c_uint,
    c_ulonglong,
    c_ushort,
    c_void_p,
)
from typing import Any

from sgl_omni.errors import WeightShareError

READ, READ_WRITE = 1, 3

_PINNED = 1
_DEVICE = 1
_POSIX_DESCRIPTOR = 1
_VMM_SUPPORTED, _DESCRIPTOR_SUPPORTED = 102, 103
_IPC_BYTES = 64
_LAZY_PEER_ACCESS = 1


class DriverError(WeightShareError):
    """A call of the CUDA driver failed; the message names the call and the driver's error."""


class _Location(Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Flags(Structure):
    _fields_ = (
        ("compression", c_ubyte),
        ("gpu_direct_rdma", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class _AllocationProp(Structure):
    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("win32_metadata", c_void_p),
        ("flags", _Flags),
    )


class _AccessDesc(Structure):
    _fields_ = (("location", _Location), ("flags", c_int))


class _IpcHandle(Structure):
    _fields_ = (("reserved", c_ubyte * _IPC_BYTES),)


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(_AllocationProp), c_int),
    "cuMemCreate": (POINTER(c_ulonglong), c_size_t, POINTER(_AllocationProp), c_ulonglong),
    "cuMemRelease": (c_ulonglong,),
    "cuMemAddressReserve": (POINTER(c_ulonglong), c_size_t, c_size_t, c_ulonglong, c_ulonglong),
    "cuMemAddressFree": (c_ulonglong, c_size_t),
    "cuMemMap": (c_ulonglong, c_size_t, c_size_t, c_ulonglong, c_ulonglong),
    "cuMemUnmap": (c_ulonglong, c_size_t),
    "cuMemSetAccess": (c_ulonglong, c_size_t, POINTER(_AccessDesc), c_size_t),
    "cuMemExportToShareableHandle": (c_void_p, c_ulonglong, c_int, c_ulonglong),
    "cuMemImportFromShareableHandle": (POINTER(c_ulonglong), c_void_p, c_int),
    "cuMemAlloc_v2": (POINTER(c_ulonglong), c_size_t),
    "cuIpcGetMemHandle": (POINTER(_IpcHandle), c_ulonglong),
    "cuMemcpyDtoDAsync_v2": (c_ulonglong, c_ulonglong, c_size_t, c_void_p),
    "cuMemcpyDtoH_v2": (c_void_p, c_ulonglong, c_size_t),
    "cuMemcpyHtoD_v2": (c_ulonglong, c_char_p, c_size_t),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxSynchronize": (),
    "cuIpcOpenMemHandle_v2": (POINTER(c_ulonglong), _IpcHandle, c_uint),
}


class CudaDriver:
    """One GPU, by its ordinal in this process, seen through the driver's own interface."""

    def __init__(self, ordinal: int) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DriverError(f"the CUDA driver cannot be loaded: {error}") from error
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.argtypes = arguments
            function.restype = c_int
        self._call("cuInit", 0)
        device = c_int()
        self._call("cuDeviceGet", byref(device), ordinal)
        self._device = device.value

    def enter_context(self) -> None:
        """Makes the device's primary context current in this thread, where torch has not done so."""
        context = c_void_p()
        self._call("cuDevicePrimaryCtxRetain", byref(context), self._device)
        self._call("cuCtxSetCurrent", context)

    def synchronize(self) -> None:
        """Waits for all work of the current context."""
        self._call("cuCtxSynchronize")

    # Virtual memory management ------------------------------------------------------------------------------------

    def shares_descriptors(self) -> bool:
        """Whether the device says that it can hand memory on as a file descriptor."""
        return all(self._attribute(number) for number in (_VMM_SUPPORTED, _DESCRIPTOR_SUPPORTED))

    def rounded(self, size: int) -> int:
        """The bytes that an allocation of `size` takes."""
        granularity = c_size_t()
        self._call("cuMemGetAllocationGranularity", byref(granularity), byref(self._properties()), 0)
        return -(-size // granularity.value) * granularity.value

    def create(self, size: int) -> int:
        """Memory of a rounded size; a handle. It is not mapped anywhere yet."""
        handle = c_ulonglong()
        self._call("cuMemCreate", byref(handle), size, byref(self._properties()), 0)
        return handle.value

    def release(self, handle: int) -> None:
        """Gives up a handle; mappings and descriptors of the memory keep it."""
        self._call("cuMemRelease", handle)

    def map(self, handle: int, size: int, access: int) -> int:
        """The address at which the memory appears to this process, with `READ` or `READ_WRITE` for this GPU. Memory of
        another GPU needs peer access between the two; where there is none, nothing stays mapped."""
        address = c_ulonglong()
        self._call("cuMemAddressReserve", byref(address), size, 0, 0, 0)
        try:
            self._call("cuMemMap", address.value, size, 0, handle, 0)
        except DriverError:
            self._call("cuMemAddressFree", address.value, size)
            raise
        description = _AccessDesc(_Location(_DEVICE, self._device), access)
        try:
            self._call("cuMemSetAccess", address.value, size, byref(description), 1)
        except DriverError:
            self.unmap(address.value, size)
            raise
        return address.value

    def unmap(self, address: int, size: int) -> None:
        self._call("cuMemUnmap", address, size)
        self._call("cuMemAddressFree", address, size)

    def export(self, handle: int) -> int:
        """A file descriptor of the memory, which the caller closes."""
        fd = c_int(-1)
        self._call("cuMemExportToShareableHandle", byref(fd), handle, _POSIX_DESCRIPTOR, 0)
        return fd.value

    def import_descriptor(self, fd: int) -> int:
        """A handle of the memory behind another process's descriptor."""
        handle = c_ulonglong()
        self._call("cuMemImportFromShareableHandle", byref(handle), c_void_p(fd), _POSIX_DESCRIPTOR)
        return handle.value

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Queues a copy between two addresses of device memory, of one GPU or of two."""
        self._call("cuMemcpyDtoDAsync_v2", target, source, size, c_void_p(stream))

    def copy_to_host(self, target: int, source: int, size: int) -> None:
        """Copies device memory to an address of the host; complete on return."""
        self._call("cuMemcpyDtoH_v2", c_void_p(target), source, size)

    def copy_from_host(self, target: int, content: bytes) -> None:
        """Copies bytes to an address of device memory; complete on return."""
        self._call("cuMemcpyHtoD_v2", target, content, len(content))
        self.synchronize()

    # Classic IPC; needs the device's primary context to be current --------------------------------------------------

    def allocate(self, size: int) -> int:
        address = c_ulonglong()
        self._call("cuMemAlloc_v2", byref(address), size)
        return address.value

    def ipc_handle(self, address: int) -> bytes:
        handle = _IpcHandle()
        self._call("cuIpcGetMemHandle", byref(handle), address)
        return bytes(handle.reserved)

    def open_ipc(self, data: bytes) -> int:
        """The address at which another process's memory appears to this one."""
        address = c_ulonglong()
        handle = _IpcHandle((c_ubyte * _IPC_BYTES).from_buffer_copy(data))
        self._call("cuIpcOpenMemHandle_v2", byref(address), handle, _LAZY_PEER_ACCESS)
        return address.value

    def _properties(self) -> _AllocationProp:
        return _AllocationProp(type=_PINNED, handle_types=_POSIX_DESCRIPTOR, location=_Location(_DEVICE, self._device))

    def _attribute(self, number: int) -> int:
        value = c_int()
        self._call("cuDeviceGetAttribute", byref(value), number, self._device)
        return value.value

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = c_char_p()
            self._library.cuGetErrorName(status, byref(text))
            raise DriverError(f"{name} failed: {(text.value or b'unknown error').decode()} ({status})")
