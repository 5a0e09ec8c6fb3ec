"""One request and its answer on their way through the router."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

from sgl_omni.router import heads
from sgl_omni.router.events import Events
from sgl_omni.router.upstream import Answer, Framing, Headers, Upstream

if TYPE_CHECKING:
    from sgl_omni.router.dispatch import Dispatcher
    from sgl_omni.router.workers import Worker

log = logging.getLogger("sgl_omni.router")

HELD_BODY = 64 << 10
"""Bytes of a request's body that are held back: a smaller body is sent at once, with its head, when it is complete."""


class Client(Protocol):
    """The client's connection, as an exchange uses it."""

    def write(self, data: bytes) -> None: ...

    def finished(self, exchange: Exchange, *, close: bool) -> None:
        """The answer is complete."""
        ...

    def cut(self) -> None:
        """Ends the connection in a way that no client takes for the end of an answer."""
        ...

    def hold_body(self, hold: bool) -> None:
        """Whether to stop reading the request's body."""
        ...


class Exchange:
    """Owned by its client's connection. Its worker and connection are the dispatcher's to give and take back."""

    def __init__(self, client: Client, now: float) -> None:
        self.client = client
        self.method = b""
        self.target = b""
        self.headers: Headers = []
        self.http10 = False
        self.keep_alive = True
        self.id = b""
        self.length: int | None = None  # as declared; None: chunked
        self.body: list[bytes] = []
        self.held = 0
        self.received = False  # the whole request
        self.started = False  # given to the dispatcher, or answered
        self.over = False  # answered, cut or given up
        self.begun = now
        self.touched = now

        self.dispatcher: Dispatcher | None = None
        self.estimate = 0.0
        self.worker: Worker | None = None
        self.tried: set[Worker] = set()
        self.repeated = False  # a worker was lost with all of it, and another has it now
        self.connecting: asyncio.Task[None] | None = None
        self.upstream: Upstream | None = None
        self.status = 0
        self._is_whole = False  # what was sent
        self._close = False
        self._to_end = False  # the client knows the end of the answer by the connection's
        self._chunks = False
        self._events: Events | None = None

    # The request, from the client.

    @property
    def whole_body(self) -> bytes | None:
        """The body, as long as all of it is here."""
        return b"".join(self.body) if self.received and self.upstream is None else None

    def add_body(self, piece: bytes) -> None:
        if self.over:
            return  # the answer is out, and what is still sent is of no use
        if self.upstream is not None:
            self.upstream.write(piece if self.length is not None else b"%x\r\n%b\r\n" % (len(piece), piece))
            return
        self.body.append(piece)
        self.held += len(piece)

    def end_body(self) -> None:
        self.received = True
        if self.upstream is not None and self.length is None and not self.over:
            self.upstream.write(b"0\r\n\r\n")

    def send_to(self, upstream: Upstream) -> None:
        """Sends what there is of the request. Where that is all, it is kept until the answer begins."""
        if self.length is None and not self.received:
            framing = b"transfer-encoding: chunked\r\n"
            body = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in self.body]
        else:
            body = self.body
            length = self.held if self.length is None else self.length
            framing = b"content-length: %d\r\n" % length if length or self.method not in (b"GET", b"HEAD") else b""
            self.length = length
        head = heads.request_head(self.method, self.target, self.headers, framing, self.id)
        self._is_whole = self.received
        self.upstream = upstream
        upstream.begin(self, [head, *body])
        if not self._is_whole or self.repeated:
            self.body = []
        if not self.received:
            self.client.hold_body(False)

    # The answer, from the worker.

    def on_head(self, answer: Answer) -> bool:
        assert self.dispatcher is not None
        self.dispatcher.answered(self, answer.status)
        self.body = []
        self.status = answer.status
        headers = dict(answer.headers)
        drop = heads.OF_ANSWER | heads.named_by_connection(answer.headers)
        extra = b""
        chunked = answer.framing is Framing.CHUNKED
        if chunked and is_event_stream(headers):
            self._events = Events()
            self._chunks = not self.http10
            drop |= {b"transfer-encoding", b"content-length"}
            extra = b"transfer-encoding: chunked\r\n" if self._chunks else b""
        elif chunked and self.http10:
            drop |= {b"transfer-encoding"}
        self._to_end = answer.framing is Framing.CLOSE or (chunked and self.http10)
        self._close = self._to_end or not self.keep_alive or self.dispatcher.draining
        if self._close:
            extra += b"connection: close\r\n"
        elif self.http10:
            extra += b"connection: keep-alive\r\n"
        self.client.write(heads.answer_head(answer.status, answer.reason, answer.headers, extra, self.id, drop))
        return self._events is not None or (chunked and self.http10)

    def on_data(self, data: bytes) -> None:
        self.touched = self._now()
        self.client.write(data)

    def on_body(self, body: bytes) -> None:
        self.touched = self._now()
        self._send(self._events.take(body) if self._events is not None else body)

    def _send(self, body: bytes) -> None:
        if body:
            self.client.write(b"%x\r\n%b\r\n" % (len(body), body) if self._chunks else body)

    def on_end(self, *, cut: bool) -> None:
        if self._events is not None:
            self._send(self._events.rest())
            if self._chunks:
                self.client.write(b"0\r\n\r\n")
        self._finish(close=self._close or cut)

    def on_lost(self, reason: str, *, unanswered: bool = False) -> None:
        assert self.dispatcher is not None and self.worker is not None
        text = f"worker {self.worker.address.url} was lost: {reason}"
        log.warning("request %s: %s", self.id.decode(), text)
        self.upstream = None
        self.dispatcher.lost(self, reason)
        if unanswered and self._is_whole and not self.repeated and self.dispatcher.has_another(self):
            self.repeated = True
            self.touched = self._now()
            self.dispatcher.repeat(self)
            return
        self.fail(502, text, "worker_lost")

    def on_writable(self, writable: bool) -> None:
        self.client.hold_body(not writable)

    # Ends.

    def fail(self, status: int, message: str, code: str, extra: tuple[bytes, ...] = ()) -> None:
        """An error, by the best means left: a status, the last event of a stream, or a cut connection."""
        if self.over:
            return
        if not self.status:
            self.answer(status, heads.error_body(status, message, code), b"application/json", extra)
            return
        if self._events is None or not self._events.whole:
            self.over = True
            if self.dispatcher is not None:
                self.dispatcher.ended(self)
            self.client.cut()
            return
        self._events.rest()  # a part of an event, which nobody could read
        self._send(heads.error_event(status, message, code))
        if self._chunks:
            self.client.write(b"0\r\n\r\n")
        self._finish(close=True)

    def answer(self, status: int, body: bytes, content_type: bytes, extra: tuple[bytes, ...] = ()) -> None:
        """An answer of the router's own."""
        if self.over:
            return
        self.status = status
        draining = self.dispatcher is not None and self.dispatcher.draining
        close = not self.keep_alive or draining
        if self.http10 and not close:
            extra = (*extra, b"connection: keep-alive")
        bodiless = self.method == b"HEAD"
        self.client.write(heads.own_answer(status, body, content_type, self.id, extra, close=close, bodiless=bodiless))
        self._finish(close=close)

    def _finish(self, *, close: bool) -> None:
        self.over = True
        upstream, self.upstream = self.upstream, None
        if upstream is not None and not self.received:
            upstream.abort()  # answered before it had all of the request: it waits for the rest
        if self.dispatcher is not None:
            self.dispatcher.ended(self)
        self.client.finished(self, close=close)

    def give_up(self) -> None:
        """The client is gone: so is its request, wherever it is."""
        if self.over:
            return
        self.over = True
        if self.upstream is not None:
            self.upstream.abort()
            self.upstream = None
        if self.connecting is not None:
            self.connecting.cancel()
        if self.dispatcher is not None:
            self.dispatcher.abandoned(self)

    @property
    def to_end(self) -> bool:
        """A plain close would look like the answer's end to this client."""
        return self._to_end

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def is_event_stream(headers: dict[bytes, bytes]) -> bool:
    """Whether events may be added: not to a compressed stream."""
    kind = headers.get(b"content-type", b"").lower()
    return kind.startswith(b"text/event-stream") and headers.get(b"content-encoding", b"identity") == b"identity"
