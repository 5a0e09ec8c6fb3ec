"""A small worker whose answers the test can tell by path; it notes what reached it and who went away."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field

AUDIO = b"".join(hashlib.sha256(bytes([i % 256, i // 256])).digest() for i in range(20000))
EVENT = b'data: {"type": "speech.audio.delta", "audio": "AAAA"}\n\n'


@dataclass
class Got:
    line: str
    headers: dict[str, str]
    body: bytes


@dataclass
class StandIn:
    """``/audio`` streams AUDIO; ``/events`` three events; ``/break/...`` begin like them and end the connection in the
    middle; ``/slow`` waits for ``go``; ``/status/N`` answers N; everything else is echoed."""

    name: str = "a"
    port: int = 0
    healthy: bool = True
    dying: bool = False
    """Ends the connection of whoever asks for something, without a word."""
    got: list[Got] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    server: asyncio.Server | None = None
    writers: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> StandIn:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, reuse_address=True)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        """As if killed: connections are reset, then nobody listens."""
        assert self.server is not None
        self.server.close()
        for writer in list(self.writers):
            writer.transport.abort()
        await self.server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.add(writer)
        try:
            while head := await self._head(reader):
                line, *lines = head.decode().splitlines()
                headers = {k.lower(): v for k, _, v in (x.partition(": ") for x in lines)}
                got = Got(line, headers, await self._body(reader, headers))
                path = line.split()[1]
                if path not in ("/health", "/metrics"):
                    self.got.append(got)
                    if self.dying:
                        break
                if not await self._answer(path, got, reader, writer):
                    break
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.writers.discard(writer)
            writer.close()

    async def _head(self, reader: asyncio.StreamReader) -> bytes:
        try:
            return (await reader.readuntil(b"\r\n\r\n"))[:-4]
        except asyncio.IncompleteReadError:
            return b""

    async def _body(self, reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
        if "transfer-encoding" not in headers:
            return await reader.readexactly(int(headers.get("content-length", "0")))
        body = b""
        while size := int(await reader.readline(), 16):
            body += await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readline()
        return body

    async def _answer(self, path: str, got: Got, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection is of further use."""
        if path == "/health":
            writer.write(whole(200 if self.healthy else 503, b"{}"))
        elif path == "/audio":
            writer.write(begin("audio/pcm") + b"".join(chunk(p) for p in pieces(AUDIO)) + b"0\r\n\r\n")
        elif path == "/sized":
            writer.write(whole(200, AUDIO))
        elif path == "/events":
            writer.write(begin("text/event-stream") + chunk(EVENT + EVENT[:20]) + chunk(EVENT[20:] + EVENT))
            writer.write(b"0\r\n\r\n")
        elif path.startswith("/break/"):
            await self._break(path, writer)
            return False
        elif path == "/trickle":
            return await self._trickle(reader, writer)
        elif path == "/slow":
            await self._wait(reader)
            writer.write(whole(200, self.name.encode()))
        elif path.startswith("/status/"):
            writer.write(whole(int(path.rpartition("/")[2]), b"own words"))
        elif path == "/who":
            writer.write(whole(200, self.name.encode()))
        else:
            writer.write(whole(200, got.body))
        await writer.drain()
        return True

    async def _break(self, path: str, writer: asyncio.StreamWriter) -> None:
        if path == "/break/audio":
            writer.write(begin("audio/pcm") + chunk(AUDIO[:5000]))
        elif path == "/break/events":
            writer.write(begin("text/event-stream") + chunk(EVENT) + chunk(EVENT[:30]))
        await writer.drain()
        if path != "/break/before":
            await asyncio.sleep(0.1)

    async def _wait(self, reader: asyncio.StreamReader) -> None:
        """Until the test says go; notes a caller that goes away before."""
        going = asyncio.ensure_future(self.go.wait())
        leaving = asyncio.ensure_future(reader.read(1))
        await asyncio.wait([going, leaving], return_when=asyncio.FIRST_COMPLETED)
        going.cancel()
        if leaving.done():
            self.gone.set()
            raise ConnectionResetError
        leaving.cancel()
        await asyncio.wait([leaving])

    async def _trickle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One piece at once, the other when the test says so."""
        writer.write(begin("audio/pcm") + chunk(b"first"))
        await writer.drain()
        await self._wait(reader)
        writer.write(chunk(b"second") + b"0\r\n\r\n")
        return True


def begin(kind: str) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nTransfer-Encoding: chunked\r\n\r\n" % kind.encode()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def whole(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d Some Reason\r\nX-Own: yes\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


def pieces(data: bytes) -> list[bytes]:
    """Of many lengths, from 1 byte on."""
    found, at, size = [], 0, 1
    while at < len(data):
        found.append(data[at : at + size])
        at += size
        size = size * 7 % 9973 + 1
    return found
