"""What only some models keep in device rows: ids that a request has had, its arriving input, numbers of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sgl_omni.engine.platform import for_kernels
from sgl_omni.engine.request import Request


def to_device(values: np.ndarray[tuple[int, ...], np.dtype[np.generic]], device: torch.device) -> Tensor:
    """A copy that does not hold up the host."""
    return send(torch.from_numpy(values), device)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """The same for a tensor: torch keeps the pinned memory until the copy is through."""
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class SeenRows:
    """Which ids each request has had in column 0, for those whose repetition is penalised."""

    def __init__(self, rows: int, vocabulary: int, device: torch.device | str, *, prompts: bool = False) -> None:
        """``prompts``: the ids of a request's prompt count too."""
        self._prompts = prompts
        self.flags = torch.zeros(rows, vocabulary, dtype=torch.bool, device=device)
        """[rows, vocabulary]"""
        self._begun: list[int] = []
        self._said: list[int] = []

    def begin(self, request: Request) -> None:
        """The request's state begins anew."""
        self._begun.append(request.row)
        if request.sampling.repetition_penalty != 1:
            base = request.row * self.flags.shape[1]
            self._said += [base + output[0] for output in request.outputs]
            if self._prompts and request.prompt.ids is not None:
                self._said += (request.prompt.ids[:, 0] + base).tolist()

    def flush(self) -> None:
        device = self.flags.device
        if self._begun:
            self.flags.index_fill_(0, to_device(np.asarray(self._begun), device), False)
        if self._said:
            self.flags.view(-1).index_fill_(0, to_device(np.asarray(self._said), device), True)
        self._begun.clear()
        self._said.clear()

    def note(self, rows: Tensor, ids: Tensor) -> None:
        """Part of a step: ids int64 [s] were chosen for ``rows`` int64 [s]."""
        self.flags.view(-1).index_fill_(0, rows * self.flags.shape[1] + ids, True)


class KeptRows:
    """Numbers that a model keeps of each request. Its steps move them on; the host says what they begin with."""

    def __init__(self, rows: int, shape: Sequence[int], device: torch.device | str) -> None:
        self.values = torch.zeros(rows, *shape, device=device)
        """float32 [rows, *shape]"""
        self._begun: dict[int, Tensor] = {}

    def begin(self, row: int, values: Tensor) -> None:
        """A request's state begins anew, with ``values`` in the host's memory."""
        self._begun[row] = values

    def flush(self) -> None:
        if self._begun:
            device = self.values.device
            rows = to_device(np.asarray(list(self._begun)), device)
            self.values.index_copy_(0, rows, send(torch.stack(list(self._begun.values())), device))
            self._begun.clear()


class AddedRows:
    """What is added to the inputs of outputs: a ring of places for each request, which its outputs pass one by one.

    The host keeps the ring filled ahead of the outputs as far as rows have arrived (``ArrivingInput``).
    """

    def __init__(self, rows: int, places: int, like: Tensor) -> None:
        """``like`` [1, hidden]: of the kind and on the device that inputs are."""
        self._ring = like.new_zeros(rows, places, like.shape[1])
        self._fallback = like.new_zeros(rows, like.shape[1])
        self._count = torch.zeros(rows, dtype=torch.int64, device=like.device)
        self._sent = [0] * rows
        self._holds = [False] * rows
        self._counts: dict[int, int] = {}
        self._fallbacks: dict[int, Tensor] = {}
        self._nothing = like.new_zeros(1, like.shape[1])
        self._arrived: dict[int, list[tuple[range, Tensor]]] = {}

    def follow(self, request: Request, began: bool) -> None:
        """Fills the ring up for an output that is to be launched, and those after it."""
        row, inputs = request.row, request.inputs
        if began:
            self._arrived.pop(row, None)
        if began and (inputs is not None or self._holds[row]):
            self._fallbacks[row] = self._nothing if inputs is None else inputs.rows[inputs.count : inputs.count + 1]
            self._counts[row] = 0
            self._sent[row] = 0
            self._holds[row] = inputs is not None
        if inputs is None:
            return
        places = self._ring.shape[1]
        first = max(0, request.launched - 1)
        start, stop = max(first, self._sent[row]), min(inputs.count, first + places)
        self._counts[row] = inputs.count
        while start < stop:
            at = start % places
            part = min(stop - start, places - at)
            base = row * places + at
            self._arrived.setdefault(row, []).append((range(base, base + part), inputs.rows[start : start + part]))
            start += part
        self._sent[row] = max(start, self._sent[row])

    def flush(self) -> None:
        device = self._count.device
        if self._counts:
            rows, counts = np.asarray(list(self._counts)), np.asarray(list(self._counts.values()))
            self._count.index_copy_(0, to_device(rows, device), to_device(counts, device))
            self._counts.clear()
        if self._fallbacks:
            rows = to_device(np.asarray(list(self._fallbacks)), device)
            self._fallback.index_copy_(0, rows, self._together(list(self._fallbacks.values())))
            self._fallbacks.clear()
        if self._arrived:
            parts = [part for queued in self._arrived.values() for part in queued]
            places = to_device(np.concatenate([np.asarray(places) for places, _ in parts]), device)
            self._ring.view(-1, self._ring.shape[2]).index_copy_(0, places, self._together([rows for _, rows in parts]))
            self._arrived.clear()

    def add(self, x: Tensor, rows: Tensor, given: Tensor, fields: Tensor, step: int) -> Tensor:
        """Part of a step: adds what has arrived to the inputs x [n, hidden] of outputs, those that are not ``given``.

        ``rows`` and ``given`` int64 [n], as in ``StepInputs``; ``fields``: those of all rows, which count outputs in
        column ``step``. By the kernel in place.
        """
        if for_kernels(x):
            from sgl_omni.engine.kernels import state

            state.add_arrived(x, rows, given, fields, self._ring, self._fallback, self._count)
            return x
        outputs = fields[rows, step].to(torch.int64) - 1
        return x + self.of(rows, outputs).masked_fill((given >= 0)[:, None], 0)

    def of(self, rows: Tensor, outputs: Tensor) -> Tensor:
        """What is added to ``outputs`` int64 [n] of the requests in ``rows`` int64 [n]: [n, hidden]."""
        arrived = self._ring[rows, outputs % self._ring.shape[1]]
        return torch.where((outputs < self._count[rows])[:, None], arrived, self._fallback[rows])

    def _together(self, parts: Sequence[Tensor]) -> Tensor:
        """[n, hidden], of the ring's kind and there: those that lie with the host as one copy."""
        like = self._ring
        if len({part.device for part in parts}) > 1:
            parts = [send(part, like.device) for part in parts]
        return send(torch.cat([part.to(like.dtype) for part in parts]), like.device)
