"""A response made by the pipeline: ends with it, and the pipeline's work ends with the client."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextvars import ContextVar
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sgl_omni.errors import InvalidRequest, OmniError, RequestAborted
from sgl_omni.server.errors import describe
from sgl_omni.server.metrics import Measurement

logger = logging.getLogger(__name__)

LastWords = Callable[[OmniError], bytes]

broken_off: ContextVar[bool] = ContextVar("broken_off", default=False)
"""Whether the response of this task was ended without its proper end, on purpose and with a line in the log."""


class Work(Protocol):
    """What a response stands for: a ``RequestHandle``, or several at once."""

    @property
    def id(self) -> str: ...

    def abort(self, reason: str) -> None: ...


class PipelineResponse(Response):
    """Sends what ``body`` yields, and aborts ``handle`` as soon as the client is gone.

    Headers leave with the first piece of the body, so an error before it gets its own status. A later error
    ends the connection without the body's proper end, so that the client knows it is incomplete; where the
    format has words for an error (``last_words``), they are sent and the body ends properly.
    """

    def __init__(
        self,
        handle: Work,
        body: AsyncIterator[bytes],
        measured: Measurement,
        media_type: str,
        headers: Mapping[str, str],
        *,
        about: str | None = None,
        whole: bool = False,
        last_words: LastWords | None = None,
    ) -> None:
        """``about``: the field of the request that a refusal is of which names none."""
        self.status_code = 200
        self.media_type = media_type
        self.background = None
        self.init_headers(headers)
        del self.headers["content-length"]
        self._handle = handle
        self._body = body
        self._measured = measured
        self._about = about
        self._whole = whole
        self._last_words = last_words
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with abort_on_disconnect(self._handle, receive) as disconnected:
            try:
                await self._send_body(send)
            except BaseException as error:
                self._handle.abort("the response failed")
                self._measured.fail(RequestAborted("client gone") if disconnected.is_set() else error)
                if disconnected.is_set() and isinstance(error, OmniError):
                    return
                if not self._started or not isinstance(error, OmniError):
                    raise
                await self._break_off(error, send)
            else:
                self._measured.end("aborted" if disconnected.is_set() else "ok")

    async def _send_body(self, send: Send) -> None:
        async for piece in self._pieces():
            if self._whole:
                self.headers["Content-Length"] = str(len(piece))
            await self._send(send, piece)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pieces(self) -> AsyncIterator[bytes]:
        try:
            async for piece in self._body:
                yield piece
        except InvalidRequest as error:
            if error.param is not None or self._about is None:
                raise
            raise type(error)(str(error), self._about) from error

    async def _send(self, send: Send, piece: bytes) -> None:
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if piece:
            await send({"type": "http.response.body", "body": piece, "more_body": True})

    async def _break_off(self, error: OmniError, send: Send) -> None:
        """Without last words: to return without the last body message makes the server close the connection."""
        logger.warning("request %s broke off: %s: %s", self._handle.id, type(error).__name__, describe(error))
        if self._last_words:
            await send({"type": "http.response.body", "body": self._last_words(error), "more_body": False})
        else:
            broken_off.set(True)


@contextlib.asynccontextmanager
async def abort_on_disconnect(handle: Work, receive: Receive) -> AsyncIterator[asyncio.Event]:
    """Watches the connection. Its event is set, and the request aborted, once the client has gone."""
    disconnected = asyncio.Event()

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            continue
        disconnected.set()
        handle.abort("client disconnected")

    watching = asyncio.create_task(watch(), name=f"disconnect of {handle.id}")
    try:
        yield disconnected
    finally:
        watching.cancel()
