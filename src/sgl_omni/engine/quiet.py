"""Rows that change nothing but the length of their requests are kept together, and handed out when it matters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_omni.engine.request import Request
from sgl_omni.engine.runner import LaunchedStep
from sgl_omni.engine.task import Task

Block = npt.NDArray[np.int64]


class QuietRows:
    """Saves the host a look at each request in each step, as long as its steps repeat one another."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._owners: Sequence[tuple[Request, int]] | None = None
        self._blocks: list[Block] = []
        self._left = 0

    def hold(self, step: LaunchedStep) -> bool:
        """Waits for the step and keeps its rows, if nothing comes of them but that they are known."""
        if step.owners is not self._owners:
            self.hand_out()
            self._owners = step.owners
            self._left = self._task.quiet_rows([request for request, _ in step.owners])
        if self._left <= 0 or not self._task.is_quiet(rows := step.rows()):
            return False
        self._blocks.append(rows.copy())
        self._left -= 1
        return True

    def hand_out(self) -> int:
        """Gives all that was kept to its requests, but for those that have ended since. Returns how many rows."""
        count = 0
        if self._blocks and self._owners is not None:
            kept: npt.NDArray[Any] = np.stack(self._blocks, 1)
            for (request, sequence), rows in zip(self._owners, kept, strict=True):
                if request.sequence == sequence:
                    request.outputs.extend(rows.tolist())
                    count += len(rows)
        self._blocks.clear()
        self._owners = None
        return count
