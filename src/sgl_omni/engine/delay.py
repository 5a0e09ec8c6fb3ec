"""The delay pattern of codebooks: column k of an output row belongs to an earlier frame than column 0."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sgl_omni.engine.output_rows import OutputRows


@dataclass(frozen=True)
class DelayPattern:
    """Column k of row s is codebook k of frame ``s - delays[k]``.

    Where there is no such frame, before the first and from the end on, the column holds ``pad_id``; column 0 holds
    ``eos_id`` once, where the audio ends.
    """

    delays: tuple[int, ...]
    eos_id: int
    pad_id: int

    @classmethod
    def staircase(cls, columns: int, eos_id: int, pad_id: int) -> DelayPattern:
        """Each column one row later than the one before it."""
        return cls(tuple(range(columns)), eos_id, pad_id)

    @cached_property
    def longest(self) -> int:
        return max(self.delays)

    def fill(self, row: list[int], step: int, end: int | None) -> None:
        """Writes the pattern's own ids into the row of a step; ``end`` is the number of frames, once known."""
        for column, delay in enumerate(self.delays):
            before = step < delay
            after = end is not None and step >= end + delay
            if before or after:
                row[column] = self.eos_id if column == 0 and step == end else self.pad_id

    def fill_rows(self, rows: Tensor, steps: Tensor, ends: Tensor, limits: Tensor) -> tuple[Tensor, Tensor]:
        """``fill`` for a batch on its device, which also finds the ends: rows int64 [n, columns], the others [n].

        ``ends`` is -1 where the number of frames is not known yet; ``limits``: frames at which the audio is cut.
        Returns the rows and the ends.
        """
        reached = (ends < 0) & ((rows[:, 0] == self.eos_id) | (steps >= limits))
        ends = torch.where(reached, steps, ends)
        delays = torch.tensor(self.delays, device=rows.device)
        forced = forced_ids(steps, ends, delays, self.pad_id, self.pad_id)
        is_forced = forced >= 0
        forced[:, 0] = torch.where(steps == ends, self.eos_id, forced[:, 0])
        return torch.where(is_forced, forced, rows), ends

    def known_frames(self, rows: int, end: int | None) -> int:
        """Frames whose every codebook is among the first ``rows`` rows."""
        known = max(0, rows - self.longest)
        return known if end is None else min(known, end)

    def frames(self, outputs: OutputRows, start: int, stop: int) -> npt.NDArray[np.int16]:
        """The codes of known frames [stop - start, codebooks]."""
        return undelayed(outputs.array(start, stop + self.longest), self.delays, stop - start)


def undelayed(rows: npt.NDArray[np.int32], delays: tuple[int, ...], frames: int) -> npt.NDArray[np.int16]:
    """The codes [frames, codebooks] of the first frames in rows [n, codebooks], whose columns come so much later."""
    return rows.take(_places(delays, frames)).astype(np.int16)


@lru_cache
def _places(delays: tuple[int, ...], frames: int) -> npt.NDArray[np.int64]:
    """[frames, codebooks]: where the codes of frames lie among all ids of their rows, one after another."""
    rows = np.arange(frames)[:, None] + np.asarray(delays)
    return rows * len(delays) + np.arange(len(delays))


def forced_ids(steps: Tensor, ends: Tensor, delays: Tensor, before_id: int, after_id: int) -> Tensor:
    """The ids [n, columns] that a pattern puts into the next row of n requests; -1 where the model chooses.

    Column k holds ``before_id`` in the first ``delays[k]`` rows, and ``after_id`` from ``delays[k]`` rows after the
    row of the end on. ``steps`` int64 [n]: rows so far; ``ends`` int64 [n]: the row of the end, or -1.
    """
    before = steps[:, None] < delays
    after = (ends[:, None] >= 0) & (steps[:, None] - ends[:, None] >= delays)
    free = torch.full_like(before, -1, dtype=torch.int64)
    return free.masked_fill(before, before_id).masked_fill(after, after_id)
