"""Rows that change nothing but the length of their requests are kept together, and handed out when it matters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from sgl_omni.engine.request import LOST, Request
from sgl_omni.engine.runner import LaunchedStep
from sgl_omni.engine.task import Task

_STEPS = 256
"""Steps whose rows are kept at most."""


class QuietRows:
    """Saves the host a look at each request in each step, as long as its steps repeat one another.

    Rows of steps with the same owners lie in one block. A request gets its own where something comes of one of them,
    and all get theirs before anybody else looks at them.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._end_ids = task.end_ids | {LOST}
        self._end_marks = [np.int64(each).tobytes() for each in self._end_ids]
        self._owners: Sequence[tuple[Request, int]] = []
        self._is_read_whole = False
        self._kept = np.empty((0, 0, 0), np.int64)
        self._count = 0
        self._given: list[int] = []  # how many of the kept rows each request has
        # Whose row of a step has to be taken, and who then has something to hand on, by how many are kept before it.
        self._to_take: dict[int, set[int]] = {}
        self._to_hand_on: dict[int, set[int]] = {}
        self._limits: list[int] = []  # by how many are kept before the row of each that has to be taken
        self._again: Iterable[int] = ()  # who has to be looked at anew, as a row of the last step was taken
        self._handed: Iterable[int] = ()  # who had something to hand on of the last step, and so has another due
        self.handed_out = 0

    def take(self, step: LaunchedStep) -> tuple[Sequence[tuple[Request, list[int]]], Sequence[Request]]:
        """Waits for the step. Returns the rows that may end something, and whose others there is something to hand on
        of; both have all rows before."""
        if step.owners is not self._owners:
            self.hand_out()
            self._begin(step.owners)
        if self._is_read_whole:
            return step.read(), ()
        if self._count == _STEPS:
            self._give_all()
            self._begin(step.owners)
        for i in self._again:
            self._look_at(i)
        for i in self._handed:
            self._await(i)
        rows = step.rows()
        if len(rows) > self._kept.shape[1]:  # the owners' first
            self._kept = np.empty((_STEPS, *rows.shape), np.int64)
        at = self._count
        self._kept[at, : len(rows)] = rows
        self._count = at + 1
        self._again = to_take = self._to_take.pop(at, set()) | self._ends(rows)
        self._handed = to_hand_on = self._to_hand_on.pop(at, set()) - to_take
        return self._take(rows, to_take) if to_take else (), self._hand_on(to_hand_on) if to_hand_on else ()

    def hand_out(self) -> None:
        """Gives all that was kept to its requests, but for those that have ended since."""
        self._give_all()
        self._owners, self._again, self._handed = [], (), ()
        self._count = 0

    def _begin(self, owners: Sequence[tuple[Request, int]]) -> None:
        self._owners = owners
        self._is_read_whole = any(request.hidden is not None for request, _ in owners)  # these belong to their step
        self._count = 0
        self._given = [0] * len(owners)
        self._limits = [0] * len(owners)
        self._to_take, self._to_hand_on = {}, {}
        self._again, self._handed = range(len(owners)), ()

    def _look_at(self, i: int) -> None:
        request, sequence = self._owners[i]
        if request.sequence == sequence:
            self._limits[i] = self._count + max(0, self._task.quiet_rows(request))
            self._await(i)

    def _await(self, i: int) -> None:
        request, sequence = self._owners[i]
        if request.sequence != sequence:
            return
        limit, due = self._limits[i], self._count + max(0, request.due - len(request.outputs) - 1)
        if due < limit:
            self._to_hand_on.setdefault(due, set()).add(i)
        else:
            self._to_take.setdefault(limit, set()).add(i)

    def _ends(self, rows: npt.NDArray[np.int64]) -> set[int]:
        """Whose rows hold an end id. It is looked for among bytes first: hardly any step has one."""
        some = rows[:, self._task.end_columns]
        data = some.tobytes()
        for mark in self._end_marks:
            if mark in data:
                ids: list[int] = some.ravel().tolist()
                return {at // some.shape[1] for at, each in enumerate(ids) if each in self._end_ids}
        return set()

    def _take(self, rows: npt.NDArray[np.int64], those: set[int]) -> list[tuple[Request, list[int]]]:
        found: list[tuple[Request, list[int]]] = []
        at = sorted(those)
        for i, row in zip(at, rows[at].tolist(), strict=True):
            request, sequence = self._owners[i]
            if request.sequence == sequence:
                self._give(i, self._count - 1)
                self._given[i] = self._count
                found.append((request, row))
        return found

    def _hand_on(self, those: set[int]) -> list[Request]:
        found: list[Request] = []
        for i in sorted(those):
            request, sequence = self._owners[i]
            if request.sequence == sequence:
                self._give(i, self._count)
                found.append(request)
        return found

    def _give_all(self) -> None:
        for i in range(len(self._owners)):
            self._give(i, self._count)

    def _give(self, i: int, stop: int) -> None:
        """Kept rows of a request up to `stop`."""
        request, sequence = self._owners[i]
        start = self._given[i]
        if start < stop and request.sequence == sequence:
            request.outputs.append_block(self._kept[start:stop, i])
            self.handed_out += stop - start
            self._given[i] = stop
