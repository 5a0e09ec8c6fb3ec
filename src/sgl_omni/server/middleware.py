"""Pure ASGI wrappers: a request id on every response, and a bound on what a body may hold."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
    """Refuses a body of more than ``max_bytes`` with 413, by its declared length or as soon as it grows past it."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        too_large = declared.isdecimal() and int(declared) > self.max_bytes
        received = 0

        async def bounded_receive() -> Message:
            nonlocal received
            if too_large:
                raise self._refusal()
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.max_bytes:
                raise self._refusal()
            return message

        await self.app(scope, bounded_receive, send)

    def _refusal(self) -> HTTPException:
        return HTTPException(413, f"the request body is larger than the limit of {self.max_bytes} bytes")
