"""Cuts long audio into windows at quiet places."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_HOP_SECONDS = 0.01
_QUIET_SECONDS = 0.2
_SEARCHED = 1 / 3
"""The part of a window in whose quietest place it may end."""


def cut_at_quiet_places(samples: NDArray[np.float32], sample_rate: int, window_seconds: float) -> list[tuple[int, int]]:
    """Where each window begins and ends, in samples; together they are all of the audio.

    A window that is not the last ends in the middle of the quietest 0.2 s of its last third.
    """
    longest = round(window_seconds * sample_rate)
    hop = max(1, round(_HOP_SECONDS * sample_rate))
    windows: list[tuple[int, int]] = []
    start = 0
    while len(samples) - start > longest:
        first = start + longest - int(longest * _SEARCHED)
        end = _quietest(samples, first, start + longest, hop)
        windows.append((start, end))
        start = end
    windows.append((start, len(samples)))
    return windows


def _quietest(samples: NDArray[np.float32], first: int, last: int, hop: int) -> int:
    """The middle of the quietest stretch between two samples; the latest of equals."""
    part = samples[first:last].astype(np.float64)
    hops = len(part) // hop
    energy = (part[: hops * hop].reshape(hops, hop) ** 2).sum(1)
    width = min(hops, max(1, round(_QUIET_SECONDS / _HOP_SECONDS)))
    sums = np.convolve(energy, np.ones(width), "valid")
    latest = len(sums) - 1 - int(np.argmin(sums[::-1]))
    return first + latest * hop + width * hop // 2
