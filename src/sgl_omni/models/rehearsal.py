"""A vocoder's first pieces, before anybody waits for them."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from sgl_omni.runtime.stage import Payload, StreamStage

FRAMES = 16
"""Enough for the short piece that a stream begins with and the longer one that follows, in every family."""

Vocoder = TypeVar("Vocoder", bound=StreamStage[Any])


class _NoRequest:
    id = "rehearsal"
    aborted = False

    async def emit(self, chunk: Payload) -> None:
        raise AssertionError("a vocoder yields its sound")


def rehearsed(vocoder: Vocoder, device: str, width: int, takes: str = "codes") -> Vocoder:
    """The vocoder; on a GPU after it has spoken ``FRAMES`` frames of zeros [frames, width] of what it ``takes``: codes,
    one of each codebook, or latents.

    Libraries load their kernels when these are first used, which takes the first request half a second and more.
    Raises what the vocoder does, ``NotFinite`` where its weights are damaged.
    """
    if device == "cpu":
        return vocoder
    state = vocoder.open(_NoRequest())
    try:
        frames = np.zeros((FRAMES, width), np.int16 if takes == "codes" else np.float32)
        chunk = {takes: frames, "speed": 1.0, "reference_codes": None}
        for _ in (*vocoder.feed(state, chunk), *vocoder.flush(state)):
            pass
    finally:
        vocoder.close(state)
    return vocoder
