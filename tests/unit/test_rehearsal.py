"""A vocoder's rehearsal: its first pieces are decoded, and nothing is left of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sgl_omni.errors import NotFinite
from sgl_omni.models.rehearsal import FRAMES, rehearsed
from sgl_omni.runtime.stage import Payload, Request, StreamStage


class Spoken(StreamStage[list[int]]):
    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.heard: list[int] = []
        self.open_streams = 0

    def open(self, request: Request) -> list[int]:
        self.open_streams += 1
        return self.heard

    def feed(self, state: list[int], chunk: Payload) -> Any:
        assert chunk["codes"].shape == (FRAMES, 3) and not np.any(chunk["codes"])
        if self.fails:
            raise NotFinite("the samples are")
        state.append(len(chunk["codes"]))
        yield {"audio": np.zeros(1)}

    def flush(self, state: list[int]) -> Any:
        state.append(-1)
        yield {"audio": np.zeros(1)}

    def result(self, state: list[int], payload: Payload) -> Payload:
        raise AssertionError("nobody waits for a result")

    def close(self, state: list[int]) -> None:
        self.open_streams -= 1


def test_a_vocoder_on_a_gpu_speaks_once_before_it_is_ready() -> None:
    vocoder = Spoken()
    assert rehearsed(vocoder, "cuda:0", 3) is vocoder
    assert (vocoder.heard, vocoder.open_streams) == ([FRAMES, -1], 0)


def test_on_a_cpu_nothing_is_spoken() -> None:
    assert rehearsed(Spoken(), "cpu", 3).heard == []


def test_damaged_weights_end_the_start_and_the_stream() -> None:
    vocoder = Spoken(fails=True)
    with pytest.raises(NotFinite, match="samples are not all finite"):
        rehearsed(vocoder, "cuda:0", 3)
    assert vocoder.open_streams == 0
