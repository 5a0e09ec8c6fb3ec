"""What the HTTP server needs of the runtime behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from typing import Any, Protocol

Payload = dict[str, Any]


class Chunk(Protocol):
    """One streamed chunk of a terminal stage."""

    @property
    def stage(self) -> str: ...

    @property
    def payload(self) -> Payload: ...


class RequestHandle(Protocol):
    """One request in progress. Iterate it for its stream, then ask for its result."""

    @property
    def id(self) -> str: ...

    def __aiter__(self) -> AsyncIterator[Chunk]:
        """Ends when the request is complete; raises the request's error, ``RequestAborted`` after ``abort``."""
        ...

    async def result(self) -> dict[str, Payload]:
        """Payload of each terminal stage by its name; raises as iteration does. May be asked again."""
        ...

    def abort(self, reason: str) -> None:
        """Frees the request everywhere. Returns at once; repeating it, or a complete request, changes nothing.

        A waiting iteration or ``result`` raises ``RequestAborted`` without waiting for any stage.
        """
        ...


class Backend(Protocol):
    """The running pipeline."""

    def submit(
        self,
        payload: Payload,
        *,
        outputs: Collection[str] | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
    ) -> RequestHandle:
        """Admits a request. Raises ``Overloaded`` at once when full.

        ``request_id`` is what the caller calls it, made unique by a suffix; ``timeout`` is in seconds, and
        None the pipeline's own limit.
        """
        ...

    def health(self) -> dict[str, Any]:
        """``{"status": "starting" | "ready" | "draining" | "degraded" | "failed", "model": str,
        "instances": [{"name", "process", "stages", "replica", "state", "pid", "in_flight", "device",
        "restarts", ...}]}``."""
        ...

    async def refresh(self) -> None:
        """Asks the instances for their gauges, so that ``stats`` tells how things are now; takes a second at most."""
        ...

    def stats(self) -> dict[str, Any]:
        """``{"requests_total": {"ok", "error", "aborted", "rejected"}, "in_flight", "late_messages",
        "instances": {name: {"in_flight", "up", "restarts", **gauges of its engine}}}``, all numbers."""
        ...
