"""Pure ASGI wrappers: a request id on every response, and a bound on what a body may hold."""

from __future__ import annotations

import asyncio
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

DRAIN_BYTES = 256 << 20
DRAIN_SECONDS = 10.0
SILENT_SECONDS = 30.0
"""How long a client may pause within its body."""
SANE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class RequestIds:
    """Puts ``X-Request-Id`` on every response: the caller's where it is sane, else a new one.

    Routes find it as ``request.state.request_id``.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if SANE_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        await self.app(scope, receive, send_with_id)


class BodyLimit:
    """Refuses a body of more than ``max_bytes`` with 413, and one that pauses for ``SILENT_SECONDS`` with 408; ends
    connections whose body never does.

    What a client still sends is read and dropped before an early answer, because closing on a client that sends would
    cost it the answer; but only so much of it, and for so long. Where the client has said that it sends too much, the
    answer leaves first, and then the connection ends.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body = _Body(Headers(scope=scope), receive)

        async def bounded_receive() -> Message:
            if body.declared > self.max_bytes:
                raise self._refusal()
            message = await body.receive()
            if body.received > self.max_bytes:
                raise self._refusal()
            return message

        async def send_after_body(message: Message) -> None:
            if body.declared > self.max_bytes:
                await self._send_before_body(message, body, send)
                return
            if message["type"] == "http.response.start" and not await body.drained():
                MutableHeaders(scope=message)["Connection"] = "close"
            await send(message)

        await self.app(scope, bounded_receive, send_after_body)

    async def _send_before_body(self, message: Message, body: _Body, send: Send) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)["Connection"] = "close"
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            await send({**message, "more_body": True})
            await body.drained()
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await send(message)

    def _refusal(self) -> HTTPException:
        return HTTPException(413, f"the request body is larger than the limit of {self.max_bytes} bytes")


class _Body:
    """How much of a request's body has come."""

    def __init__(self, headers: Headers, receive: Receive) -> None:
        declared = headers.get("content-length", "0")
        self.declared = int(declared) if declared.isdecimal() else 0
        self.received = 0
        self._receive = receive
        self._stalled = False
        self._complete = self.declared == 0 and "transfer-encoding" not in headers
        self._announced = "expect" in headers  # the client waits for a word before it sends: refuse without one

    async def receive(self) -> Message:
        if self._complete:  # what comes now is the connection's end, whenever that is
            return await self._receive()
        try:
            async with asyncio.timeout(SILENT_SECONDS):
                message = await self._receive()
        except TimeoutError:
            self._stalled = True
            raise HTTPException(408, f"the request body paused for {SILENT_SECONDS:g} s") from None
        self.received += len(message.get("body", b""))
        self._complete = self._complete or not message.get("more_body", False)
        return message

    async def drained(self) -> bool:
        """Whether all of it has come, after reading on for a while; the rest is dropped."""
        if self._stalled or (not self._complete and self._announced and not self.received):
            return False
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                while not self._complete and self.received < DRAIN_BYTES:
                    await self.receive()
        except TimeoutError:
            return False
        return self._complete
