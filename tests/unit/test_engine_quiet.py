"""Rows that are kept together come to their requests as if each step had been looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch

from sgl_omni.engine.delay import DelayPattern
from sgl_omni.engine.hidden import HiddenRows
from sgl_omni.engine.quiet import QuietRows
from sgl_omni.engine.request import LARGEST, LOST, Prompt, Request
from sgl_omni.engine.task import FrameTask, HandOver, InputSpec

CODES, EOS, PAD, COLUMNS, STEPS = 10, 10, 11, 3, 150
Rows = Sequence[tuple[Request, list[int]]]
Taken = tuple[Rows, Sequence[Request]]
Events = list[tuple[int, str, list[list[int]], bool]]


class Step:
    """A step of a run in which the same requests decode."""

    def __init__(self, owners: Sequence[tuple[Request, int]], ids: npt.NDArray[np.int64]) -> None:
        self.owners = owners
        self._ids = ids

    def rows(self) -> npt.NDArray[np.int64]:
        return self._ids

    def read(self) -> list[tuple[Request, list[int]]]:
        pairs = zip(self.owners, self._ids.tolist(), strict=True)
        return [(request, row) for (request, sequence), row in pairs if request.sequence == sequence]


def task() -> FrameTask:
    inputs = InputSpec(vocab_sizes=(12,) * COLUMNS, hidden_size=16)
    return FrameTask(inputs, DelayPattern.staircase(COLUMNS, EOS, PAD), hand_over=HandOver(3, 20))


def requests(task: FrameTask, known: npt.NDArray[np.int64]) -> list[Request]:
    """Of several limits; each already has as many outputs as `known` says, so that they are out of step."""
    found = []
    for i, rows in enumerate(known):
        request = task.parse(str(i), {"prompt_ids": np.zeros((2, COLUMNS), int), "max_frames": 60 + 40 * (i % 3)})
        for row in range(rows):
            task.take_all([(request, [row % CODES] * COLUMNS)])
            task.chunk(request)
        found.append(request)
    return found


def run(task: FrameTask, requests: list[Request], ids: npt.NDArray[np.int64], take: Callable[[Step], Taken]) -> Events:
    """What comes of the steps; request 2 is aborted on the way."""
    owners = [(request, request.sequence) for request in requests]
    events: Events = []
    for step in range(STEPS):
        if step == 40:
            requests[2].sequence += 1
        rows, due = take(Step(owners, ids[step]))
        for request, ended in [*task.take_all(rows), *((request, False) for request in due)]:
            chunk = task.chunk(request)
            events.append((step, request.id, [] if chunk is None else chunk["codes"].tolist(), ended))
            request.sequence += ended
    return sorted(events)


def look_at_each(step: Step) -> Taken:
    return step.read(), ()


@pytest.mark.parametrize("seed", range(4))
def test_what_comes_of_the_steps_is_the_same_with_few_looks(seed: int) -> None:
    random = np.random.default_rng(seed)
    n = 16
    known = random.integers(1, 40, n)
    ids = random.integers(0, CODES, (STEPS, n, COLUMNS))
    ids[random.random((STEPS, n)) < 0.005, 0] = EOS
    plain, quietly = task(), task()
    expected, found = requests(plain, known), requests(quietly, known)
    kept = QuietRows(quietly)
    looks = 0

    def take(step: Step) -> Taken:
        nonlocal looks
        rows, due = kept.take(step)
        looks += len(rows)
        return rows, due

    assert run(quietly, found, ids, take) == run(plain, expected, ids, look_at_each)
    kept.hand_out()
    assert [list(r.outputs) for r in found] == [list(r.outputs) for r in expected]
    rows = sum(len(r.outputs) for r in found) - int(known.sum())
    assert looks + kept.handed_out == rows
    assert looks < rows / 12, "but for its first rows and its last a request needs no look, whatever the others do"


class Unending(FrameTask):
    """Rows with an end id get a look, and are rows like others."""

    def take_all(self, rows: Rows) -> list[tuple[Request, bool]]:
        taken = []
        for request, row in rows:
            request.outputs.append(row)
            if len(request.outputs) >= request.due:
                taken.append((request, False))
        return taken

    def quiet_rows(self, request: Request) -> int:
        return LARGEST


def test_an_end_id_that_ends_nothing_leaves_each_row_taken_once() -> None:
    random = np.random.default_rng(0)
    ids = random.integers(0, CODES, (STEPS, 8, COLUMNS))
    ids[random.random((STEPS, 8)) < 0.3, 0] = EOS
    pattern = DelayPattern((0,) * COLUMNS, EOS, PAD)
    inputs = InputSpec(vocab_sizes=(12,) * COLUMNS, hidden_size=16)
    plain, quietly = (Unending(inputs, pattern, hand_over=HandOver(3, 20)) for _ in range(2))
    none = np.zeros(8, int)
    expected, found = requests(plain, none), requests(quietly, none)
    kept = QuietRows(quietly)
    assert run(quietly, found, ids, kept.take) == run(plain, expected, ids, look_at_each)
    kept.hand_out()
    assert [list(r.outputs) for r in found] == [list(r.outputs) for r in expected]
    assert list(found[0].outputs) == ids[:, 0].tolist()


def test_a_row_of_no_choice_is_told_at_once() -> None:
    frames = task()
    some = requests(frames, np.full(3, 8))
    kept, owners = QuietRows(frames), [(request, request.sequence) for request in some]
    good = np.ones((3, COLUMNS), np.int64)
    assert kept.take(Step(owners, good)) == ((), ())
    lost = good.copy()
    lost[1] = LOST
    assert kept.take(Step(owners, lost)) == ([(some[1], [LOST] * COLUMNS)], ())
    assert len(some[1].outputs) == 9, "those before are its own"


def test_hidden_states_are_read_with_their_step() -> None:
    """They lie beside the rows of a step, which only a whole reading takes."""
    seen: list[Step] = []

    class Recording(Step):
        def read(self) -> list[tuple[Request, list[int]]]:
            seen.append(self)
            return super().read()

    frames = task()
    (request,) = requests(frames, np.asarray([5]))
    request.hidden = HiddenRows.parse([-1], (-1,))
    step = Recording([(request, 0)], np.ones((1, COLUMNS), np.int64))
    assert QuietRows(frames).take(step) == ([(request, [1] * COLUMNS)], ())
    assert seen == [step]


def test_a_task_that_says_nothing_of_its_rows_sees_each() -> None:
    class Plain(FrameTask):
        def quiet_rows(self, request: Request) -> int:
            return 0

    kept = QuietRows(Plain(InputSpec(vocab_sizes=(12,), hidden_size=16), DelayPattern((0,), EOS, PAD)))
    request = Request("a", Prompt(torch.zeros(1, 1, dtype=torch.int64)), max_outputs=100)
    owners = [(request, 0)]
    for i in range(70):
        assert kept.take(Step(owners, np.asarray([[i % CODES]]))) == ([(request, [i % CODES])], ())
        request.outputs.append([i % CODES])
    assert kept.handed_out == 0
