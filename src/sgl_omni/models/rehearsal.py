"""What stages rehearse: made-up requests, so that no real one waits for libraries that are used for the first time.

Libraries load their kernels when these are first used, which takes the first request half a second and more. When a
rehearsal is called, and what may come of it: `sgl_omni.runtime.stage.Rehearsal`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from sgl_omni.audio.encode import encode as encode_file
from sgl_omni.runtime.stage import Payload, Rehearsal, StreamStage

FRAMES = 16
"""Enough for the short piece that a stream begins with and the longer one that follows, in every family."""

SECONDS = 2.0, 8.0
"""Of recordings: libraries choose among kernels by their length."""

_FILE_RATE = 48_000
"""No codec's own, so that files are resampled as most are."""

Vocoder = TypeVar("Vocoder", bound=StreamStage[Any])


class _NoRequest:
    id = "rehearsal"
    aborted = False

    async def emit(self, chunk: Payload) -> None:
        raise AssertionError("a vocoder yields its sound")


def rehearsed(vocoder: Vocoder, width: int, takes: str = "codes") -> Vocoder:
    """The vocoder; its rehearsal speaks ``FRAMES`` frames of zeros [frames, width] of what it ``takes``: codes, one of
    each codebook, or latents."""
    vocoder.rehearsal = partial(_speak, vocoder, width, takes)
    return vocoder


def _speak(vocoder: StreamStage[Any], width: int, takes: str) -> None:
    state = vocoder.open(_NoRequest())
    try:
        frames = np.zeros((FRAMES, width), np.int16 if takes == "codes" else np.float32)
        chunk = {takes: frames, "speed": 1.0, "reference_codes": None}
        for _ in (*vocoder.feed(state, chunk), *vocoder.flush(state)):
            pass
    finally:
        vocoder.close(state)


def hearing(encode: Callable[[bytes], object]) -> Rehearsal:
    """Has ``encode``, which keeps nothing, hear a file of each of ``SECONDS``."""

    def hear() -> None:
        for seconds in SECONDS:
            encode(encode_file("wav", _FILE_RATE, [noise(seconds, _FILE_RATE)]))

    return hear


def noise(seconds: float, rate: int) -> NDArray[np.float32]:
    """float32 [samples] at ``rate``, always the same, about as loud as speech."""
    return np.random.default_rng(0).normal(0.0, 0.1, round(seconds * rate)).astype(np.float32)
