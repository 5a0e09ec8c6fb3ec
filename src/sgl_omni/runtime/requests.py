"""One request inside one stage of one process: its inputs so far, its stream windows, its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from sgl_omni.errors import RequestAborted
from sgl_omni.runtime.messages import Header
from sgl_omni.runtime.stage import Payload

if TYPE_CHECKING:
    from sgl_omni.runtime.channel import Channel

STREAM_WINDOW = 32
"""Chunks that a sender may be ahead of a receiver, for each request and edge."""

ACK_EVERY = 8
"""Consumed chunks that one acknowledgement covers."""


class Host(Protocol):
    """What a request needs of the process that holds it (the worker)."""

    def stream_targets(self, request: StageRequest) -> list[str]: ...
    def has_room(self, request: StageRequest, chunk: Payload, wake: Callable[[], None]) -> bool: ...
    def release_room(self, request: StageRequest) -> None: ...
    def send_chunk(self, request: StageRequest, target: str, chunk: Payload) -> None: ...
    def send_ack(self, request: StageRequest, source: str, count: int) -> None: ...
    def open_streams(self, request: StageRequest) -> set[str]: ...
    def expects_payload(self, request: StageRequest) -> bool: ...
    def finish(self, request: StageRequest, payload: Payload) -> None: ...
    def fail(self, request: StageRequest, error: Exception) -> None: ...
    def discard(self, request: StageRequest) -> None: ...


class StageRequest:
    """What a runner sees of a request; it is also the `Request` that an author's code is given."""

    __slots__ = (
        "_consumed",
        "_host",
        "_room",
        "_targets",
        "_unacknowledged",
        "aborted",
        "channels",
        "ended_streams",
        "header",
        "inputs",
        "stage",
    )

    def __init__(self, host: Host, header: Header, stage: str) -> None:
        self._host = host
        self.header = header
        self.stage = stage
        self.aborted = False
        self.inputs: dict[str, Payload] = {}
        self.ended_streams: set[str] = set()
        self.channels: dict[str, Channel] = {}
        self._targets: list[str] | None = None
        self._unacknowledged: dict[str, int] = {}
        self._consumed: dict[str, int] = {}
        self._room = asyncio.Event()

    @property
    def id(self) -> str:
        return self.header.request_id

    def __repr__(self) -> str:
        return f"StageRequest({self.id!r}, stage={self.stage!r})"

    # Sending a stream ---------------------------------------------------------------------------------------------

    async def emit(self, chunk: Payload) -> None:
        """See `Request.emit`. Raises `RequestAborted` when the request was aborted while waiting."""
        await self.wait_to_emit(chunk)
        self.emit_now(chunk)

    async def wait_to_emit(self, chunk: Payload) -> None:
        """Returns when every receiver has room for this chunk."""
        while not self.can_emit(chunk):
            self._room.clear()
            await self._room.wait()

    def can_emit(self, chunk: Payload) -> bool:
        if self.aborted:
            return True
        near = all(count < STREAM_WINDOW for count in self._unacknowledged.values())
        return near and self._host.has_room(self, chunk, self._room.set)

    def emit_now(self, chunk: Payload) -> None:
        """Sends without looking at what room there is."""
        if self.aborted:
            raise RequestAborted(f"request {self.id} was aborted", stage=self.stage)
        if self._targets is None:
            self._targets = self._host.stream_targets(self)
        try:
            for target in self._targets:
                self._unacknowledged[target] = self._unacknowledged.get(target, 0) + 1
                self._host.send_chunk(self, target, chunk)
        finally:
            self._host.release_room(self)

    def acknowledged(self, target: str, count: int) -> None:
        """The receiver consumed `count` chunks."""
        self._unacknowledged[target] = self._unacknowledged.get(target, 0) - count
        self._room.set()

    # Receiving a stream -------------------------------------------------------------------------------------------

    def acknowledge(self, source: str) -> None:
        """One chunk of `source` was consumed."""
        count = self._consumed.get(source, 0) + 1
        if count == ACK_EVERY:
            self._host.send_ack(self, source, count)
            count = 0
        self._consumed[source] = count

    def open_streams(self) -> set[str]:
        """The sources whose streams have not ended yet."""
        return self._host.open_streams(self)

    def expects_payload(self) -> bool:
        """Whether a payload comes besides the streams."""
        return self._host.expects_payload(self)

    # The end ------------------------------------------------------------------------------------------------------

    def finish(self, payload: Payload) -> None:
        """The stage's payload is ready: hands it on and forgets the request."""
        self._host.finish(self, payload)

    def fail(self, error: Exception) -> None:
        """The stage failed for this request: reports it and forgets the request."""
        self._host.fail(self, error)

    def discard(self) -> None:
        """An aborted request's work has ended: forgets it."""
        self._host.discard(self)

    def mark_aborted(self) -> None:
        """Makes `aborted` true and releases whoever waits to emit."""
        self.aborted = True
        self.inputs.clear()
        self.channels.clear()
        self._host.release_room(self)
        self._room.set()
