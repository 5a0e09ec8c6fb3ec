"""One end of a trial: does memory of one process reach another, which may be on another GPU?

Two processes run this before a pipeline starts, with the environments that its own will have (``runtime/routes.py``).
``--end make`` fills a block and hands its descriptor on; ``--end open`` copies it to its own device, compares every
byte and prints its verdict as one line of JSON. Whether that works depends on the driver, the link between the cards,
what a container or a virtual machine lets through, and MPS; some of these fail only when memory is touched, and a fault
ends the process that met it. So it is tried where nothing is lost. Imports no torch: a context is all that it costs.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import socket
import struct
from typing import Protocol

from sgl_omni.errors import OmniError
from sgl_omni.gpu.weights.cuda_driver import READ_WRITE, CudaDriver
from sgl_omni.parent import die_with_parent

PROBE_BYTES = 4 * 1024 * 1024
PATTERN = bytes(range(251)) * (PROBE_BYTES // 251 + 1)
"""A prime, so that no piece of memory that lies elsewhere looks like its neighbour."""


class Ground(Protocol):
    """The memory in which an end of the trial works."""

    def make(self, content: bytes) -> tuple[int, int]:
        """(descriptor, size) of a block that begins with `content`."""
        ...

    def read(self, fd: int, size: int, count: int) -> bytes:
        """The first `count` bytes of a block, by way of this end's own device."""
        ...


class HostGround:
    """The CPU platform's: memory files stand for a device."""

    def make(self, content: bytes) -> tuple[int, int]:
        fd = os.memfd_create("sgl-omni-probe", os.MFD_CLOEXEC)
        os.ftruncate(fd, len(content))
        os.pwrite(fd, content, 0)
        return fd, len(content)

    def read(self, fd: int, size: int, count: int) -> bytes:
        with mmap.mmap(fd, size) as mapped:
            return mapped[:count]


class CudaGround:
    """A GPU, by its ordinal in this process; the same calls as those of ``cuda_blocks.py``."""

    def __init__(self, ordinal: int) -> None:
        self._driver = CudaDriver(ordinal)
        self._driver.enter_context()

    def make(self, content: bytes) -> tuple[int, int]:
        size = self._driver.rounded(len(content))
        memory = self._driver.create(size)
        self._driver.copy_from_host(self._driver.map(memory, size, READ_WRITE), content)
        return self._driver.export(memory), size

    def read(self, fd: int, size: int, count: int) -> bytes:
        """The copy is one from device to device, as a tensor's is, and only then one to the host."""
        address = self._driver.map(self._driver.import_descriptor(fd), size, READ_WRITE)
        own = self._driver.allocate(size)
        self._driver.copy(own, address, size, 0)
        self._driver.synchronize()
        found = mmap.mmap(-1, size)
        self._driver.copy_to_host(address_of(found), own, size)
        return found[:count]


def address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def make(ground: Ground, peer: socket.socket) -> None:
    """Hands a block to the other end, and keeps it until that is done."""
    fd, size = ground.make(PATTERN[:PROBE_BYTES])
    with contextlib.suppress(ConnectionError):  # an end that is gone has its own verdict
        socket.send_fds(peer, [struct.pack("<Q", size)], [fd])
        peer.recv(1)


def open_and_compare(ground: Ground, peer: socket.socket) -> str:
    """Nothing where the block arrives whole; else what is wrong with it."""
    data, descriptors, _, _ = socket.recv_fds(peer, 8, 1)
    if not descriptors:
        return "the maker gave no block"
    (size,) = struct.unpack("<Q", data)
    found = ground.read(descriptors[0], size, PROBE_BYTES)
    wrong = sum(a != b for a, b in zip(found, PATTERN, strict=False)) if found != PATTERN[:PROBE_BYTES] else 0
    return f"{wrong} of {PROBE_BYTES} bytes arrive changed" if wrong else ""


def main() -> None:
    parser = argparse.ArgumentParser(prog="sgl-omni peer probe")
    parser.add_argument("--end", choices=("make", "open"), required=True)
    parser.add_argument("--fd", type=int, required=True, help="connected unix socket to the other end")
    parser.add_argument("--parent", type=int, required=True, help="pid of the server")
    parser.add_argument("--ordinal", type=int, help="the GPU, as this process numbers it; none on the CPU platform")
    options = parser.parse_args()
    die_with_parent(options.parent)
    peer = socket.socket(fileno=options.fd)
    refusal = ""
    try:
        ground = HostGround() if options.ordinal is None else CudaGround(options.ordinal)
        if options.end == "make":
            make(ground, peer)
        else:
            refusal = open_and_compare(ground, peer)
    except (OmniError, OSError) as error:
        refusal = str(error)
    print(json.dumps({"end": options.end, "refusal": refusal}), flush=True)


if __name__ == "__main__":
    main()
