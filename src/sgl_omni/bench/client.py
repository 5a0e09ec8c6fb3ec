"""One client process: drives one address and writes down every request. Its orders come as JSON on stdin, its record
leaves as JSON on stdout."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import httptools
import msgspec

from sgl_omni.bench.chat import ChatOptions, ChatStream
from sgl_omni.bench.events import EventStream
from sgl_omni.bench.transcription import TranscriptionOptions, TranscriptStream
from sgl_omni.bench.workload import Workload, arrivals

ROUTE = "/v1/audio/speech"
CHAT_ROUTE = "/v1/chat/completions"
TRANSCRIPTION_ROUTE = "/v1/audio/transcriptions"
SAMPLE_BYTES = 2


class Orders(msgspec.Struct, frozen=True):
    """``begin`` is a time of the monotonic clock, which all processes of a host share. Closed loop by ``concurrency``,
    open loop by ``rate`` (requests/s). What begins in the first ``warmup`` seconds is not measured. With ``chat`` the
    texts are asked in a chat, with ``transcription`` they are paths of recordings to be written down, else spoken.
    """

    url: str
    workload: Workload
    stream: int
    begin: float
    warmup: float
    seconds: float
    concurrency: int = 0
    rate: float = 0.0
    burst: int = 1
    timeout: float = 120.0
    chat: ChatOptions | None = None
    transcription: TranscriptionOptions | None = None


class Record(msgspec.Struct, frozen=True):
    """One request. Times in seconds from ``Orders.begin``; ``begun`` in an open loop is when it was due.

    ``first`` is the first byte of audio, or the first text; ``gaps`` are the times between pieces of text. ``audio`` is
    what was said, or heard, in seconds.
    """

    begun: float
    first: float | None
    ended: float
    audio: float
    characters: int
    error: str | None = None
    tokens: int = 0
    gaps: tuple[float, ...] = ()


class _Answer(asyncio.Protocol):
    """One connection, one request at a time; of a recording only its length is kept."""

    def __init__(self, make_stream: Callable[[], EventStream]) -> None:
        self._make_stream = make_stream
        self.transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._done: asyncio.Future[None] | None = None
        self.reset()

    def reset(self) -> None:
        self.rate = 0
        self.is_stream = False
        self.size = 0
        self.first: float | None = None
        self.words = b""
        self.stream = self._make_stream()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError(str(error or "the server closed the connection in the middle")))

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if self._done is not None and not self._done.done():
                self._done.set_exception(ConnectionError(f"not HTTP: {error}"))

    async def ask(self, request: bytes) -> int:
        """The answer's status, once all of it is here."""
        self.reset()
        self._done = asyncio.get_running_loop().create_future()
        if self.transport is None:
            raise ConnectionError("the server closed the connection")
        self.transport.write(request)
        await self._done
        return int(self._parser.get_status_code())

    @property
    def reusable(self) -> bool:
        return self.transport is not None and self._parser.should_keep_alive()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-sample-rate":
            self.rate = int(value)
        elif name.lower() == b"content-type":
            self.is_stream = value.startswith(b"text/event-stream")

    def on_body(self, body: bytes) -> None:
        if self.first is None:
            self.first = time.monotonic()
        self.size += len(body)
        if self.is_stream:
            self.stream.feed(body, time.monotonic())
        if len(self.words) < 300:
            self.words += body[:300]

    def on_message_complete(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


class Client:
    """Keeps its connections open between requests, as a serious client does."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        parts = urlsplit(orders.url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._idle: list[_Answer] = []
        self._files: dict[str, bytes] = {}
        self.records: list[Record] = []

    async def run(self) -> list[Record]:
        """All records, those of the warm-up included; what has begun in the window is waited for."""
        orders = self._orders
        texts = orders.workload.draw(orders.stream)
        await asyncio.sleep(max(0.0, orders.begin - time.monotonic()))
        if orders.concurrency:
            await asyncio.gather(*(self._caller(texts) for _ in range(orders.concurrency)))
        else:
            await self._open_loop(texts)
        for connection in self._idle:
            connection.close()
        return self.records

    async def _caller(self, texts: Iterator[str]) -> None:
        orders = self._orders
        end = orders.begin + orders.warmup + orders.seconds
        while (now := time.monotonic()) < end:
            await self._request(next(texts), now)
            if self.records[-1].error is not None:
                await asyncio.sleep(0.05)  # a server that refuses at once is not to be hammered

    async def _open_loop(self, texts: Iterator[str]) -> None:
        orders = self._orders
        seed = orders.workload.seed + 7919 * orders.stream
        due = arrivals(orders.rate, orders.warmup + orders.seconds, seed, orders.burst)
        async with asyncio.TaskGroup() as group:
            for at in due:
                await asyncio.sleep(max(0.0, orders.begin + at - time.monotonic()))
                group.create_task(self._request(next(texts), orders.begin + at))

    async def _request(self, text: str, begun: float) -> None:
        connection: _Answer | None = None
        error: str | None = None
        first, audio, tokens = None, 0.0, 0
        gaps: tuple[float, ...] = ()
        try:
            async with asyncio.timeout(self._orders.timeout):
                connection = await self._connection()
                status = await connection.ask(self._bytes(text))
            if status != 200:
                error = f"status {status}: {connection.words[:300].decode(errors='replace')}"
            elif self._reads_events:
                stream, heard = connection.stream, self._orders.transcription
                error = stream.error
                if error is None:
                    first = stream.times[0] - self._orders.begin if stream.times else None
                    tokens, gaps = stream.tokens, stream.gaps
                    audio = 0.0 if heard is None else heard.seconds[text]
            elif not connection.rate or connection.first is None:
                error = "no audio in the answer"
            else:
                first = connection.first - self._orders.begin
                audio = connection.size / SAMPLE_BYTES / connection.rate
        except TimeoutError:
            error = f"no end within {self._orders.timeout:g} s"
        except OSError as fault:
            error = f"{type(fault).__name__}: {fault}"
        if connection is not None:
            if connection.reusable and error is None:
                self._idle.append(connection)
            else:
                connection.close()
        ended = time.monotonic() - self._orders.begin
        record = Record(begun - self._orders.begin, first, ended, audio, len(text), error, tokens, gaps)
        self.records.append(record)

    async def _connection(self) -> _Answer:
        while self._idle:
            if (found := self._idle.pop()).reusable:
                return found
        make_stream = ChatStream if self._orders.transcription is None else TranscriptStream
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(lambda: _Answer(make_stream), self._host, self._port)
        return made

    @property
    def _reads_events(self) -> bool:
        return self._orders.chat is not None or self._orders.transcription is not None

    def _bytes(self, text: str) -> bytes:
        route, content_type, body = self._asked(text)
        head = f"POST {route} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nContent-Type: {content_type}\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    def _asked(self, text: str) -> tuple[str, str, bytes]:
        """Route, content type and body."""
        workload, chat, transcription = self._orders.workload, self._orders.chat, self._orders.transcription
        if transcription is not None:
            if text not in self._files:
                self._files[text] = Path(text).read_bytes()
            return TRANSCRIPTION_ROUTE, *transcription.form(text, self._files[text], workload.model)
        if chat is not None:
            return CHAT_ROUTE, "application/json", msgspec.json.encode(chat.request(text, workload.model))
        return ROUTE, "application/json", msgspec.json.encode(workload.request(text))


def main() -> None:
    import uvloop

    orders = msgspec.json.decode(sys.stdin.buffer.read(), type=Orders)
    records = uvloop.run(Client(orders).run())
    sys.stdout.buffer.write(msgspec.json.encode(records))


if __name__ == "__main__":
    main()
