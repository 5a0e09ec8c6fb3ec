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

    Made once and used again and again, its views too: to make them anew takes the host longer than the copy does.
    """

    def __init__(self, rows: int, columns: int) -> None:
        self.event = torch.cuda.Event(blocking=True)
        self._memory = torch.zeros(rows, columns, dtype=torch.int64).pin_memory()
        self._view_first(rows)

    def copy(self, ids: Tensor) -> npt.NDArray[np.int64]:
        """Starts to copy ids [n, columns] behind the step that makes them. Returns where they will be."""
        if ids.shape[0] != self._view.shape[0]:
            self._view_first(ids.shape[0])
        self._view.copy_(ids, non_blocking=True)
        return self._rows

    def _view_first(self, rows: int) -> None:
        self._view = self._memory[:rows]
        self._rows: npt.NDArray[np.int64] = self._view.numpy()


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
