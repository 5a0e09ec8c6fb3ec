"""Rows that change nothing but the length of their requests are kept together, and handed out when it matters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sgl_omni.engine.request import Request
from sgl_omni.engine.runner import LaunchedStep
from sgl_omni.engine.task import Task

_STEPS = 64
"""Steps whose rows are kept at most."""


class QuietRows:
    """Saves the host a look at each request in each step, as long as its steps repeat one another.

    Rows of steps with the same owners lie in one block. A request gets its own where something comes of one of them,
    and all get theirs before anybody else looks at them.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._owners: Sequence[tuple[Request, int]] = []
        self._is_read_whole = False
        self._kept = np.empty((0, 0, 0), np.int64)
        self._count = 0
        self._given: list[int] = []  # how many of the kept rows each request has
        self._due: dict[int, set[int]] = {}  # whose row of a step needs a look, by how many are kept before it
        self._again: Sequence[int] = ()  # whose rows were handed out in the last step
        self.handed_out = 0

    def take(self, step: LaunchedStep) -> list[tuple[Request, list[int]]]:
        """Waits for the step. Returns the rows that something may come of, after those before them."""
        if step.owners is not self._owners:
            self.hand_out()
            self._begin(step.owners)
        if self._is_read_whole:
            return step.read()
        if self._count == _STEPS:
            self._give_all()
            self._begin(step.owners)
        for i in self._again:
            self._look_at(i)
        rows = step.rows()
        if len(rows) > self._kept.shape[1]:  # the owners' first
            self._kept = np.empty((_STEPS, *rows.shape), np.int64)
        self._kept[self._count, : len(rows)] = rows
        self._again = due = self._due_now(rows)
        self._count += 1
        return self._found(rows, due) if due else []

    def hand_out(self) -> None:
        """Gives all that was kept to its requests, but for those that have ended since."""
        self._give_all()
        self._owners, self._again = [], ()
        self._count = 0

    def _begin(self, owners: Sequence[tuple[Request, int]]) -> None:
        self._owners = owners
        self._is_read_whole = any(request.hidden is not None for request, _ in owners)  # these belong to their step
        self._count = 0
        self._given = [0] * len(owners)
        self._due = {}
        self._again = range(len(owners))

    def _look_at(self, i: int) -> None:
        request, sequence = self._owners[i]
        if request.sequence == sequence:
            at = self._count + max(0, self._task.quiet_rows(request))
            self._due.setdefault(at, set()).add(i)

    def _due_now(self, rows: npt.NDArray[np.int64]) -> list[int]:
        """Whose row of this step needs a look. It is looked for in lists: numpy takes longer to begin than these do."""
        due = self._due.pop(self._count, set())
        some = rows[:, self._task.end_columns]
        ids: list[int] = some.ravel().tolist()
        end_ids = self._task.end_ids
        if not end_ids.isdisjoint(ids):
            due.update(at // some.shape[1] for at, each in enumerate(ids) if each in end_ids)
        return sorted(due)

    def _found(self, rows: npt.NDArray[np.int64], due: Sequence[int]) -> list[tuple[Request, list[int]]]:
        found: list[tuple[Request, list[int]]] = []
        for i, row in zip(due, rows[due].tolist(), strict=True):
            request, sequence = self._owners[i]
            if request.sequence == sequence:
                self._give(i, self._count - 1)
                self._given[i] = self._count
                found.append((request, row))
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
