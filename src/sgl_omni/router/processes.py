"""Runs a router as one process, or as several that share a port."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Sequence

from sgl_omni.errors import StartupError
from sgl_omni.router.app import BACKLOG, Router, RouterOptions
from sgl_omni.router.workers import Address

log = logging.getLogger("sgl_omni.router")

PR_SET_PDEATHSIG = 1


def bind(host: str, port: int, *, shared: bool) -> socket.socket:
    """A listening socket, or with ``shared`` one that is only bound: processes that listen beside it share its port.

    Raises ``StartupError`` where the address cannot be had, which includes a port that is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise StartupError(f"cannot listen on host {host!r}: {error.strerror or error}; check --host") from error
    sock = socket.socket(family, kind, protocol)
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
            sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise StartupError(f"cannot listen on {host}:{port}: {reason}; choose another --port") from error
    sock.setblocking(False)
    return sock


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def run_one(
    options: RouterOptions,
    addresses: Sequence[Address],
    sock: socket.socket,
    drain_seconds: float,
    control: str | None = None,
    siblings: Sequence[str] = (),
) -> int:
    """One process, until a signal; a second one cuts what still runs."""
    stopping, killing = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: (killing if stopping.is_set() else stopping).set())
    router = Router(options, siblings)
    await router.start(sock, control)
    for address in addresses:
        router.add_worker(address)
    log.info("ready: router on %s", url_of(sock))
    await stopping.wait()
    log.info("shutting down; requests in flight get %g s", drain_seconds)
    draining = asyncio.ensure_future(router.drain(drain_seconds))
    killed = asyncio.ensure_future(killing.wait())
    await asyncio.wait([draining, killed], return_when=asyncio.FIRST_COMPLETED)
    killed.cancel()
    if not draining.done():
        draining.cancel()
        router.dispatcher.cut_all()
        await router.stop()
    return 0


def run_several(
    count: int, options: RouterOptions, addresses: Sequence[Address], host: str, port: int, drain_seconds: float
) -> int:
    """``count`` processes on one port, of which each knows the others by unix sockets in a private folder.

    Signals are passed on. A process that ends by itself ends all, with status 1: the others would answer for its
    share of connections no more than it does.
    """
    bound = bind(host, port, shared=True)
    folder = tempfile.mkdtemp(prefix="sgl-omni-router-")
    sockets = [os.path.join(folder, f"{i}.sock") for i in range(count)]
    children: dict[int, int] = {}
    try:
        for i in range(count):
            children[_fork(i, sockets, options, addresses, bound, drain_seconds)] = i
        return _watch(children)
    finally:
        bound.close()
        shutil.rmtree(folder, ignore_errors=True)


def _fork(
    index: int,
    sockets: Sequence[str],
    options: RouterOptions,
    addresses: Sequence[Address],
    bound: socket.socket,
    drain_seconds: float,
) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setpgid(0, 0)  # Ctrl-C is the parent's to pass on, once
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            import uvloop

            own = socket.socket(bound.family, bound.type, bound.proto)
            own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            own.bind(bound.getsockname())
            own.setblocking(False)
            siblings = [path for i, path in enumerate(sockets) if i != index]
            status = uvloop.run(run_one(options, addresses, own, drain_seconds, sockets[index], siblings))
    finally:
        logging.shutdown()
        os._exit(status)  # never back into the parent's code


def _watch(children: dict[int, int]) -> int:
    """Until all have ended; 0 when a signal asked for it and each ended well."""
    asked = False

    def pass_on(number: int, _: object) -> None:
        nonlocal asked
        asked = True
        for pid in children:
            os.kill(pid, number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    failed = False
    while children:
        pid, status = os.wait()
        index = children.pop(pid, None)
        if index is None:
            continue
        code = os.waitstatus_to_exitcode(status)
        if asked and code in (0, -signal.SIGTERM, -signal.SIGINT):  # the latter two: it had not begun yet
            continue
        failed = True
        log.error("router process %d ended with status %d; the router stops", index, code)
        for other in children:
            os.kill(other, signal.SIGTERM)
        asked = True
    return 1 if failed else 0
