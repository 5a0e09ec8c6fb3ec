"""What an engine stage drives: requests in, one scheduling step at a time, outputs out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

Payload = dict[str, Any]


@dataclass(slots=True)
class EngineOutput:
    """What one step yields for one request.

    ``chunks`` go to the stage's ``stream_to`` targets in order. ``result`` ends the request with its
    payload; ``error`` ends it with a failure. At most one of the two is set.
    """

    request_id: str
    chunks: list[Payload] = field(default_factory=list[Payload])
    result: Payload | None = None
    error: Exception | None = None


class Engine(Protocol):
    """Owned and called by one thread, so it needs no locks.

    The stage calls ``step`` only while ``has_work`` is true and never polls.
    """

    @property
    def has_work(self) -> bool:
        """Whether ``step`` would make progress."""
        ...

    def add(self, request_id: str, payload: Payload) -> None:
        """Queues a request. Raises ``InvalidRequest`` for input that can never be served."""
        ...

    def abort(self, request_id: str) -> None:
        """Frees all state of a request; unknown ids are ignored (abort is idempotent)."""
        ...

    def step(self) -> Sequence[EngineOutput]:
        """Admits waiting requests, runs one batched step and returns what came of it."""
        ...

    def stats(self) -> dict[str, float]:
        """Gauges for /metrics: at least ``running`` and ``queued``."""
        ...


@runtime_checkable
class FedEngine(Engine, Protocol):
    """An engine whose requests' input may arrive over time: ``add`` then has ``input_open`` true in its payload.

    A request that waits for input is not scheduled; where all do, ``has_work`` is false.
    """

    def extend(self, request_id: str, payload: Payload) -> None:
        """More input of a request; unknown ids are ignored, as it may have ended.

        Raises ``InvalidRequest`` for what does not fit, or can never be served; the request is gone with that.
        """
        ...

    def finish_input(self, request_id: str) -> None:
        """No more input will come; otherwise as ``extend``."""
        ...
