"""Runs a router as one process, or as several that share a port."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
from collections.abc import Sequence

from sgl_omni.errors import StartupError
from sgl_omni.listening import bind, url_of
from sgl_omni.parent import die_with_parent
from sgl_omni.router.app import Router, RouterOptions
from sgl_omni.router.workers import Address, is_own
from sgl_omni.run_folder import LockedFolder, base_folder, dead_folders, locked, private_folder

log = logging.getLogger("sgl_omni.router")

PREFIX = "router-"


async def run_one(
    options: RouterOptions,
    addresses: Sequence[Address],
    sock: socket.socket,
    drain_seconds: float,
    control: str | None = None,
    siblings: Sequence[str] = (),
) -> int:
    """One process, until a signal; a second one cuts what still runs.

    Raises:
        StartupError: a worker's address is the router's own.
    """
    refuse_own(addresses, sock)
    stopping, killing = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: (killing if stopping.is_set() else stopping).set())
    router = Router(options, siblings)
    await router.start(sock, control)
    for address in addresses:
        router.add_worker(address)
    log.info("ready: router on %s", url_of(sock))
    if not addresses and not siblings:
        log.warning(NO_WORKERS)
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

    Raises:
        StartupError: the address cannot be had, or is also a worker's.
    """
    bound = bind(host, port, shared=True)
    refuse_own(addresses, bound)
    if not addresses:
        log.warning(NO_WORKERS)
    folder = new_folder()
    sockets = [str(folder.path / f"{i}.sock") for i in range(count)]
    children: dict[int, int] = {}
    try:
        for i in range(count):
            children[_fork(i, sockets, options, addresses, bound, drain_seconds)] = i
        return _watch(children)
    finally:
        bound.close()
        folder.close()


NO_WORKERS = "there is no worker yet; POST /workers adds one (--worker-urls and --worker-file name none)"


def refuse_own(addresses: Sequence[Address], sock: socket.socket) -> None:
    """Raises ``StartupError`` for a worker that is this router itself."""
    host, port = sock.getsockname()[:2]
    for address in addresses:
        if is_own(address, host, port):
            raise StartupError(f"worker {address.url} is this router's own address; name the servers behind it")


def new_folder() -> LockedFolder:
    """A private folder for the processes' sockets, after removing those of routers that were killed."""
    base = base_folder()
    private_folder(base)
    with locked(base):
        for folder in dead_folders(base, PREFIX):
            shutil.rmtree(folder, ignore_errors=True)
            log.info("removed what a dead router left in %s", folder)
        return LockedFolder(base, PREFIX)


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
        die_with_parent(parent)
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
