"""Which worker gets a request. Pure: the router and the simulator of the routing study call the same code.

| policy | takes |
| --- | --- |
| ``round_robin`` | each in turn |
| ``random`` | any |
| ``least_inflight`` | the one with the fewest requests of this router, ties in turn |
| ``fill_first`` | the first with fewer than ``capacity`` requests; where all are full, the one with the fewest |
| ``power_of_two`` | of two drawn at random, the one with fewer requests |
| ``least_work`` | the one with the least text to speak, with what the workers report of queues and KV cache |
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from sgl_omni.router.load import Load

SCARCE_KV = 0.1
"""Share of the KV cache below which an engine is about to retract requests, whose work is then done again."""

MEAN_WEIGHT = 0.02
"""Weight of the newest request in the running mean of estimates."""


class Candidate(Protocol):
    """What a policy may know of a worker."""

    @property
    def in_flight(self) -> int:
        """Requests of this router that it has not finished."""
        ...

    @property
    def work(self) -> float:
        """The sum of their estimates."""
        ...

    @property
    def load(self) -> Load | None:
        """What it said last of itself, None where it says nothing."""
        ...


C = TypeVar("C", bound=Candidate)


class Policy(Protocol):
    """``choose`` is never given an empty list. ``estimate`` is the new request's, in characters."""

    reads_load: bool
    """Whether ``Candidate.load`` is looked at, so that it has to be kept fresh."""
    reads_length: bool
    """Whether ``estimate`` and ``Candidate.work`` are looked at."""

    def choose(self, workers: Sequence[C], estimate: float) -> C: ...


class RoundRobin:
    reads_load = reads_length = False

    def __init__(self) -> None:
        self._turn = -1

    def choose(self, workers: Sequence[C], estimate: float) -> C:
        self._turn = (self._turn + 1) % len(workers)
        return workers[self._turn]


class Random:
    reads_load = reads_length = False

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw

    def choose(self, workers: Sequence[C], estimate: float) -> C:
        return self._draw.choice(workers)


class LeastInFlight:
    reads_load = reads_length = False

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, workers: Sequence[C], estimate: float) -> C:
        self._turn += 1
        return _least(workers, self._turn, lambda worker: worker.in_flight)


class FillFirst:
    reads_load = reads_length = False

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity

    def choose(self, workers: Sequence[C], estimate: float) -> C:
        for worker in workers:
            if worker.in_flight < self._capacity:
                return worker
        return min(workers, key=lambda worker: worker.in_flight)


class PowerOfTwo:
    reads_load = reads_length = False

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw

    def choose(self, workers: Sequence[C], estimate: float) -> C:
        if len(workers) == 1:
            return workers[0]
        one, other = self._draw.sample(workers, 2)
        return other if other.in_flight < one.in_flight else one


class LeastWork:
    """Requests of others (another router, a direct client) count as one of mean length each."""

    reads_load = reads_length = True

    def __init__(self) -> None:
        self._turn = 0
        self._mean = 0.0

    def choose(self, workers: Sequence[C], estimate: float) -> C:
        self._turn += 1
        self._mean += (estimate - self._mean) * (MEAN_WEIGHT if self._mean else 1.0)
        return _least(workers, self._turn, self._backlog)

    def _backlog(self, worker: Candidate) -> float:
        load = worker.load
        if load is None:
            return worker.work
        backlog = worker.work + load.others * self._mean
        if load.kv_free is not None and load.kv_free < SCARCE_KV:
            # Up to twice the work: what is retracted starts again.
            backlog = (backlog + self._mean) * (2.0 - max(0.0, load.kv_free) / SCARCE_KV)
        return backlog


def _least(workers: Sequence[C], turn: int, key: Callable[[C], float]) -> C:
    """The least by ``key``; among equals another each turn, or the first would get all of an idle pool's requests."""
    start = turn % len(workers)
    best = workers[start]
    least = key(best)
    for i in range(start + 1, start + len(workers)):
        worker = workers[i % len(workers)]
        value = key(worker)
        if value < least:
            best, least = worker, value
    return best


POLICIES = ("round_robin", "random", "least_inflight", "fill_first", "power_of_two", "least_work")


def make_policy(name: str, *, capacity: int = 64, seed: int | None = None) -> Policy:
    """``capacity`` is for ``fill_first``; ``seed`` for those that draw, None for another order each time."""
    makers: dict[str, Callable[[], Policy]] = {
        "round_robin": RoundRobin,
        "random": lambda: Random(random.Random(seed)),
        "least_inflight": LeastInFlight,
        "fill_first": lambda: FillFirst(capacity),
        "power_of_two": lambda: PowerOfTwo(random.Random(seed)),
        "least_work": LeastWork,
    }
    return makers[name]()
