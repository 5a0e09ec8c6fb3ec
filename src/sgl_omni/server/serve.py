"""Serves an ASGI application inside an event loop that someone else runs, with signals that someone else owns."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from sgl_omni.listening import BACKLOG, url_of
from sgl_omni.server.connection import HttpConnection
from sgl_omni.server.streaming import broken_off

# Longer than the 60 s for which common proxies keep an idle connection, so that they close it first.
KEEP_ALIVE_SECONDS = 75


class HttpServer:
    """Serves on a socket from ``bind``. ``run`` it as a task and end it by ``stop`` or ``kill``, not by cancelling."""

    def __init__(self, app: ASGIApp, sock: socket.socket, *, grace: float = 5.0) -> None:
        """``grace``: seconds that responses in progress get after ``stop`` before they are cancelled."""
        self._socket = sock
        self.host, self.port = sock.getsockname()[:2]
        self.url = url_of(sock)
        config = uvicorn.Config(
            app,
            http=HttpConnection,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=grace,  # type: ignore[arg-type]
            backlog=BACKLOG,
        )
        logging.getLogger("uvicorn.error").addFilter(_said_already)
        self._server = _SignallessServer(config)

    async def run(self) -> None:
        """Answers until ``stop``, then until the responses in progress are out or their grace is over."""
        await self._server.serve(sockets=[self._socket])

    def stop(self) -> None:
        self._server.should_exit = True

    def kill(self) -> None:
        """As ``stop``, without any grace."""
        self._server.should_exit = True
        self._server.force_exit = True


def _said_already(record: logging.LogRecord) -> bool:
    """All but uvicorn's error for a response that was broken off, which our own warning tells, with the reason.

    uvicorn has no way to end a chunked body improperly that it does not log as an error: an application may raise,
    which it logs with a traceback, or return early, which it logs as this. It does so in the response's own task.
    """
    return not (broken_off.get() and record.msg == "ASGI callable returned without completing response.")


class _SignallessServer(uvicorn.Server):
    """The supervisor handles the signals; this one must not replace its handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
