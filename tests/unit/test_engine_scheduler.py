"""Scheduling without a model: a stand-in whose every output depends on all that its pages hold."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sgl_omni.engine.engine import AutoregressiveEngine
from sgl_omni.engine.interface import Payload
from sgl_omni.engine.kv_cache import PagePool
from sgl_omni.engine.output_rows import OutputRows
from sgl_omni.engine.request import Chunk, Prompt, Request, Segment
from sgl_omni.engine.scheduler import Limits, Scheduler
from sgl_omni.engine.task import InputSpec, TokenTask
from sgl_omni.errors import InvalidRequest, StartupError

VOCABULARY = 13
PRIME = 1_000_003
STOP = 0


def digest(state: int, token: int) -> int:
    """What a position holds: it depends on all before it, as keys and values do."""
    return (state * 31 + token + 7) % PRIME


class StandIn:
    """A runner over an array of numbers in place of keys and values."""

    def __init__(self, pool: PagePool) -> None:
        self._size = pool.page_size
        self._memory = [-1] * pool.capacity
        self.steps = 0
        self.rows = 0

    def run(self, chunks: Sequence[Chunk]) -> list[list[int] | None]:
        self.steps += 1
        self.rows += sum(chunk.length for chunk in chunks)
        for chunk in chunks:
            self._write(chunk)
        return [[self._choose(chunk)] if chunk.yields_output else None for chunk in chunks]

    def _slot(self, request: Request, position: int) -> int:
        return request.pages[position // self._size] * self._size + position % self._size

    def _write(self, chunk: Chunk) -> None:
        request = chunk.request
        tokens = self._known(request)
        state = self._memory[self._slot(request, chunk.start - 1)] if chunk.start else 0
        for position in range(chunk.start, chunk.stop):
            state = digest(state, tokens[position])
            self._memory[self._slot(request, position)] = state

    def _known(self, request: Request) -> list[int]:
        return [*request.prompt.rows[:, 0].tolist(), *(row[0] for row in request.outputs)]

    def _choose(self, chunk: Chunk) -> int:
        request = chunk.request
        assert len(request.pages) * self._size >= chunk.stop
        return sum(self._memory[self._slot(request, i)] * (i + 1) for i in range(chunk.stop)) % VOCABULARY


class AheadStandIn(StandIn):
    """As a device: it alone knows the last output until the step is read, one step later."""

    def __init__(self, pool: PagePool) -> None:
        super().__init__(pool)
        self._turns: dict[int, tuple[Request, int]] = {}
        self._tokens: dict[int, list[int]] = {}
        self._last: tuple[list[Chunk], list[tuple[Request, int]]] = ([], [])
        self.repeats = 0

    def launch(self, chunks: Sequence[Chunk]) -> StandInStep:
        for chunk in chunks:
            request = chunk.request
            if self._turns.get(request.row) != (request, request.turn):
                assert not request.awaits_output  # or what was chosen last would be lost
                self._turns[request.row] = (request, request.turn)
                known = [*request.prompt.rows[:, 0].tolist(), *(row[0] for row in request.outputs)]
                self._tokens[request.row] = known
        through = [chunk for chunk in chunks if chunk.yields_output]
        self._last = (list(chunks), [(chunk.request, chunk.request.sequence) for chunk in through])
        return self._step(chunks, through)

    def repeat(self) -> StandInStep:
        self.repeats += 1
        chunks = [Chunk(c.request, c.start + 1, c.stop + 1) for c in self._last[0]]
        self._last = (chunks, self._last[1])
        return self._step(chunks, chunks)

    def stats(self) -> dict[str, float]:
        return {}

    def _step(self, chunks: Sequence[Chunk], through: Sequence[Chunk]) -> StandInStep:
        self.steps += 1
        self.rows += sum(chunk.length for chunk in chunks)
        for chunk in chunks:
            self._write(chunk)
        rows = [self._choose(chunk) for chunk in through]
        for chunk, token in zip(through, rows, strict=True):
            self._tokens[chunk.request.row].append(token)
        return StandInStep(self._last[1], np.asarray(rows, dtype=np.int64).reshape(-1, 1))

    def _known(self, request: Request) -> list[int]:
        return self._tokens[request.row]


class StandInStep:
    def __init__(self, owners: Sequence[tuple[Request, int]], rows: npt.NDArray[np.int64]) -> None:
        self.owners = owners
        self._rows = rows

    def rows(self) -> npt.NDArray[np.int64]:
        return self._rows

    def read(self) -> list[tuple[Request, list[int]]]:
        pairs = zip(self.owners, self._rows.tolist(), strict=True)
        return [(request, row) for (request, sequence), row in pairs if request.sequence == sequence]


def solo(prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """What a request must yield whatever runs beside it."""
    states: list[int] = []
    for token in prompt:
        states.append(digest(states[-1] if states else 0, token))
    outputs: list[int] = []
    while len(outputs) < max_new_tokens and STOP not in outputs:
        outputs.append(sum(state * (i + 1) for i, state in enumerate(states)) % VOCABULARY)
        states.append(digest(states[-1], outputs[-1]))
    return outputs


class Bench:
    """An engine on a stand-in, and what came out of it."""

    def __init__(self, pages: int, page_size: int, **limits: Any) -> None:
        """With ``rows_ahead`` the runner is one that launches a step before the last is read."""
        self.pool = PagePool(pages, page_size)
        self.runner = AheadStandIn(self.pool) if limits.get("rows_ahead") else StandIn(self.pool)
        task = TokenTask(InputSpec(vocab_sizes=(VOCABULARY,), hidden_size=1), eos_ids=[STOP])
        self.engine = AutoregressiveEngine(task, self.runner, self.pool, Limits(**limits))
        self.results: dict[str, list[int]] = {}
        self.streamed: dict[str, list[int]] = {}

    def add(self, name: str, prompt: Sequence[int], max_new_tokens: int) -> None:
        self.engine.add(name, {"prompt_ids": list(prompt), "max_new_tokens": max_new_tokens, "stream": True})

    def step(self) -> None:
        for output in self.engine.step():
            assert output.request_id not in self.results
            for chunk in output.chunks:
                self.streamed.setdefault(output.request_id, []).extend(chunk["token_ids"])
            if output.result is not None:
                self.results[output.request_id] = output.result["token_ids"]

    def finish(self, most_steps: int = 100_000) -> None:
        for _ in range(most_steps):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("the engine does not come to an end")

    def assert_empty(self) -> None:
        stats = self.engine.stats()
        assert (stats["running"], stats["queued"], stats["kv_used_tokens"]) == (0, 0, 0)
        assert self.pool.available == self.pool.num_pages
        assert sorted(self.pool.allocate(self.pool.num_pages)) == list(range(self.pool.num_pages))


PROMPTS = st.one_of(
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20),
    st.integers(1, 20).map(lambda n: [5] * n),  # shared prefixes
)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), PROMPTS, st.integers(1, 12)),
        st.tuples(st.just("abort"), st.integers(0, 40), st.just(0)),
        st.tuples(st.just("step"), st.integers(1, 4), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(
    events=EVENTS,
    page_size=st.sampled_from([1, 2, 3, 8]),
    extra_pages=st.integers(0, 12),
    running=st.integers(1, 6),
    chunk=st.integers(1, 30),
    fixed=st.booleans(),
    reuse=st.booleans(),
    ahead=st.sampled_from([0, 1, 5, 32]),
)
def test_nothing_is_lost_or_leaked_and_every_output_equals_its_solo_run(
    events: list[tuple[str, Any, int]],
    page_size: int,
    extra_pages: int,
    running: int,
    chunk: int,
    fixed: bool,
    reuse: bool,
    ahead: int,
) -> None:
    bench = Bench(
        -(-31 // page_size) + extra_pages,
        page_size,
        max_running_requests=running,
        prefill_tokens=chunk,
        fixed_chunks=fixed,
        reuse_prefixes=reuse,
        rows_ahead=ahead,
        free_rows_ahead=3 * ahead,
    )
    expected: dict[str, list[int]] = {}
    aborted: set[str] = set()
    for kind, value, most in events:
        if kind == "add":
            name = str(len(expected))
            bench.add(name, value, most)
            expected[name] = solo(value, most)
        elif kind == "abort" and str(value) not in bench.results:
            bench.engine.abort(str(value))
            aborted.add(str(value))
        elif kind == "step":
            for _ in range(value):
                if bench.engine.has_work:
                    bench.step()
    # An id that was aborted before it came is a request like any other.
    bench.finish()
    for name, outputs in expected.items():
        assert bench.results.get(name) == outputs or name in aborted
        assert name not in bench.results or bench.streamed[name] == outputs
    bench.assert_empty()


@pytest.mark.parametrize("ahead", [0, 8])
def test_ten_thousand_requests_with_aborts_at_a_pool_of_three(ahead: int) -> None:
    rng = random.Random(4)
    bench = Bench(
        pages=3 * 20, page_size=2, max_running_requests=16, prefill_tokens=24, rows_ahead=ahead, free_rows_ahead=32
    )
    waiting: dict[str, list[int]] = {}
    aborted: list[str] = []
    added = finished = 0
    while added < 10_000 or bench.engine.has_work:
        while added < 10_000 and len(waiting) < 20:
            prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 20))]
            most = rng.randint(1, 20)
            bench.add(str(added), prompt, most)
            waiting[str(added)] = solo(prompt, most)
            if rng.random() < 0.2:
                aborted.append(str(added))
            added += 1
        bench.step()
        for name, tokens in bench.results.items():
            assert waiting.pop(name) == tokens == bench.streamed.pop(name)
            finished += 1
        aborted = [name for name in aborted if name not in bench.results]
        bench.results.clear()
        if aborted and rng.random() < 0.5:
            name = aborted.pop(rng.randrange(len(aborted)))
            bench.engine.abort(name)
            del waiting[name]
            bench.streamed.pop(name, None)
    assert waiting == {}
    assert 7_800 < finished < 8_400
    assert bench.engine.stats()["retractions"] > 100
    bench.assert_empty()


def request(name: str, prompt: Sequence[int], max_outputs: int) -> Request:
    return Request(name, Prompt(ids=torch.tensor(prompt)[:, None]), max_outputs)


def run_step(scheduler: Scheduler) -> list[tuple[str, int, int]]:
    """One step in which each output is 1: who ran which rows."""
    chunks = scheduler.schedule()
    seen = [(chunk.request.id, chunk.start, chunk.stop) for chunk in chunks]
    through = [chunk for chunk in chunks if chunk.yields_output]
    scheduler.complete(chunks)
    for chunk in through:
        chunk.request.outputs.append([1])
        if chunk.request.is_at_limit:
            scheduler.remove(chunk.request)
    return seen


def test_a_long_prompt_runs_in_chunks_while_others_decode() -> None:
    scheduler = Scheduler(PagePool(100, 1), Limits(prefill_tokens=4))
    scheduler.add(request("short", [1, 2], 4))
    scheduler.add(request("long", range(9), 1))
    assert run_step(scheduler) == [("short", 0, 2), ("long", 0, 2)]
    assert run_step(scheduler) == [("short", 2, 3), ("long", 2, 6)]
    assert run_step(scheduler) == [("short", 3, 4), ("long", 6, 9)]
    assert run_step(scheduler) == [("short", 4, 5)]
    assert not scheduler.has_work


def test_fixed_chunks_do_not_depend_on_what_else_runs() -> None:
    scheduler = Scheduler(PagePool(100, 1), Limits(prefill_tokens=4, fixed_chunks=True))
    scheduler.add(request("short", [1, 2], 4))
    scheduler.add(request("long", range(9), 1))
    assert run_step(scheduler) == [("short", 0, 2), ("long", 0, 4)]
    assert run_step(scheduler) == [("short", 2, 3), ("long", 4, 8)]
    assert run_step(scheduler) == [("short", 3, 4), ("long", 8, 9)]


def test_requests_enter_in_order_of_arrival_even_if_a_later_one_would_fit() -> None:
    scheduler = Scheduler(PagePool(10, 1), Limits(reuse_prefixes=False))
    for name, size in [("a", 6), ("b", 6), ("c", 1)]:
        scheduler.add(request(name, range(size), 1))
    assert run_step(scheduler) == [("a", 0, 6)]
    assert run_step(scheduler) == [("b", 0, 6), ("c", 0, 1)]


def test_the_youngest_gives_way_and_resumes_before_later_arrivals() -> None:
    scheduler = Scheduler(PagePool(9, 1), Limits(reuse_prefixes=False))
    old, young, late = request("old", [1, 2], 7), request("young", [1, 2, 3], 5), request("late", [1], 1)
    for one in (old, young, late):
        scheduler.add(one)
    seen = [run_step(scheduler) for _ in range(8)]
    assert seen[0] == [("old", 0, 2), ("young", 0, 3), ("late", 0, 1)]
    assert [names(step) for step in seen[1:]] == [["old", "young"]] * 2 + [["old"]] * 4 + [["young"]]
    assert seen[7] == [("young", 0, 6)]  # its prompt and the three outputs that it had
    assert (young.retractions, old.retractions) == (1, 0)


def names(step: list[tuple[str, int, int]]) -> list[str]:
    return [name for name, _, _ in step]


def test_a_request_aborted_while_its_step_runs_is_passed_over() -> None:
    pool = PagePool(8, 2)
    scheduler = Scheduler(pool, Limits())
    scheduler.add(request("gone", [1, 2, 3, 4], 3))
    chunks = scheduler.schedule()
    scheduler.abort("gone")
    scheduler.complete(chunks)
    assert (pool.available, pool.cached, scheduler.has_work) == (8, 0, False)


def test_abort_is_idempotent_and_unknown_ids_are_ignored() -> None:
    bench = Bench(8, 2)
    bench.add("a", [1, 2, 4], 5)
    bench.step()
    for name in ("a", "a", "never heard of"):
        bench.engine.abort(name)
    bench.add("a", [1, 2, 4], 5)
    bench.finish()
    assert bench.results == {"a": solo([1, 2, 4], 5)}
    bench.assert_empty()


def test_shared_prompts_are_computed_once_and_forgotten_when_room_is_needed() -> None:
    bench = Bench(pages=8, page_size=4, max_running_requests=2)
    voice = [3] * 16
    bench.add("first", [*voice, 1], 2)
    bench.finish()
    rows = bench.runner.rows
    bench.add("second", [*voice, 2], 2)
    bench.finish()
    assert bench.runner.rows - rows <= 2
    assert bench.engine.stats()["reused_tokens"] == 16
    bench.add("fills the pool", [7] * 30, 3)
    bench.finish()
    bench.add("third", [*voice, 2], 2)
    bench.finish()
    assert bench.engine.stats()["reused_tokens"] == 16
    assert bench.results["third"] == bench.results["second"] == solo([*voice, 2], 2)


def test_a_request_larger_than_the_pool_is_refused_at_once_and_alone() -> None:
    bench = Bench(pages=4, page_size=4)
    bench.add("fits exactly", [1] * 10, 7)
    with pytest.raises(InvalidRequest, match="need up to 17 positions; the KV pool has 16") as refused:
        bench.add("too large", [1] * 10, 8)
    assert refused.value.param == "max_new_tokens"
    with pytest.raises(InvalidRequest, match="makes a prompt of 17 positions; the KV pool has 16") as refused:
        bench.add("too long by its prompt alone", [1] * 17, 1)
    assert refused.value.param is None
    bench.finish()
    assert bench.results == {"fits exactly": solo([1] * 10, 7)}
    bench.assert_empty()


def test_a_request_longer_than_the_model_can_attend_over_is_refused() -> None:
    bench = Bench(pages=100, page_size=1, max_positions=20)
    bench.add("fits", [1] * 10, 11)
    with pytest.raises(InvalidRequest, match="need up to 21 positions; the model has 20") as refused:
        bench.add("too long", [1] * 10, 12)
    assert refused.value.param == "max_new_tokens"
    with pytest.raises(InvalidRequest, match="makes a prompt of 21 positions; the model has 20") as refused:
        bench.add("too long by its prompt alone", [1] * 21, 2)
    assert refused.value.param is None


class Recited(TokenTask):
    """Prompts that are parted by a 12 are one request's sequences, one after another."""

    def parse(self, request_id: str, payload: Payload) -> Request:
        ids = payload["prompt_ids"]
        cuts = [-1, *(i for i, token in enumerate(ids) if token == 12), len(ids)]
        first, *rest = [
            super(Recited, self).parse(request_id, {**payload, "prompt_ids": ids[a + 1 : b]}) for a, b in pairwise(cuts)
        ]
        first.followers.extend(Segment(one.prompt, one.max_outputs) for one in rest)
        first.task = first.task, []
        return first

    def take(self, request: Request, row: list[int]) -> bool:
        request.outputs.append(row)
        request.task[1].append(row[0])
        return row[0] == STOP or request.is_at_limit

    def chunk(self, request: Request) -> None:
        return None

    def result(self, request: Request) -> Payload:
        return {"token_ids": request.task[1]}


@settings(max_examples=60, deadline=None)
@example(requests=[[[0]], [[0]], [[0], [0]], [[0]]], most=7, page_size=1, chunk=1, ahead=4)  # retracted, one row a step
@given(
    requests=st.lists(
        st.lists(st.lists(st.integers(0, 11), min_size=1, max_size=12), min_size=1, max_size=4), max_size=8
    ),
    most=st.integers(1, 9),
    page_size=st.sampled_from([1, 3, 32]),
    chunk=st.integers(1, 12),
    ahead=st.sampled_from([0, 4]),
)
def test_sequences_of_a_request_follow_one_another_each_from_an_empty_context(
    requests: list[list[list[int]]], most: int, page_size: int, chunk: int, ahead: int
) -> None:
    bench = Bench(-(-20 // page_size) + 3, page_size, prefill_tokens=chunk, rows_ahead=ahead)
    task = Recited(InputSpec(vocab_sizes=(VOCABULARY,), hidden_size=1), eos_ids=[STOP])
    limits = Limits(prefill_tokens=chunk, rows_ahead=ahead)
    bench.engine = AutoregressiveEngine(task, bench.runner, bench.pool, limits)
    for i, pieces in enumerate(requests):
        bench.add(str(i), [token for piece in pieces for token in [12, *piece]][1:], most)
    bench.finish()
    for i, pieces in enumerate(requests):
        assert bench.results[str(i)] == [token for piece in pieces for token in solo(piece, most)]
    bench.assert_empty()


def test_a_request_that_is_retracted_with_its_last_output_on_its_way_follows_when_it_is_admitted() -> None:
    pool = PagePool(4, 1)
    scheduler = Scheduler(pool, Limits(max_running_requests=2, rows_ahead=1))
    second = Segment(Prompt(torch.tensor([[2], [3]])), 1)
    old, young = (Request(name, Prompt(torch.tensor([[1]])), max_outputs=4) for name in ("old", "young"))
    young.followers.append(second)
    for request in (old, young):
        scheduler.add(request)
    scheduler.complete(scheduler.schedule())
    while young.pages:  # each row takes a page, and no output is read yet
        scheduler.complete(scheduler.schedule())
    assert young.awaits_output
    young.outputs = OutputRows([[5]] * young.launched)
    scheduler.follow(young)
    assert (young.prompt, young.pages, list(scheduler.waiting)) == (second.prompt, [], [young])
    scheduler.remove(old)
    assert [(chunk.request, chunk.length) for chunk in scheduler.schedule()] == [(young, 2)]
    scheduler.remove(young)
    assert pool.available == pool.num_pages


def test_limits_must_let_something_run() -> None:
    with pytest.raises(StartupError):
        Limits(prefill_tokens=0)
    with pytest.raises(StartupError):
        Limits(max_running_requests=0)


def test_steps_that_change_nothing_are_repeated_without_a_look_at_the_pool() -> None:
    bench = Bench(pages=40, page_size=2, rows_ahead=8)
    expected = solo([3, 1, 4], 12)
    bench.add("a", [3, 1, 4], 12)
    bench.finish()
    assert bench.results["a"] == expected
    assert isinstance(bench.runner, AheadStandIn)
    assert bench.runner.repeats >= len(expected) - 4


def test_pages_far_ahead_are_half_of_those_that_hold_nothing() -> None:
    pool = PagePool(40, 2)
    scheduler = Scheduler(pool, Limits(rows_ahead=4, free_rows_ahead=100))
    known = Request("known", Prompt(torch.arange(20)[:, None]), max_outputs=1)
    scheduler.add(known)
    scheduler.complete(scheduler.schedule())
    scheduler.remove(known)
    assert (pool.used, pool.cached) == (0, 10)
    requests = [Request(str(i), Prompt(torch.tensor([[30 + i]])), max_outputs=60) for i in range(2)]
    for request in requests:
        scheduler.add(request)
    scheduler.schedule()
    assert [len(request.pages) for request in requests] == [8, 8], "1 row and 14 of 28 pages for both"
    assert pool.cached == 10
    assert (pool.used, scheduler.pages_needed) == (16, 2), "gauges do not count what lies ahead"
    scheduler.remove(requests[1])
    scheduler.add(short := Request("short", Prompt(torch.tensor([[40]])), max_outputs=6))
    scheduler.schedule()
    assert len(short.pages) == 3, "no more than it can need, though more is free"


@pytest.mark.parametrize("ahead", [0, 8])
def test_the_most_pages_that_were_needed_at_once_are_known_whenever_somebody_looks(ahead: int) -> None:
    bench = Bench(pages=60, page_size=2, rows_ahead=ahead, free_rows_ahead=50)
    prompts = {"a": [3, 1, 4], "b": [1, 5]}
    for name, prompt in prompts.items():
        bench.engine.add(name, {"prompt_ids": prompt, "max_new_tokens": 13, "ignore_eos": True})
    while bench.engine.has_work:
        bench.engine.step()
    stats = bench.engine.stats()
    most = 2 * sum(-(-(len(prompt) + 12) // 2) for prompt in prompts.values())
    assert (stats["kv_used_tokens"], stats["kv_peak_tokens"]) == (0, most)
    bench.engine.add("long", {"prompt_ids": [7], "max_new_tokens": 100, "ignore_eos": True})
    for _ in range(60):
        bench.engine.step()
    assert 60 <= bench.engine.stats()["kv_used_tokens"] <= 64, "also in the midst of steps that repeat one another"
    bench.engine.abort("long")
    stats = bench.engine.stats()
    assert stats["kv_used_tokens"] == 0 and 60 <= stats["kv_peak_tokens"] <= 64
