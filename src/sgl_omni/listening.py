"""The TCP sockets that servers and routers listen on."""

from __future__ import annotations

import os
import socket

from sgl_omni.errors import StartupError

BACKLOG = 2048


def bind(host: str, port: int, *, backlog: int = BACKLOG, shared: bool = False) -> socket.socket:
    """A listening socket, or with ``shared`` one that is only bound: processes that listen beside it share its port.

    Port 0 takes a free one. Raises ``StartupError`` where the address cannot be had, as with a port that is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartupError(f"cannot listen on host {host!r}: {error.strerror or error}; check --host") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            with socket.socket(family, kind, protocol) as alone:  # fails where another router shares the port already
                alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                alone.bind(address)
                alone.listen()
                address = (address[0], alone.getsockname()[1], *address[2:])
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
        if not shared:
            # Listening already here makes a second server on this port fail now instead of at its first request.
            sock.listen(backlog)
    except OSError as error:
        sock.close()
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise StartupError(f"cannot listen on {host}:{port}: {reason}; choose another --port") from error
    sock.setblocking(False)
    return sock


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
