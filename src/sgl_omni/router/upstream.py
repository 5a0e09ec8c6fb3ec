"""The router's side of a connection to a worker: one request at a time, its answer handed on as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol, cast

import httptools

Headers = list[tuple[bytes, bytes]]

MAX_HEAD = 64 << 10
NO_BODY = frozenset({204, 304})


class Framing(Enum):
    """How the end of a body is known."""

    NONE = "none"
    LENGTH = "length"
    CHUNKED = "chunked"
    CLOSE = "close"


class Answer:
    """The head of a worker's answer. Header names are in lower case."""

    __slots__ = ("framing", "headers", "reason", "status")

    def __init__(self, status: int, reason: bytes, headers: Headers, framing: Framing) -> None:
        self.status = status
        self.reason = reason
        self.headers = headers
        self.framing = framing


class Receiver(Protocol):
    """Who gets an answer. After ``on_end`` or ``on_lost`` nothing more comes."""

    method: bytes

    def on_head(self, answer: Answer) -> bool:
        """True: the body is wanted decoded, by ``on_body``; False: as it is on the wire, by ``on_data``."""
        ...

    def on_data(self, data: bytes) -> None: ...

    def on_body(self, body: bytes) -> None: ...

    def on_end(self, *, cut: bool) -> None:
        """The answer is complete. ``cut``: it ended with its connection, which was the only way to tell."""
        ...

    def on_lost(self, reason: str, *, unanswered: bool = False) -> None:
        """The connection ended, or went wrong, before the answer was complete; ``unanswered``: before it began."""
        ...

    def on_writable(self, writable: bool) -> None:
        """Whether the worker takes more of the request's body now."""
        ...


class Upstream(asyncio.Protocol):
    """A connection to a worker.

    ``on_free`` is called when it can take another request, ``on_gone`` when it is closed.
    """

    def __init__(self, on_free: Callable[[Upstream], None], on_gone: Callable[[Upstream], None]) -> None:
        self._on_free = on_free
        self._on_gone = on_gone
        self._transport: asyncio.Transport | None = None
        self._receiver: Receiver | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._decoder: httptools.HttpResponseParser | None = None
        self._pieces = _Pieces()
        self._partial = b""
        self._in_body = False
        self._framing = Framing.NONE
        self._complete = False
        self._excess = False
        self._paused = False
        self._status_text = b""
        self._headers: Headers = []
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def begin(self, receiver: Receiver, request: Sequence[bytes]) -> None:
        """Sends a request, or its beginning; ``write`` sends the rest."""
        assert self._transport is not None and self._receiver is None
        self._receiver = receiver
        self._transport.write(request[0] if len(request) == 1 else b"".join(request))

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def pause_reading(self) -> None:
        if self._transport is not None and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._transport is not None and self._paused:
            self._paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        """Ends the connection at once; the worker sees its caller go, and the receiver hears no more."""
        self._receiver = None
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def pause_writing(self) -> None:
        if self._receiver is not None:
            self._receiver.on_writable(False)

    def resume_writing(self) -> None:
        if self._receiver is not None:
            self._receiver.on_writable(True)

    def data_received(self, data: bytes) -> None:
        if self._receiver is None:
            self.abort()  # nothing was asked
            return
        try:
            if not self._in_body:
                data = self._read_head(data)
            if self._receiver is not None and self._in_body:
                self._read_body(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._lose(f"it sent what is not HTTP ({error})")

    def _read_head(self, data: bytes) -> bytes:
        """Takes the answer's head, once it is whole; returns what follows it."""
        data = self._partial + data if self._partial else data
        end = data.find(b"\r\n\r\n") + 4
        if end < 4:
            self._partial = data
            if len(data) > MAX_HEAD:
                self._lose(f"the head of its answer is longer than {MAX_HEAD} bytes")
            return b""
        self._partial = b""
        head = data[:end]
        self._parser.feed_data(head)
        status = self._parser.get_status_code()
        if status < 200:
            self._reset()
            return self._read_head(data[end:]) if len(data) > end else b""
        self._framing = self._framing_of(status)
        self._in_body = True
        receiver = self._receiver
        assert receiver is not None
        answer = Answer(status, self._status_text, self._headers, self._framing)
        if receiver.on_head(answer) and not self._complete and self._framing is not Framing.NONE:
            # Besides the parser, which copies nothing: this one copies each piece of the body.
            self._pieces = _Pieces()
            self._decoder = httptools.HttpResponseParser(self._pieces)
            self._decoder.feed_data(head)
        return data[end:]

    def _framing_of(self, status: int) -> Framing:
        assert self._receiver is not None
        if self._receiver.method == b"HEAD" or status in NO_BODY:
            return Framing.NONE
        headers = dict(self._headers)
        if coding := headers.get(b"transfer-encoding"):
            return Framing.CHUNKED if coding.lower().endswith(b"chunked") else Framing.CLOSE
        return Framing.LENGTH if b"content-length" in headers else Framing.CLOSE

    def _read_body(self, data: bytes) -> None:
        receiver = self._receiver
        assert receiver is not None
        if data and self._framing is Framing.NONE:
            self._complete = False  # what follows belongs to no answer: this connection is not used again
        elif data:
            self._parser.feed_data(data)
            if self._excess:
                self._lose("it sent more than one answer")
                return
            if self._decoder is None:
                receiver.on_data(data)
            else:
                self._deliver_decoded(receiver, self._decoder, data)
        if (self._complete or self._framing is Framing.NONE) and self._receiver is receiver:
            self._end(receiver)

    def _deliver_decoded(self, receiver: Receiver, decoder: httptools.HttpResponseParser, data: bytes) -> None:
        decoder.feed_data(data)
        pieces, self._pieces.pieces = self._pieces.pieces, []
        for piece in pieces:
            receiver.on_body(piece)

    def _end(self, receiver: Receiver) -> None:
        reusable = self._complete and self._parser.should_keep_alive() and self.usable
        self._receiver = None
        self._reset()
        if reusable:
            self.resume_reading()
            self._on_free(self)  # first, so that a request that waits for its turn finds it
        else:
            self.close()
        receiver.on_end(cut=False)

    def _reset(self) -> None:
        self._in_body = False
        self._complete = False
        self._decoder = None
        self._headers = []
        self._status_text = b""

    def _lose(self, reason: str) -> None:
        receiver = self._receiver
        self.abort()
        if receiver is not None:
            receiver.on_lost(reason)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._on_gone(self)
        receiver = self._receiver
        self._receiver = None
        if receiver is None:
            return
        if self._in_body and self._framing is Framing.CLOSE and error is None:
            receiver.on_end(cut=True)
            return
        unanswered = not self._in_body and not self._partial
        reason = f"its connection broke ({error})" if error else "it closed the connection"
        receiver.on_lost(reason, unanswered=unanswered)

    # httptools calls these.

    def on_message_begin(self) -> None:
        self._excess = self._in_body

    def on_status(self, text: bytes) -> None:
        self._status_text += text

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_message_complete(self) -> None:
        self._complete = True


class _Pieces:
    """Collects the pieces of a body without their framing."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def on_body(self, body: bytes) -> None:
        self.pieces.append(body)
