"""The router's own endpoints. Where several processes share a port, each answers for all of them.

| endpoint | says |
| --- | --- |
| ``GET /live`` | 200 while the process runs |
| ``GET /ready`` | 200 while a worker takes requests and the router is not shutting down, else 503 |
| ``GET /health`` | the same, with the numbers |
| ``GET /workers`` | each worker with its state |
| ``POST /workers`` | ``{"url"}`` or ``{"urls"}``: registers; takes out of a drain |
| ``DELETE /workers`` | the same body, or ``?url=``: no new requests; it is forgotten when the last has ended |
| ``GET /metrics`` | Prometheus |
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import msgspec

from sgl_omni.errors import InvalidRequest
from sgl_omni.router import metrics
from sgl_omni.router.exchange import Exchange
from sgl_omni.router.fetch import FetchError, fetch
from sgl_omni.router.heads import error_body
from sgl_omni.router.workers import Address, parse_address

if TYPE_CHECKING:
    from sgl_omni.router.app import Router

log = logging.getLogger("sgl_omni.router")

JSON = b"application/json"
TEXT = b"text/plain; charset=utf-8"
PROMETHEUS = b"text/plain; version=1.0.0; charset=utf-8"
PATHS = {
    b"/live": (b"GET", b"HEAD"),
    b"/ready": (b"GET", b"HEAD"),
    b"/health": (b"GET", b"HEAD"),
    b"/metrics": (b"GET", b"HEAD"),
    b"/workers": (b"GET", b"HEAD", b"POST", b"DELETE"),
}
SIBLING_SECONDS = 2.0
RETRY = (b"retry-after: 1",)


class _Urls(msgspec.Struct, forbid_unknown_fields=True):
    url: str | None = None
    urls: list[str] = []


class Admin:
    """Answers for ``router``. ``siblings`` are the unix sockets of the other processes on its port."""

    def __init__(self, router: Router, siblings: Sequence[str]) -> None:
        self._router = router
        self._siblings = siblings
        self._tasks: set[asyncio.Task[None]] = set()

    def answer(self, exchange: Exchange, path: bytes, *, of_sibling: bool) -> None:
        """``of_sibling``: asked by another process of this router, which adds the answers up itself."""
        if exchange.method not in PATHS[path]:
            allowed = b", ".join(PATHS[path])
            text = f"{exchange.method.decode()} {path.decode()}: allowed are {allowed.decode()}"
            exchange.answer(405, error_body(405, text, "method_not_allowed"), JSON, (b"allow: " + allowed,))
            return
        if path == b"/live":
            exchange.answer(200, b"live\n", TEXT)
            return
        task = asyncio.ensure_future(self._answer(exchange, path, () if of_sibling else self._siblings))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, exchange: Exchange, path: bytes, siblings: Sequence[str]) -> None:
        try:
            status = 200
            if exchange.method in (b"POST", b"DELETE"):
                status = await self._change(exchange, siblings)
            found = await self._gather(siblings)
        except InvalidRequest as error:
            status = 404 if error.param == "unknown" else 400
            exchange.answer(status, error_body(status, str(error), "invalid_request", "url"), JSON)
            return
        except FetchError as error:
            text = f"another process of this router does not answer: {error}"
            exchange.answer(503, error_body(503, text, "sibling"), JSON, RETRY)
            return
        if path == b"/metrics":
            exchange.answer(200, metrics.render(found), PROMETHEUS)
        elif path == b"/workers":
            exchange.answer(status, msgspec.json.encode({"workers": found["workers"]}), JSON)
        else:
            self._tell_health(exchange, path, found)

    def _tell_health(self, exchange: Exchange, path: bytes, found: metrics.Snapshot) -> None:
        takes = [w for w in found["workers"] if w["state"] in ("up", "half_open") and not w["draining"]]
        status = "draining" if found["draining"] else "ready" if takes else "no_worker"
        code, extra = (200, ()) if status == "ready" else (503, RETRY)
        if path == b"/ready":
            exchange.answer(code, status.encode() + b"\n", TEXT, extra)
        else:
            exchange.answer(code, msgspec.json.encode({"status": status, **found}), JSON, extra)

    async def _gather(self, siblings: Sequence[str]) -> metrics.Snapshot:
        own = metrics.snapshot(self._router.dispatcher)
        if not siblings:
            return own
        answers = await asyncio.gather(*(fetch(s, "GET", "/health", seconds=SIBLING_SECONDS) for s in siblings))
        others: list[dict[str, Any]] = [msgspec.json.decode(answer.body) for answer in answers]
        return metrics.merge([own, *others])

    async def _change(self, exchange: Exchange, siblings: Sequence[str]) -> int:
        """Registers or drains here and at the siblings; 201 where something was registered."""
        body = exchange.whole_body or b""
        addresses = addresses_of(body, exchange.target.partition(b"?")[2])
        method = exchange.method.decode()
        if method == "DELETE" and (unknown := [a.url for a in addresses if self._router.workers.get(a.url) is None]):
            raise InvalidRequest(f"no such worker: {', '.join(unknown)}; GET /workers lists them", "unknown")
        for address in addresses:
            if method == "POST":
                self._router.add_worker(address)
            else:
                self._router.drain_worker(address)
        passed_on = msgspec.json.encode({"urls": [address.url for address in addresses]})
        await asyncio.gather(*(fetch(s, method, "/workers", body=passed_on, seconds=SIBLING_SECONDS) for s in siblings))
        return 201 if method == "POST" else 200


def addresses_of(body: bytes, query: bytes) -> list[Address]:
    """The workers that a request names, each once. Raises ``InvalidRequest``."""
    given = parse_qs(query.decode("latin-1")).get("url", [])
    if body:
        try:
            fields = msgspec.json.decode(body, type=_Urls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest(f'{error}; send {{"url": "http://host:port"}} or {{"urls": [...]}}', "url") from error
        given = [*given, *([fields.url] if fields.url is not None else []), *fields.urls]
    if not given:
        raise InvalidRequest('no worker is named; send {"url": "http://host:port"}', "url")
    return list(dict.fromkeys(parse_address(text) for text in given))
