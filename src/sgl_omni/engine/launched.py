"""A step under way on a device, and what is read of it when it is through."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sgl_omni.engine.hidden import put_hidden
from sgl_omni.engine.model import StepModel
from sgl_omni.engine.request import Chunk, Request
from sgl_omni.engine.row_memory import to_device


@dataclass(slots=True)
class StepTimes:
    """Seconds that the host took to launch steps, and that it waited for them."""

    steps: int = 0
    launching: float = 0.0
    waiting: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class WantedHidden:
    """Hidden states that requests of a pass ask for.

    ``spans``: request, its sequence then, first row of the sequence, and rows; ``at`` int64: these rows of the pass.
    """

    spans: Sequence[tuple[Request, int, int, int]]
    at: Tensor

    @classmethod
    def of(cls, chunks: Sequence[Chunk], device: torch.device) -> WantedHidden | None:
        """Whose hidden states are asked for; the chunks' rows follow one another in the pass."""
        if all(chunk.request.hidden is None for chunk in chunks):
            return None
        spans: list[tuple[Request, int, int, int]] = []
        places: list[int] = []
        row = 0
        for chunk in chunks:
            if chunk.request.hidden is not None:
                spans.append((chunk.request, chunk.request.sequence, chunk.start, chunk.length))
                places += range(row, row + chunk.length)
            row += chunk.length
        return cls(spans, to_device(np.asarray(places), device))

    def further(self, rows: int) -> WantedHidden:
        """What a repetition of the pass has, so many rows later."""
        return WantedHidden(
            [(request, turn, start + rows, count) for request, turn, start, count in self.spans], self.at
        )


class OutputBuffer:
    """Pinned memory that the ids of a step are copied to, and the event that tells when they are there.

    Made once and used again and again, its views too: to make them anew takes the host longer than the copy does. The
    driver is asked for the copy without torch, which looks up more about both tensors than a step's host work allows.
    """

    def __init__(self, rows: int, columns: int) -> None:
        self.event = torch.cuda.Event(blocking=True)
        memory = torch.zeros(rows, columns, dtype=torch.int64).pin_memory()
        self._memory: npt.NDArray[np.int64] = memory.numpy()
        self._address = memory.data_ptr()
        self._rows = self._memory
        # It returns at once, so the interpreter's lock is kept.
        self._copy = ctypes.PyDLL("libcuda.so.1").cuMemcpyDtoHAsync_v2
        self._copy.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)

    def copy(self, ids: Tensor, stream: torch.cuda.Stream) -> npt.NDArray[np.int64]:
        """Starts to copy ids [n, columns] behind the step of this stream that makes them. Returns where they will
        be. Raises ``RuntimeError`` where the driver refuses."""
        if ids.shape[0] != len(self._rows):
            self._rows = self._memory[: ids.shape[0]]
        if ids.dtype != torch.int64 or not ids.is_contiguous():
            ids = ids.to(torch.int64).contiguous()
        size = self._rows.nbytes  # none in a step that holds parts of prompts only
        if size and (status := self._copy(self._address, ids.data_ptr(), size, stream.cuda_stream)):
            raise RuntimeError(f"the CUDA driver does not copy a step's outputs: error {status}")
        self.event.record(stream)
        return self._rows


@dataclass(slots=True, eq=False)
class Launched:
    """A step under way."""

    owners: Sequence[tuple[Request, int]]
    _rows: npt.NDArray[np.int64]
    _event: torch.cuda.Event | None
    _times: StepTimes
    _model: StepModel
    _wanted: WantedHidden | None
    _hidden: Tensor | None

    def rows(self) -> npt.NDArray[np.int64]:
        if self._event is not None:
            started = time.perf_counter()
            self._event.synchronize()
            self._times.waiting += time.perf_counter() - started
        return self._rows

    def read(self) -> list[tuple[Request, list[int]]]:
        rows: list[list[int]] = self.rows().tolist()
        if self._wanted is not None and self._hidden is not None:
            parts = self._hidden.split([count for *_, count in self._wanted.spans])
            for (request, sequence, start, _), part in zip(self._wanted.spans, parts, strict=True):
                if request.sequence == sequence and request.hidden is not None:
                    put_hidden(self._model, request.hidden, start, part)
        return [
            (request, row)
            for (request, sequence), row in zip(self.owners, rows, strict=True)
            if request.sequence == sequence
        ]
