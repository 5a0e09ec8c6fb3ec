"""Whether a worker may be given requests: a state machine without clocks or sockets.

| state | means | left when |
| --- | --- | --- |
| ``starting`` | registered, never heard of | the first good probe: ``up`` |
| ``up`` | takes requests | a refused connection at once, or ``failures`` failures in a row: ``down`` |
| ``down`` | takes none | ``successes`` good probes in a row: ``half_open`` |
| ``half_open`` | takes one request at a time, as a trial | an answer: ``up``; any failure: ``down`` |

An answer of whatever status, 5xx included, is a sign of life: what a worker says of one request says nothing of the
next.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    STARTING = "starting"
    UP = "up"
    DOWN = "down"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class Thresholds:
    """``failures`` in a row take a worker out, ``successes`` in a row bring it to its trial."""

    failures: int = 3
    successes: int = 2


class Health:
    """One worker's state. ``reason`` says why it is not up."""

    __slots__ = ("_failures", "_on_trial", "_successes", "_thresholds", "reason", "state")

    def __init__(self, thresholds: Thresholds) -> None:
        self.state = State.STARTING
        self.reason = "no answer yet"
        self._thresholds = thresholds
        self._failures = 0
        self._successes = 0
        self._on_trial = False

    @property
    def takes_requests(self) -> bool:
        return self.state is State.UP or (self.state is State.HALF_OPEN and not self._on_trial)

    def given_request(self) -> None:
        """A half-open worker gets its trial."""
        self._on_trial = self.state is State.HALF_OPEN

    def request_over(self) -> None:
        """A request ended, well or not; one that its client gave up decides nothing and frees the trial."""
        self._on_trial = False

    def answered(self) -> None:
        """A request got an answer, of whatever status."""
        if self.state is State.DOWN:
            return  # the answer to a request from before; probes decide
        self._failures = 0
        if self.state is not State.UP:
            self._enter(State.UP, "")

    def probe_succeeded(self) -> None:
        self._failures = 0
        if self.state is State.STARTING:
            self._enter(State.UP, "")
        elif self.state is State.DOWN:
            self._successes += 1
            if self._successes >= self._thresholds.successes:
                self._enter(State.HALF_OPEN, "waiting for a request to answer")

    def failed(self, reason: str) -> None:
        """A probe failed, a connection took too long or broke before its answer was complete."""
        self._failures += 1
        self._successes = 0
        if self.state is State.STARTING or self.state is State.DOWN:
            self.reason = reason
        elif self.state is State.HALF_OPEN or self._failures >= self._thresholds.failures:
            self._enter(State.DOWN, reason)

    def refused(self, reason: str) -> None:
        """Nobody listens there, which needs no second opinion."""
        self._failures += 1
        self._successes = 0
        if self.state is State.STARTING:
            self.reason = reason
        else:
            self._enter(State.DOWN, reason)

    def _enter(self, state: State, reason: str) -> None:
        self.state = state
        self.reason = reason
        self._failures = 0
        self._successes = 0
        self._on_trial = False
