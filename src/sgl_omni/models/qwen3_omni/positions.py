"""Positions along three axes: text goes on by one in each, pictures spread over height and width. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sgl_omni.models.qwen3_omni.patches import Grid
from sgl_omni.models.qwen3_omni.prompt_spec import PromptSpec

SECONDS_PER_FRAME = 1.0
"""A request's video is its frames and says no times: one a second."""


def token_count(grid: Grid, merge: int) -> int:
    groups, down, across = grid
    return groups * (down // merge) * (across // merge)


def audio_tokens(frames: int, window: int) -> int:
    """Tokens that the audio encoder makes of so many mel frames: 13 a whole chunk of ``2 * window`` at 50."""
    chunk = 2 * window
    whole, rest = divmod(frames, chunk)
    return whole * _after_strides(chunk) + _after_strides(rest)


def _after_strides(frames: int) -> int:
    """Three convolutions of stride 2."""
    for _ in range(3):
        frames = -(-frames // 2)
    return frames


def three_axes(
    ids: NDArray[np.int64], grids: Sequence[Grid], spec: PromptSpec, positions_per_second: float
) -> NDArray[np.int64] | None:
    """int64 [3, length]; None where no row is of a picture, so that positions simply count rows.

    ``grids``: those of the pictures and videos, in the order of their rows in ``ids``.
    """
    visual = (ids == spec.image_id) | (ids == spec.video_id)
    if not visual.any():
        return None
    parts: list[NDArray[np.int64]] = []
    following, at, merge = 0, 0, spec.vision.merge
    for grid in grids:
        start = at + int(np.argmax(visual[at:]))
        if start > at:
            parts.append(_counted(following, start - at))
            following += start - at
        seconds = spec.vision.frames * SECONDS_PER_FRAME if ids[start] == spec.video_id else 1.0
        block = _block(grid, merge, seconds * positions_per_second) + following
        parts.append(block)
        following = int(block.max()) + 1
        at = start + block.shape[1]
    parts.append(_counted(following, len(ids) - at))
    return np.concatenate(parts, 1)


def _counted(first: int, count: int) -> NDArray[np.int64]:
    return np.broadcast_to(np.arange(first, first + count, dtype=np.int64), (3, count))


def _block(grid: Grid, merge: int, apart: float) -> NDArray[np.int64]:
    """Of one picture or video, from 0 on; its groups of frames are ``apart``."""
    groups, down, across = grid[0], grid[1] // merge, grid[2] // merge
    time, row, column = np.meshgrid(np.arange(groups) * apart, np.arange(down), np.arange(across), indexing="ij")
    return np.stack([axis.reshape(-1) for axis in (time, row, column)]).astype(np.int64)
