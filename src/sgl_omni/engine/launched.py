"""A step under way on a device, and what is read of it when it is through."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sgl_omni.engine.hidden import put_hidden
from sgl_omni.engine.model import StepModel
from sgl_omni.engine.platform import for_kernels
from sgl_omni.engine.request import Chunk, Request
from sgl_omni.engine.row_memory import to_device

_PLACES = 3
"""One that is read, one that is written, and one to spare."""


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


class OutputRing:
    """Where the ids of steps come to lie: a place for each of a few steps, in turn.

    It is the host's memory, and the step itself writes to it: a copy behind the step would take the host as long to
    launch as a whole graph. Device and host count the steps each for itself.
    """

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._memory = torch.zeros(_PLACES, rows, columns, dtype=torch.int64, pin_memory=on_gpu)
        self._rows: npt.NDArray[np.int64] = self._memory.numpy()
        self._written = torch.zeros(1, dtype=torch.int64, device=device)
        self._events = [torch.cuda.Event(blocking=True) for _ in range(_PLACES)] if on_gpu else []
        self._launched = 0

    def write(self, ids: Tensor) -> None:
        """The last part of a step, which a graph may hold: ids int64 [n, columns] to the next place."""
        if for_kernels(self._written):
            from sgl_omni.engine.kernels import state as kernels

            kernels.hand_out(ids, self._memory, self._written)
        else:
            self._memory[int(self._written) % _PLACES, : len(ids)] = ids
        self._written += 1

    def restart(self) -> None:
        """Nothing that was written so far is of a step that was launched."""
        self._written.zero_()
        self._launched = 0

    def follow(
        self, count: int, stream: torch.cuda.Stream | None
    ) -> tuple[npt.NDArray[np.int64], torch.cuda.Event | None]:
        """Behind the launch of a step: where its first ``count`` rows will be, and what tells that they are there."""
        place = self._launched % _PLACES
        self._launched += 1
        if stream is None:
            return self._rows[place, :count], None
        event = self._events[place]
        event.record(stream)
        return self._rows[place, :count], event


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
