"""The state of running requests in fixed rows on the device, so that a step needs nothing from the host."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from sgl_omni.engine.request import Request
from sgl_omni.engine.row_memory import AddedRows, KeptRows, SeenRows, to_device
from sgl_omni.engine.sampler import seed_key

_LARGEST_FLOAT = 3.0e38


class Field(IntEnum):
    """Columns of a row's state, int32. Floats and unsigned numbers lie there as their bits."""

    POSITION = 0
    """Of the last output, which the next step runs."""
    ROPE_OFFSET = 1
    """What is added to a position where the prompt's own positions ended elsewhere."""
    STEP = 2
    """Outputs of this sequence so far."""
    DRAWN = 3
    """Outputs of the sequences before."""
    END = 4
    """Frames of the audio, -1 while unknown; or what ``StepModel.finish_rows`` says."""
    LIMIT = 5
    """Frames at which it is cut."""
    TEMPERATURE = 6
    TOP_K = 7
    TOP_P = 8
    SEED = 9
    PENALTY = 10
    """Of repetition."""
    PLACE = 11
    """Of the encoder's output in the ``SourcePool``, where there is one."""


class DeviceRows:
    """Row ``request.row`` is a running request's. One more, the last, is for padding: its pages are scratch."""

    def __init__(
        self,
        rows: int,
        columns: int,
        pages_per_row: int,
        scratch_page: int,
        device: torch.device | str,
        *,
        seen_vocabulary: int = 0,
        seen_prompt: bool = False,
        added_places: int = 0,
        inputs_like: Tensor | None = None,
        kept_shape: Sequence[int] = (),
        begin_kept: Callable[[Request], Tensor] | None = None,
    ) -> None:
        """``seen_vocabulary``: ids of column 0 that are remembered, of outputs, and with ``seen_prompt`` of prompts.
        ``added_places``: arriving rows that are kept ready for each request, of the kind of ``inputs_like``
        [1, hidden]. ``kept_shape`` and ``begin_kept``: see ``StepModel``.
        """
        self.padding = rows
        self.seen = SeenRows(rows + 1, seen_vocabulary, device, prompts=seen_prompt) if seen_vocabulary else None
        self.added = None if inputs_like is None else AddedRows(rows + 1, added_places, inputs_like)
        self.kept = KeptRows(rows + 1, kept_shape, device) if kept_shape else None
        self._begin_kept = begin_kept
        self.fields = torch.zeros(rows + 1, len(Field) + columns, dtype=torch.int32, device=device)
        """[rows + 1, fields, then the ids of the last output]"""
        self.tables = torch.full((rows + 1, pages_per_row), scratch_page, dtype=torch.int32, device=device)
        """[rows + 1, pages of a sequence]"""
        self._turns: list[tuple[Request | None, int]] = [(None, 0)] * rows
        self._pages: list[list[int]] = [[] for _ in range(rows)]
        self._field_updates: list[tuple[int, list[int]]] = []
        self._table_updates: list[tuple[int, int]] = []

    def follow(self, request: Request) -> bool:
        """Notes what the device does not know yet of a request. Returns whether its state began anew."""
        row, began = request.row, False
        if self._turns[row] != (request, request.turn):
            self._turns[row] = (request, request.turn)
            self._field_updates.append((row, _state(request)))
            self._pages[row] = []
            began = True
            if self.seen is not None:
                self.seen.begin(request)
            if self.kept is not None and self._begin_kept is not None:
                self.kept.begin(row, self._begin_kept(request))
        if self.added is not None:
            self.added.follow(request, began)
        known, pages = self._pages[row], request.pages
        if known != pages:
            same = len(known) if known == pages[: len(known)] else 0
            base = row * self.tables.shape[1]
            self._table_updates += [(base + i, pages[i]) for i in range(same, len(pages))]
            self._pages[row] = pages.copy()
        return began

    def flush(self) -> None:
        """Sends what was noted, behind the steps that were launched before."""
        for memory in (self.seen, self.added, self.kept):
            if memory is not None:
                memory.flush()
        if self._field_updates:
            rows, values = zip(*self._field_updates, strict=True)
            fields = np.asarray(values, dtype=np.int64).astype(np.uint32).view(np.int32)
            self.fields[:, : len(Field)].index_copy_(0, self._to_device(rows, np.int64), self._to_device(fields))
            self._field_updates.clear()
        if self._table_updates:
            places, pages = zip(*self._table_updates, strict=True)
            self.tables.view(-1).index_copy_(0, self._to_device(places, np.int64), self._to_device(pages, np.int32))
            self._table_updates.clear()

    def _to_device(self, values: object, dtype: type[np.generic] | None = None) -> Tensor:
        return to_device(np.asarray(values, dtype=dtype), self.fields.device)


def float_of(fields: Tensor, field: Field) -> Tensor:
    """float32 [n] of the state of n rows."""
    return fields[:, field].view(torch.float32)


def _state(request: Request) -> list[int]:
    """The fields in their order. A ``POSITION`` is only known when the prompt is through."""
    sampling = request.sampling
    return [
        0,
        request.prompt.end_position - request.prompt_length,
        len(request.outputs),
        request.drawn,
        request.frame_end,
        request.frame_limit,
        float_bits(sampling.temperature),
        min(sampling.top_k, 0x7FFFFFFF),
        float_bits(sampling.top_p),
        seed_key(sampling.seed),
        float_bits(sampling.repetition_penalty),
        max(0, request.place),
    ]


def float_bits(value: float) -> int:
    """A float32 as a field holds it."""
    bits: int = struct.unpack("<i", struct.pack("<f", max(-_LARGEST_FLOAT, min(value, _LARGEST_FLOAT))))[0]
    return bits
