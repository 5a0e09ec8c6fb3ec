"""Rehearsals: in a thread of requests, told when they fail; a vocoder's decodes its first pieces and leaves nothing."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from sgl_omni.errors import NotFinite, StartupError
from sgl_omni.models.rehearsal import FRAMES, rehearsed
from sgl_omni.runtime.build import runner_for
from sgl_omni.runtime.stage import BatchStage, FunctionStage, Payload, Rehearsal, Request, StreamStage
from sgl_omni.runtime.start_times import in_words, start_times


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


def test_a_vocoder_speaks_once_when_it_is_rehearsed_and_not_before() -> None:
    vocoder = Spoken()
    assert rehearsed(vocoder, 3) is vocoder
    assert vocoder.heard == []
    runner_for(vocoder, "vocoder").rehearse()
    assert (vocoder.heard, vocoder.open_streams) == ([FRAMES, -1], 0)


def test_damaged_weights_end_the_start_and_the_stream() -> None:
    vocoder = rehearsed(Spoken(fails=True), 3)
    with pytest.raises(StartupError, match="its rehearsal failed: the samples are not all finite"):
        runner_for(vocoder, "vocoder").rehearse()
    assert vocoder.open_streams == 0


def function(rehearsal: Rehearsal | None) -> FunctionStage:
    return FunctionStage(lambda payload, request: payload, concurrency=4, rehearsal=rehearsal)


def batch(rehearsal: Rehearsal | None) -> BatchStage:
    return BatchStage(lambda payloads: payloads, rehearsal=rehearsal)


@pytest.mark.parametrize("kind", [function, batch])
def test_a_rehearsal_is_called_in_the_thread_that_the_first_request_gets(kind: Any) -> None:
    threads: list[threading.Thread] = []
    runner = runner_for(kind(lambda: threads.append(threading.current_thread())), "encoder")
    runner.rehearse()
    assert runner._pool is not None
    assert [runner._pool.submit(threading.current_thread).result()] == threads
    assert threads != [threading.current_thread()]
    runner.close()


async def nothing(payload: Payload, request: Request) -> Payload:
    return payload


def test_where_there_are_no_threads_it_is_called_here() -> None:
    threads: list[threading.Thread] = []
    stage = FunctionStage(nothing, rehearsal=lambda: threads.append(threading.current_thread()))
    runner_for(stage, "asynchronous").rehearse()
    assert threads == [threading.current_thread()]


@pytest.mark.parametrize("kind", [function, batch])
def test_a_stage_without_a_rehearsal_starts_no_thread(kind: Any) -> None:
    before = threading.active_count()
    runner_for(kind(None), "encoder").rehearse()
    assert threading.active_count() == before


def test_what_a_rehearsal_raises_by_accident_is_raised_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        runner_for(function(lambda: 1 // 0), "encoder").rehearse()


def test_the_report_of_a_start_says_how_long_rehearsals_took() -> None:
    start = start_times(5.0, {"build_seconds": 3.0, "rehearsal_seconds": 0.5})
    assert in_words(start) == "5.0 s, of which imports 2.0, build 3.0 (rehearsal 0.5)"
