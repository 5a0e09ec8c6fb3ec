"""The workers: where they are, how they do, what they have to do, and connections kept open to them."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from sgl_omni.errors import InvalidRequest
from sgl_omni.router.health import Health, State, Thresholds
from sgl_omni.router.load import Load
from sgl_omni.router.upstream import Upstream

FIRST_BYTE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
OUTCOMES = ("ok", "client_error", "server_error", "lost", "aborted", "refused")
KEPT_IDLE = 1024


@dataclass(frozen=True, slots=True)
class Address:
    """Where a worker listens. ``url`` is its one spelling, by which it is known."""

    url: str
    host: str
    port: int


def parse_address(text: str) -> Address:
    """``http://host:port``, with or without a slash at the end; the scheme may be left out.

    Raises ``InvalidRequest`` that names the text.
    """
    given = text.strip()
    reason = _fault(given)
    if reason is None:
        parts = urlsplit(given if "://" in given else f"http://{given}")
        host = parts.hostname or ""
        shown = f"[{host}]" if ":" in host else host
        return Address(f"http://{shown}:{parts.port}", host, parts.port or 0)
    raise InvalidRequest(f"worker {text[:200]!r}: {reason}; write http://host:port", "url")


_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def is_own(address: Address, host: str, port: int) -> bool:
    """Whether what is sent to an address comes to the socket of this machine that is bound to (``host``, ``port``)."""
    if address.port != port:
        return False
    try:
        found = socket.getaddrinfo(address.host, port, type=socket.SOCK_STREAM)
    except OSError:
        return False  # a name that is unknown now is the probe's to report
    # What is sent to no address in particular comes to this machine's loopback.
    ips = {_LOOPBACK.get(str(info[4][0]), str(info[4][0])) for info in found}
    if ipaddress.ip_address(host).is_unspecified:
        return any(_is_local(ip) for ip in ips)
    return host in ips


def _is_local(ip: str) -> bool:
    """An address can be bound only on the machine that has it."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.bind((ip, 0))
        except OSError:
            return False
    return True


def _fault(text: str) -> str | None:
    if not text.isascii() or not text.isprintable() or " " in text:
        return "it holds characters that no address has"
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        port = parts.port
        if ":" in (parts.hostname or ""):
            ipaddress.ip_address(parts.hostname or "")
    except ValueError as error:
        return str(error)
    if parts.scheme != "http":
        return f"the scheme {parts.scheme!r} is not supported"
    if not parts.hostname or not port:
        return "host or port is missing"
    if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username is not None:
        return "only a host and a port are taken"
    return None


@dataclass(slots=True)
class FirstByte:
    """Histogram of the seconds from a request's arrival to the head of its answer."""

    total: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(FIRST_BYTE_BUCKETS) + 1))

    def add(self, seconds: float) -> None:
        self.total += seconds
        self.buckets[bisect_left(FIRST_BYTE_BUCKETS, seconds)] += 1


class Worker:
    """One worker as this router process sees it."""

    def __init__(self, address: Address, thresholds: Thresholds) -> None:
        self.address = address
        self.health = Health(thresholds)
        self.load: Load | None = None
        self.in_flight = 0
        self.work = 0.0
        self.draining = False
        self.emptied = asyncio.Event()
        self.outcomes = dict.fromkeys(OUTCOMES, 0)
        self.first_byte = FirstByte()
        self.probe_now = asyncio.Event()
        self._idle: list[Upstream] = []

    @property
    def routable(self) -> bool:
        return not self.draining and self.health.takes_requests

    def begin(self, estimate: float) -> None:
        self.in_flight += 1
        self.work += estimate
        if self.health.state is State.HALF_OPEN:
            self.health.given_request()

    def end(self, estimate: float, outcome: str) -> None:
        self.in_flight -= 1
        self.work = self.work - estimate if self.in_flight else 0.0
        self.outcomes[outcome] += 1
        if self.draining and not self.in_flight:
            self.emptied.set()
        if self.health.state is State.HALF_OPEN:
            self.health.request_over()

    def drain(self) -> None:
        """No new requests; ``emptied`` is set when there are none left."""
        self.draining = True
        self.emptied.clear()
        if not self.in_flight:
            self.emptied.set()

    def broken(self, reason: str) -> None:
        """A connection broke before its answer was complete: look at once how the worker does."""
        self.health.failed(reason)
        self.probe_now.set()

    def take_idle(self) -> Upstream | None:
        """The connection that was used last: the least likely to be closed by the worker just now."""
        while self._idle:
            upstream = self._idle.pop()
            if upstream.usable:
                return upstream
        return None

    def keep(self, upstream: Upstream) -> None:
        if len(self._idle) >= KEPT_IDLE or self.draining:
            upstream.close()
            return
        upstream.idle_since = asyncio.get_running_loop().time()
        self._idle.append(upstream)

    def forget(self, upstream: Upstream) -> None:
        if upstream in self._idle:
            self._idle.remove(upstream)

    def close_idle(self, before: float) -> None:
        """Closes the connections that have been idle since before this time of the loop."""
        for upstream in [u for u in self._idle if u.idle_since <= before]:
            self._idle.remove(upstream)
            upstream.close()


class Workers:
    """All workers, in the order of their registration."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._by_url: dict[str, Worker] = {}

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._by_url.values())

    def __len__(self) -> int:
        return len(self._by_url)

    def get(self, url: str) -> Worker | None:
        return self._by_url.get(url)

    def add(self, address: Address) -> Worker:
        """A new worker; one that is known is taken out of its drain."""
        worker = self._by_url.get(address.url)
        if worker is None:
            worker = self._by_url[address.url] = Worker(address, self._thresholds)
        worker.draining = False
        return worker

    def remove(self, worker: Worker) -> None:
        if self._by_url.get(worker.address.url) is worker:
            del self._by_url[worker.address.url]
        worker.close_idle(float("inf"))
