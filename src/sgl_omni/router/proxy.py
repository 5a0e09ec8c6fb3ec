"""The router's side of a connection to a client: reads requests, answers them in turn."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import cast

import httptools

from sgl_omni.router import heads
from sgl_omni.router.exchange import HELD_BODY, Exchange
from sgl_omni.router.upstream import MAX_HEAD

MAX_PIPELINED = 8
WRITE_BUFFER = 256 << 10
LINGER_SECONDS = 1.0
RESET = struct.pack("ii", 1, 0)
NO_UPGRADE = (501, "the router passes no upgraded connections on")
TOO_LONG = (431, f"the head of the request is longer than {MAX_HEAD} bytes")

Take = Callable[[Exchange], None]
"""Takes a request that is ready to be answered."""


class ClientConnection(asyncio.Protocol):
    """One client. A request is taken when its body is complete, or longer than what is held back."""

    def __init__(self, take: Take, everyone: set[ClientConnection]) -> None:
        self._take = take
        self._everyone = everyone
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._exchanges: deque[Exchange] = deque()
        self._coming: Exchange | None = None
        self._head_bytes = 0
        self._held = False
        self._paused = False
        self._writable = True
        self._advancing = False
        self._ending = False
        self._fault: tuple[int, str] | None = None
        self.touched = self._loop.time()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER)
        self._everyone.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._everyone.discard(self)
        for exchange in list(self._exchanges):
            exchange.give_up()
        self._exchanges.clear()

    @property
    def idle(self) -> bool:
        """Nothing of a request is here."""
        return self._coming is None and not self._exchanges

    def unfinished_since(self, now: float) -> float:
        """Seconds for which it has sent nothing, while it is its turn to send."""
        waits = any(exchange.started and not exchange.over for exchange in self._exchanges)
        return 0.0 if waits else now - self.touched

    def data_received(self, data: bytes) -> None:
        self.touched = self._loop.time()
        if self._ending or self._fault is not None:
            return
        self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fault = NO_UPGRADE
        except httptools.HttpParserError as error:
            self._fault = (400, f"this is not HTTP: {error}")
        if self._coming is None or self._coming.id:
            self._head_bytes = 0
        elif self._head_bytes > MAX_HEAD:
            self._fault = TOO_LONG
        if self._fault is not None and self._coming is not None:
            self._drop(self._coming)
        self._advance()
        self._pace()

    def _drop(self, exchange: Exchange) -> None:
        """The rest of this request will never be understood."""
        answering = bool(exchange.status)
        exchange.give_up()
        if exchange in self._exchanges:
            self._exchanges.remove(exchange)
        if answering:
            self.cut()

    def _advance(self) -> None:
        """Gives on the requests that are ready, one after the other's answer."""
        self._advancing = True
        while self._exchanges and not self._ending:
            exchange = self._exchanges[0]
            if exchange.over and exchange.received:
                self._exchanges.popleft()
            elif exchange.started or not (exchange.received or exchange.held > HELD_BODY):
                break  # it is being answered, or still comes (and is dropped, where its answer is out already)
            else:
                exchange.started = True
                exchange.touched = self._loop.time()
                self._take(exchange)
        self._advancing = False
        if self._fault is not None and not self._exchanges and not self._ending:
            status, message = self._fault
            body = heads.error_body(status, message, "bad_request")
            id = heads.request_id(None)
            self.write(heads.own_answer(status, body, b"application/json", id, close=True, bodiless=False))
            self._linger()

    def _pace(self) -> None:
        """Reads on only as far as what is read can be passed on, so that a client feels how fast its worker is."""
        if self._transport is None:
            return
        coming = self._coming
        stuck = coming is not None and coming.upstream is None and not coming.over and coming.held > HELD_BODY
        pause = (self._held or stuck or len(self._exchanges) > MAX_PIPELINED) and not self._ending
        if pause and not self._paused:
            self._transport.pause_reading()
        elif self._paused and not pause:
            self._transport.resume_reading()
        self._paused = pause

    def close(self) -> None:
        """Ends the connection once all that was written is out."""
        self._ending = True
        if self._transport is not None:
            self._transport.close()

    def _linger(self) -> None:
        """Closing on a client that still sends would cost it the answer: what it sends is dropped for a moment."""
        self._ending = True
        self._pace()
        if self._transport is not None:
            self._transport.write_eof()
            self._loop.call_later(LINGER_SECONDS, self.close)

    # Exchanges call these.

    def write(self, data: bytes) -> None:
        if self._transport is None:
            return
        self._transport.write(data)
        if not self._writable:
            self.pause_writing()  # the answer before has filled the buffer already

    def finished(self, exchange: Exchange, *, close: bool) -> None:
        self.touched = self._loop.time()
        self._held = False
        if close and exchange.received:
            self.close()
        elif close:
            self._linger()
        elif not self._advancing:
            self._advance()
            self._pace()

    def cut(self) -> None:
        self._ending = True
        if self._transport is None:
            return
        if self._exchanges and self._exchanges[0].to_end:
            # A zero linger makes the end a reset, the one thing that this client does not take for the answer's end.
            self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self._transport.abort()
        else:
            self._transport.close()

    def hold_body(self, hold: bool) -> None:
        self._held = hold
        self._pace()

    # The transport calls these: the client reads more slowly than its worker sends, or keeps up again.

    def pause_writing(self) -> None:
        self._writable = False
        if self._exchanges and self._exchanges[0].upstream is not None:
            self._exchanges[0].upstream.pause_reading()

    def resume_writing(self) -> None:
        self._writable = True
        if self._exchanges and self._exchanges[0].upstream is not None:
            self._exchanges[0].upstream.resume_reading()

    # httptools calls these. Nothing is answered from here.

    def on_message_begin(self) -> None:
        self._coming = Exchange(self, self.touched)

    def on_url(self, url: bytes) -> None:
        assert self._coming is not None
        self._coming.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self._coming is not None
        self._coming.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        exchange = self._coming
        assert exchange is not None
        if self._head_bytes > MAX_HEAD and sum(len(name) + len(value) for name, value in exchange.headers) > MAX_HEAD:
            self._fault = TOO_LONG
        elif self._parser.should_upgrade():
            self._fault = NO_UPGRADE
        if self._fault is not None:
            return
        headers = dict(exchange.headers)
        exchange.method = self._parser.get_method()
        exchange.http10 = self._parser.get_http_version() == "1.0"
        exchange.keep_alive = self._parser.should_keep_alive()
        exchange.id = heads.request_id(headers.get(b"x-request-id"))
        exchange.length = None if b"transfer-encoding" in headers else int(headers.get(b"content-length", b"0"))
        self._exchanges.append(exchange)
        if headers.get(b"expect", b"").lower() == b"100-continue" and len(self._exchanges) == 1:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        assert self._coming is not None
        self._coming.add_body(body)

    def on_message_complete(self) -> None:
        assert self._coming is not None
        self._coming.end_body()
        self._coming = None
