"""A safetensors file as the runs of bytes that it is: rows are read from it straight to where they belong."""

from __future__ import annotations

import hashlib
import math
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sgl_omni.engine.headers import read_header
from sgl_omni.json_files import parse_json

BLOCK_BYTES = 4 * 2**20
"""Read at a time. To pin larger buffers takes longer than it saves; on smaller blocks the interpreter takes longer."""

MOST_THREADS = 6

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class TensorFile:
    """An open file. Raises ``ValueError`` where it begins with no header, ``OSError`` where it cannot be read."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._header = read_header(self._fd)
            self._tensors: dict[str, Any] = parse_json(self._header)
        except ValueError:
            os.close(self._fd)
            raise
        self._start = 8 + len(self._header)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    @property
    def fingerprint(self) -> str:
        """Of everything but the data itself, for which size and time of the last change must do."""
        info = os.fstat(self._fd)
        return hashlib.sha256(self._header + f"{info.st_size} {info.st_mtime_ns}".encode()).hexdigest()

    def rows(self, name: str, start: int, target: Tensor) -> Rows | None:
        """Rows ``start`` on of a tensor as a job for ``read_all``; None where they must be converted on the way."""
        entry = self._tensors[name]
        same = _DTYPES.get(entry["dtype"]) == target.dtype and tuple(entry["shape"][1:]) == tuple(target.shape[1:])
        if not same or not target.is_contiguous() or not target.numel():
            return None
        row_bytes = math.prod(entry["shape"][1:]) * target.element_size()
        begin = self._start + entry["data_offsets"][0] + start * row_bytes
        return Rows(self._fd, begin, target.detach().view(-1).view(torch.uint8))


@dataclass(frozen=True, slots=True)
class Rows:
    """Bytes of a file from ``begin`` on that fill ``target``, a contiguous tensor uint8 [n] on any device."""

    fd: int
    begin: int
    target: Tensor

    def blocks(self) -> list[Rows]:
        return [
            Rows(self.fd, self.begin + at, self.target[at : at + BLOCK_BYTES])
            for at in range(0, self.target.numel(), BLOCK_BYTES)
        ]


def read_all(jobs: Sequence[Rows]) -> None:
    """Reads in several threads, past the interpreter's lock. Raises ``EOFError`` for a file that is too short."""
    blocks = [block for job in jobs for block in job.blocks()]
    if not blocks:
        return
    devices = {block.target.device for block in blocks}
    readers = _Readers()
    threads = min(MOST_THREADS, len(os.sched_getaffinity(0)), len(blocks))
    with ThreadPoolExecutor(threads, thread_name_prefix="checkpoint") as pool:
        for _ in pool.map(readers.read, blocks):
            pass
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


class _Readers:
    """Each thread reads into host memory of its own where the target is on a GPU, two blocks in turn, so that one is
    copied while the next is read."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def read(self, block: Rows) -> None:
        if block.target.device.type == "cpu":
            _read_into(block.fd, block.begin, memoryview(block.target.numpy()))
            return
        staging: _Staging | None = getattr(self._of_thread, "staging", None)
        if staging is None:
            staging = self._of_thread.staging = _Staging(block.target.device)
        staging.read(block)


class _Staging:
    """Two pinned buffers and a stream, which is the current one of the thread from then on."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        torch.cuda.set_stream(self._stream)
        buffers = [torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._buffers = [(each, memoryview(each.numpy()), torch.cuda.Event()) for each in buffers]

    def read(self, block: Rows) -> None:
        self._buffers.reverse()
        buffer, view, copied = self._buffers[0]
        size = block.target.numel()
        copied.synchronize()  # at once, where nothing has been recorded yet
        _read_into(block.fd, block.begin, view[:size])
        block.target.copy_(buffer if size == BLOCK_BYTES else buffer[:size], non_blocking=True)
        copied.record(self._stream)


def _read_into(fd: int, begin: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        count = os.preadv(fd, [view[done:]], begin + done)
        if count == 0:
            raise EOFError(f"a checkpoint file ends {len(view) - done} bytes before its tensors do")
        done += count
