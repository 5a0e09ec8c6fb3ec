"""Admission, the queue, the choice of a worker, and when another one gets the request."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from dataclasses import dataclass

from sgl_omni.router.exchange import Exchange
from sgl_omni.router.load import estimate
from sgl_omni.router.policy import Policy
from sgl_omni.router.upstream import Upstream
from sgl_omni.router.workers import Worker, Workers

log = logging.getLogger("sgl_omni.router")


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one router process. Times are in seconds."""

    max_connections: int = 1024
    """Requests that are with workers at once."""
    queue: int = 1024
    """Requests that wait for that; more get a 503."""
    queue_seconds: float = 30.0
    connect_seconds: float = 2.0
    silence_seconds: float = 600.0
    """How long a worker may send nothing of an answer that it owes."""
    retry_after: float = 1.0


@dataclass(slots=True)
class Tally:
    """What has no worker to be counted at."""

    full: int = 0
    waited_too_long: int = 0
    no_worker: int = 0
    draining: int = 0
    gave_up_waiting: int = 0
    retries: int = 0


class Dispatcher:
    """Gives requests to workers, never more than ``limits.max_connections`` at once."""

    def __init__(self, workers: Workers, policy: Policy, limits: Limits) -> None:
        self.workers = workers
        self.draining = False
        self.tally = Tally()
        self._policy = policy
        self._limits = limits
        self._queue: deque[Exchange] = deque()
        self._placed: set[Exchange] = set()
        self._admitting = False

    @property
    def in_flight(self) -> int:
        return len(self._placed)

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def idle(self) -> bool:
        return not self._placed and not self._queue

    def submit(self, exchange: Exchange) -> None:
        exchange.dispatcher = self
        if self.draining:
            self.tally.draining += 1
            self._refuse(exchange, "the router is shutting down", "draining")
        elif len(self._placed) < self._limits.max_connections and not self._queue:
            self._admit(exchange)
        elif len(self._queue) < self._limits.queue:
            self._queue.append(exchange)
        else:
            self.tally.full += 1
            text = f"{len(self._placed)} requests are with workers and {len(self._queue)} wait; try again later"
            self._refuse(exchange, text, "overloaded")

    def _admit(self, exchange: Exchange) -> None:
        self._placed.add(exchange)
        if self._policy.reads_length:
            exchange.estimate = estimate(exchange.whole_body, exchange.length or exchange.held)
        self._place(exchange)

    def _place(self, exchange: Exchange) -> None:
        candidates = self._candidates(exchange)
        if not candidates:
            self.tally.no_worker += 1
            self._refuse(exchange, self._no_worker(), "no_worker")
            return
        worker = self._policy.choose(candidates, exchange.estimate)
        worker.begin(exchange.estimate)
        exchange.worker = worker
        upstream = worker.take_idle()
        if upstream is not None:
            exchange.send_to(upstream)
        else:
            exchange.connecting = asyncio.ensure_future(self._connect(exchange, worker))

    def _candidates(self, exchange: Exchange) -> list[Worker]:
        return [w for w in self.workers if w.routable and w not in exchange.tried]

    def _no_worker(self) -> str:
        if not len(self.workers):
            return "no worker is registered; POST its url to /workers"
        states = ", ".join(
            f"{w.address.url} is {'draining' if w.draining else w.health.state}" for w in list(self.workers)[:8]
        )
        return f"no worker takes requests now: {states}"

    async def _connect(self, exchange: Exchange, worker: Worker) -> None:
        upstream = Upstream(worker.keep, worker.forget)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._limits.connect_seconds):
                await loop.create_connection(lambda: upstream, worker.address.host, worker.address.port)
        except asyncio.CancelledError:
            upstream.close()  # it may have been made in this very moment
            raise
        except ConnectionRefusedError:
            worker.health.refused("connection refused")
            self._retry(exchange, worker, "connection refused")
            return
        except (OSError, TimeoutError) as error:
            reason = str(error) or f"no connection within {self._limits.connect_seconds:g} s"
            worker.broken(reason)
            self._retry(exchange, worker, reason)
            return
        exchange.connecting = None
        exchange.send_to(upstream)

    def _retry(self, exchange: Exchange, worker: Worker, reason: str) -> None:
        """Nothing of the request has been sent, so another worker may have it."""
        log.warning("request %s: worker %s: %s", exchange.id.decode(), worker.address.url, reason)
        exchange.connecting = None
        self._take_back(exchange, "refused")
        exchange.tried.add(worker)
        self.tally.retries += 1
        self._place(exchange)

    def _refuse(self, exchange: Exchange, message: str, code: str) -> None:
        wait = b"retry-after: %d" % max(1, math.ceil(self._limits.retry_after))
        exchange.fail(503, message, code, (wait,))

    # Called by exchanges.

    def answered(self, exchange: Exchange, status: int) -> None:
        """The head of the answer is here."""
        assert exchange.worker is not None
        exchange.worker.health.answered()
        exchange.worker.first_byte.add(asyncio.get_running_loop().time() - exchange.begun)

    def lost(self, exchange: Exchange, reason: str) -> None:
        assert exchange.worker is not None
        exchange.worker.broken(reason)
        exchange.tried.add(exchange.worker)
        self._take_back(exchange, "lost")

    def has_another(self, exchange: Exchange) -> bool:
        """Whether a worker takes requests that has not had this one."""
        return bool(self._candidates(exchange))

    def repeat(self, exchange: Exchange) -> None:
        """Gives a request whose worker was lost to another one."""
        self.tally.retries += 1
        self._place(exchange)

    def ended(self, exchange: Exchange) -> None:
        status = exchange.status
        self._take_back(exchange, "ok" if status < 400 else "client_error" if status < 500 else "server_error")
        self._leave(exchange)

    def abandoned(self, exchange: Exchange) -> None:
        if exchange in self._queue:
            self._queue.remove(exchange)
            self.tally.gave_up_waiting += 1
        self._take_back(exchange, "aborted")
        self._leave(exchange)

    def _take_back(self, exchange: Exchange, outcome: str) -> None:
        worker, exchange.worker = exchange.worker, None
        if worker is not None:
            worker.end(exchange.estimate, outcome)

    def _leave(self, exchange: Exchange) -> None:
        self._placed.discard(exchange)
        if self._admitting:
            return  # a request that was admitted below had no worker; the loop goes on by itself
        self._admitting = True
        while self._queue and len(self._placed) < self._limits.max_connections:
            self._admit(self._queue.popleft())
        self._admitting = False

    # Called about once a second.

    def sweep(self, now: float, idle_seconds: float) -> None:
        """Ends what has waited or been silent for too long, and connections nobody has used for a while."""
        while self._queue and now - self._queue[0].begun > self._limits.queue_seconds:
            exchange = self._queue.popleft()
            self.tally.waited_too_long += 1
            self._refuse(exchange, f"no turn within {self._limits.queue_seconds:g} s; try again later", "overloaded")
        for exchange in [e for e in self._placed if now - e.touched > self._limits.silence_seconds]:
            upstream = exchange.upstream
            if upstream is not None:
                upstream.abort()
                exchange.on_lost(f"nothing came from it for {self._limits.silence_seconds:g} s")
        for worker in self.workers:
            worker.close_idle(now - idle_seconds)

    def cut_all(self) -> None:
        """Ends every request with an error, at the end of a drain."""
        waiting = list(self._queue)
        self._queue.clear()
        for exchange in [*waiting, *self._placed]:
            if exchange.upstream is not None:
                exchange.upstream.abort()
                exchange.upstream = None
            if exchange.connecting is not None:
                exchange.connecting.cancel()
            self._take_back(exchange, "aborted")
            exchange.fail(503, "the router shut down before the answer was complete", "draining")
