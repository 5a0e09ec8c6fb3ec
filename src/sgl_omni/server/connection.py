"""A client's connection, with errors of the HTTP itself in the shape of all others.

What never becomes a request, and so never reaches the application, is answered here: bytes that are not HTTP, and heads
that are too long, which uvicorn would read for as long as they come.
"""

from __future__ import annotations

import sys
from http import HTTPStatus

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sgl_omni.server.errors import HTTP_CODES, error_body

MAX_HEAD_BYTES = 64 << 10
LINGER_SECONDS = 1.0
SHOWN_OF_FAULT = 200
"""Characters of the parser's own words that an answer repeats: they may hold the whole URL."""


class HttpConnection(HttpToolsProtocol):
    """uvicorn's connection, but for the answers that it gives by itself."""

    _in_head = False
    _head_bytes = 0
    _refused = False

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        self._head_bytes = self._head_bytes + len(data) if self._in_head else 0
        if self._head_bytes > MAX_HEAD_BYTES and not self._refused:
            self._refuse_head()

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._refused:
            return
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES:
            self._refuse_head()
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._refused:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this while it handles the parser's error, which says more than ``msg``."""
        if not self._refused:
            fault = str(sys.exception() or msg)
            self._refuse(400, f"this is not HTTP: {fault[:SHOWN_OF_FAULT]}")

    def _refuse_head(self) -> None:
        self._refuse(431, f"the head of the request is longer than {MAX_HEAD_BYTES} bytes")

    def _refuse(self, status: int, message: str) -> None:
        self._refused = True
        cycle = self.cycle
        if cycle is None or not cycle.response_started or cycle.response_complete:
            self.transport.write(self._answer(status, message))
        if cycle is not None and not cycle.response_complete:
            self.transport.close()  # the request that was under way learns that its client is gone
            return
        # Closing on a client that still sends would cost it the answer: what it sends is dropped for a moment.
        self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _answer(self, status: int, message: str) -> bytes:
        body = msgspec.json.encode(error_body(status, message, HTTP_CODES[status]))
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        lines = b"".join(b"%b: %b\r\n" % header for header in headers)
        return b"HTTP/1.1 %d %b\r\n%b\r\n%b" % (status, HTTPStatus(status).phrase.encode(), lines, body)
