"""Serves an ASGI application inside an event loop that someone else runs, with signals that someone else owns."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from sgl_omni.errors import StartupError

# Longer than the 60 s for which common proxies keep an idle connection, so that they close it first.
KEEP_ALIVE_SECONDS = 75
BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket; port 0 takes a free one. Raises ``StartupError`` where it cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartupError(f"cannot listen on host {host!r}: {error.strerror or error}; check --host") from error
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        # Listening already here makes a second server on this port fail now instead of at its first request.
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise StartupError(f"cannot listen on {host}:{port}: {reason}; choose another --port") from error
    sock.setblocking(False)
    return sock


class HttpServer:
    """Serves on a socket from ``bind``. ``run`` it as a task and end it by ``stop`` or ``kill``, not by cancelling."""

    def __init__(self, app: ASGIApp, sock: socket.socket, *, grace: float = 5.0) -> None:
        """``grace``: seconds that responses in progress get after ``stop`` before they are cancelled."""
        self._socket = sock
        self.host, self.port = sock.getsockname()[:2]
        config = uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=grace,  # type: ignore[arg-type]
            backlog=BACKLOG,
        )
        self._server = _SignallessServer(config)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    async def run(self) -> None:
        """Answers until ``stop``, then until the responses in progress are out or their grace is over."""
        await self._server.serve(sockets=[self._socket])

    def stop(self) -> None:
        self._server.should_exit = True

    def kill(self) -> None:
        """As ``stop``, without any grace."""
        self._server.should_exit = True
        self._server.force_exit = True


class _SignallessServer(uvicorn.Server):
    """The supervisor handles the signals; this one must not replace its handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
