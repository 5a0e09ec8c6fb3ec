"""Tiles of rows: what one program of the prefill kernel attends for, and how a pass says which there are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

TILE_ROWS = 64
"""Of one sequence, at most."""
LEAST_ROWS = 16
"""A prompt chunk of fewer rows is attended row by row."""


def most_tiles(rows: int) -> int:
    """Of a pass of so many rows: chunks of ``LEAST_ROWS`` or more make no more."""
    return rows // LEAST_ROWS


def cut(first: int, lengths: Sequence[int], out: npt.NDArray[np.int64]) -> None:
    """Fills ``out`` [tiles, 2] with the first row and rows of each tile, of chunks that follow one another."""
    filled = 0
    for length in lengths:
        for at in range(0, length, TILE_ROWS):
            out[filled] = first + at, min(TILE_ROWS, length - at)
            filled += 1
        first += length
