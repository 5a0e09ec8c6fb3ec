"""One small request of the router's own: to a worker's /health and /metrics, to a sibling process."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from sgl_omni.router.upstream import Answer, Upstream

MAX_BODY = 8 << 20


class FetchError(Exception):
    """No whole answer. ``refused``: nobody listens there."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


@dataclass(frozen=True, slots=True)
class Fetched:
    status: int
    body: bytes


class _Collector:
    def __init__(self, method: bytes) -> None:
        self.method = method
        self.done: asyncio.Future[Fetched] = asyncio.get_running_loop().create_future()
        self._status = 0
        self._pieces: list[bytes] = []
        self._size = 0

    def on_head(self, answer: Answer) -> bool:
        self._status = answer.status
        return True

    def on_data(self, data: bytes) -> None:
        self.on_body(data)

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._size > MAX_BODY:
            self.on_lost(f"the answer is longer than {MAX_BODY} bytes")
            return
        self._pieces.append(body)

    def on_end(self, *, cut: bool) -> None:
        if not self.done.done():
            self.done.set_result(Fetched(self._status, b"".join(self._pieces)))

    def on_lost(self, reason: str, *, unanswered: bool = False) -> None:
        if not self.done.done():
            self.done.set_exception(FetchError(reason))

    def on_writable(self, writable: bool) -> None:
        pass  # the request is out as a whole


async def fetch(
    place: tuple[str, int] | str, method: str, target: str, *, body: bytes = b"", seconds: float
) -> Fetched:
    """``place`` is a host and a port, or the path of a unix socket; over a connection of its own.

    Raises ``FetchError``.
    """
    loop = asyncio.get_running_loop()
    upstream = Upstream(Upstream.close, lambda _: None)
    collector = _Collector(method.encode())
    host = place if isinstance(place, str) else f"{place[0]}:{place[1]}"
    try:
        async with asyncio.timeout(seconds):
            if isinstance(place, str):
                await loop.create_unix_connection(lambda: upstream, place)
                host = "sibling"
            else:
                await loop.create_connection(lambda: upstream, *place)
            head = f"{method} {target} HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n\r\n"
            upstream.begin(collector, [head.encode() + body])
            return await collector.done
    except TimeoutError as error:
        raise FetchError(f"no answer to {method} {target} within {seconds:g} s") from error
    except ConnectionRefusedError as error:
        raise FetchError("connection refused", refused=True) from error
    except OSError as error:
        raise FetchError(str(error)) from error
    finally:
        upstream.abort()
