"""Calls of several threads, made as one."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from threading import Barrier, Event
from typing import Any

import pytest

from sgl_omni.audio.gathering import PATIENCE_SECONDS, Gathering


class Tenfold:
    """Makes ten times each number; stops in its first call until it may ``go_on``. Refuses what is below 0."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.begun, self.go_on = Event(), Event()

    def __call__(self, numbers: list[int]) -> list[int]:
        self.batches.append(numbers)
        self.begun.set()
        assert self.go_on.wait(10)
        if min(numbers) < 0:
            raise ValueError("below 0")
        return [10 * number for number in numbers]


def asked_at_once(gathering: Gathering[int, int], tenfold: Tenfold, numbers: list[int]) -> list[Future[int]]:
    """The first call is being made while all others come in."""
    with ThreadPoolExecutor(len(numbers)) as pool:
        calls: list[Any] = [pool.submit(gathering, numbers[0])]
        assert tenfold.begun.wait(10)
        calls += [pool.submit(gathering, number) for number in numbers[1:]]
        while len(gathering._waiting) < len(numbers) - 1:
            Event().wait(0.005)
        tenfold.go_on.set()
    return calls


def test_what_comes_while_one_is_made_goes_together_and_each_gets_its_own() -> None:
    gathering = Gathering(tenfold := Tenfold(), 32)
    calls = asked_at_once(gathering, tenfold, [*range(33)])
    assert [call.result() for call in calls] == [10 * number for number in range(33)]
    assert [len(batch) for batch in tenfold.batches] == [1, 32]


def test_no_batch_has_more_than_the_most() -> None:
    gathering = Gathering(tenfold := Tenfold(), 4)
    calls = asked_at_once(gathering, tenfold, [*range(11)])
    assert [call.result() for call in calls] == [10 * number for number in range(11)]
    assert sorted(len(batch) for batch in tenfold.batches) == [1, 2, 4, 4]


def test_only_items_of_a_kind_go_together() -> None:
    gathering = Gathering(tenfold := Tenfold(), 32, lambda number: number % 2)
    calls = asked_at_once(gathering, tenfold, [*range(11)])
    assert [call.result() for call in calls] == [10 * number for number in range(11)]
    assert sorted(map(sorted, tenfold.batches)) == [[0], [1, 3, 5, 7, 9], [2, 4, 6, 8, 10]]


def test_a_call_that_fails_fails_its_batch_and_no_other() -> None:
    gathering = Gathering(tenfold := Tenfold(), 32, lambda number: number % 2)
    calls = asked_at_once(gathering, tenfold, [0, -2, 4, 1, 3])
    assert [call.exception() is None for call in calls] == [True, False, False, True, True]
    with pytest.raises(ValueError, match="below 0"):
        calls[1].result()
    assert gathering(6) == 60


def test_those_who_have_joined_are_waited_for_as_long_as_some_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each comes a little after the one before: all four are one batch, though the first could have gone at once."""
    monkeypatch.setattr("sgl_omni.audio.gathering.PATIENCE_SECONDS", 10.0)  # as a busy machine may need
    tenfold = Tenfold()
    tenfold.go_on.set()
    gathering = Gathering(tenfold, 32)
    for _ in range(4):
        gathering.join()
    gate = Barrier(4)

    def call(number: int) -> int:
        gate.wait(10)
        return gathering(number)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(call, range(4))) == [0, 10, 20, 30]
    assert sorted(map(len, tenfold.batches)) == [4]


def test_one_who_does_not_come_is_not_waited_for_long_and_one_who_left_not_at_all() -> None:
    tenfold = Tenfold()
    tenfold.go_on.set()
    gathering = Gathering(tenfold, 32)
    waits: list[float] = []
    wait = gathering._arrived.wait
    gathering._arrived.wait = lambda timeout=None: waits.append(timeout or 0) or wait(timeout)  # type: ignore[method-assign]
    gathering.join()
    assert (gathering(1), waits) == (10, [])
    gathering.join()
    assert (gathering(2), waits) == (20, [PATIENCE_SECONDS])
    gathering.leave()
    assert (gathering(3), waits) == (30, [PATIENCE_SECONDS])
