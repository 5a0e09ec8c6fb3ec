"""One router process: its parts, and its life from the first worker to the end of its drain."""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from sgl_omni.errors import InvalidRequest
from sgl_omni.router.admin import PATHS, Admin
from sgl_omni.router.dispatch import Dispatcher, Limits
from sgl_omni.router.exchange import Exchange
from sgl_omni.router.health import Thresholds
from sgl_omni.router.policy import make_policy
from sgl_omni.router.probe import Probe, Probing
from sgl_omni.router.proxy import ClientConnection
from sgl_omni.router.workers import Address, Worker, Workers, is_own

log = logging.getLogger("sgl_omni.router")

BACKLOG = 4096
SWEEP_SECONDS = 1.0
WORKER_IDLE_SECONDS = 3.0
"""Shorter than the 5 s after which common servers close a connection, so that they never do it under a request."""
CLIENT_IDLE_SECONDS = 75.0
"""Longer than the 60 s for which common proxies keep a connection, so that they close it first."""
DRAIN_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """What the command line decides. Times are in seconds."""

    policy: str = "least_inflight"
    capacity: int = 64
    seed: int | None = None
    limits: Limits = field(default_factory=Limits)
    thresholds: Thresholds = field(default_factory=Thresholds)
    probing: Probing = field(default_factory=Probing)
    worker_drain_seconds: float = 600.0


class Router:
    """Relays what comes in on its sockets to its workers. Made inside of a running event loop."""

    def __init__(self, options: RouterOptions, siblings: Sequence[str] = ()) -> None:
        self._options = options
        self._policy = make_policy(options.policy, capacity=options.capacity, seed=options.seed)
        self.workers = Workers(options.thresholds)
        self.dispatcher = Dispatcher(self.workers, self._policy, options.limits)
        self._admin = Admin(self, siblings)
        self._probes: dict[Worker, Probe] = {}
        self._drains: dict[Worker, asyncio.Task[None]] = {}
        self._clients: set[ClientConnection] = set()
        self._servers: list[asyncio.Server] = []
        self._sweeping: asyncio.Task[None] | None = None
        self._own: tuple[str, int] | None = None

    async def start(self, sock: socket.socket, control: str | None = None) -> None:
        """Answers on a bound socket and, for sibling processes, on the unix socket ``control``."""
        loop = asyncio.get_running_loop()
        self._sweeping = loop.create_task(self._sweep())
        if control is not None:
            local = functools.partial(ClientConnection, functools.partial(self._take, of_sibling=True), self._clients)
            self._servers.append(await loop.create_unix_server(local, control))
        host, port = sock.getsockname()[:2]
        self._own = (host, port)
        public = functools.partial(ClientConnection, self._take, self._clients)
        self._servers.append(await loop.create_server(public, sock=sock, backlog=BACKLOG))

    def _take(self, exchange: Exchange, *, of_sibling: bool = False) -> None:
        path = exchange.target.partition(b"?")[0]
        if path in PATHS:
            self._admin.answer(exchange, path, of_sibling=of_sibling)
        else:
            self.dispatcher.submit(exchange)

    def add_worker(self, address: Address) -> None:
        """Takes requests once its health has been seen; one that is draining is back at once.

        Raises:
            InvalidRequest: it is this router itself.
        """
        if self._own is not None and is_own(address, *self._own):
            raise InvalidRequest(f"worker {address.url} is this router's own address", "url")
        worker = self.workers.add(address)
        if drain := self._drains.pop(worker, None):
            drain.cancel()
        if worker not in self._probes:
            self._probes[worker] = Probe(worker, self._options.probing, reads_load=self._policy.reads_load)
            log.info("worker %s is registered", address.url)

    def drain_worker(self, address: Address) -> None:
        """No new requests; it is forgotten when its last has ended, or after ``worker_drain_seconds``."""
        worker = self.workers.get(address.url)
        if worker is None or worker.draining:
            return
        worker.drain()
        log.info("worker %s drains %d requests", address.url, worker.in_flight)
        self._drains[worker] = asyncio.ensure_future(self._drain_worker(worker))

    async def _drain_worker(self, worker: Worker) -> None:
        try:
            async with asyncio.timeout(self._options.worker_drain_seconds):
                await worker.emptied.wait()
        except TimeoutError:
            log.warning("worker %s is forgotten with %d requests on it", worker.address.url, worker.in_flight)
        self._probes.pop(worker).cancel()
        self._drains.pop(worker, None)
        self.workers.remove(worker)
        log.info("worker %s is gone", worker.address.url)

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            now = loop.time()
            self.dispatcher.sweep(now, WORKER_IDLE_SECONDS)
            for client in [c for c in self._clients if c.unfinished_since(now) > CLIENT_IDLE_SECONDS]:
                client.close()

    async def drain(self, seconds: float) -> None:
        """Refuses new requests, lets those that are here end for so long, then cuts them; then stops listening."""
        loop = asyncio.get_running_loop()
        self.dispatcher.draining = True
        self._close_idle_clients()
        end = loop.time() + seconds
        while not self.dispatcher.idle and loop.time() < end:
            await asyncio.sleep(DRAIN_POLL_SECONDS)
            self._close_idle_clients()
        self.dispatcher.cut_all()
        await self.stop()

    def _close_idle_clients(self) -> None:
        for client in [c for c in self._clients if c.idle]:
            client.close()

    async def stop(self) -> None:
        """Ends everything at once; what is written already still leaves."""
        for server in self._servers:
            server.close()
        for client in list(self._clients):
            client.close()
        for probe in self._probes.values():
            probe.cancel()
        for drain in self._drains.values():
            drain.cancel()
        if self._sweeping is not None:
            self._sweeping.cancel()
        for worker in list(self.workers):
            self.workers.remove(worker)
        await asyncio.sleep(0)  # closed transports say good-bye in the loop's next turn
