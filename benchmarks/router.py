"""What the router adds: requests/s and latency of small JSON, directly and relayed, in turn; and audio, byte for byte.

A stand-in worker, `sgl-omni router` and the load run as processes of this machine, on the cores that are given to it;
the load and the worker take the larger part of them. Prints JSON: every round, and ratios taken within a round.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from statistics import median
from typing import Any, cast

import uvloop

BODY = json.dumps({"model": "demo", "input": "Good morning, how are you today?", "response_format": "pcm"}).encode()
SMALL = json.dumps({"id": "x" * 24, "object": "answer", "text": "y" * 160}).encode()
CHUNK = bytes(range(256)) * 16
CHUNKS = 200
LISTENS = re.compile(r"on (http://127\.0\.0\.1:(\d+))")


class StandIn(asyncio.Protocol):
    """A worker that answers at once: audio to `/audio` (chunked, unlike pieces), small JSON to everything else."""

    small = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(SMALL), SMALL)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.data = b""

    def data_received(self, data: bytes) -> None:
        self.data += data
        while (end := self.data.find(b"\r\n\r\n")) >= 0:
            head = self.data[:end].lower()
            length = int(found[1]) if (found := re.search(rb"content-length: (\d+)", head)) else 0
            if len(self.data) < end + 4 + length:
                return
            self.data = self.data[end + 4 + length :]
            if b" /audio " in head:
                self.transport.write(audio_answer())
            else:
                self.transport.write(self.small)


def audio_answer() -> bytes:
    pieces = [CHUNK[: 1 + i * 37 % len(CHUNK)] for i in range(CHUNKS)]
    body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return b"HTTP/1.1 200 OK\r\ncontent-type: audio/pcm\r\ntransfer-encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"


async def stand_in() -> None:
    server = await asyncio.get_running_loop().create_server(StandIn, "127.0.0.1", 0)
    print(f"stand-in on http://127.0.0.1:{server.sockets[0].getsockname()[1]}", file=sys.stderr, flush=True)
    await server.serve_forever()


class Caller(asyncio.Protocol):
    """Sends a request, waits for its answer, sends the next at once or `pause` seconds after the last was due.

    A paced request's time counts from when it was due, so that a late one hides nothing.
    """

    request = b"POST /v1/x HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        len(BODY),
        BODY,
    )

    def __init__(self, until: float, pause: float = 0.0, offset: float = 0.0) -> None:
        self.until = until
        self.pause = pause
        self.offset = offset
        self.latencies: list[float] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.due = time.perf_counter() + self.offset
        asyncio.get_running_loop().call_later(self.offset, self.send)

    def send(self) -> None:
        self.data = b""
        self.begun = self.due if self.pause else time.perf_counter()
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.data += data
        if not self.data.endswith(SMALL):
            return
        now = time.perf_counter()
        if not self.data.startswith(b"HTTP/1.1 200 "):
            raise RuntimeError(f"unexpected answer: {self.data[:200]!r}")
        self.latencies.append(now - self.begun)
        self.due += self.pause
        if max(now, self.due) < self.until:
            if self.pause and self.due > now:
                asyncio.get_running_loop().call_later(self.due - now, self.send)
            else:
                self.send()
        else:
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


async def drive(port: int, concurrency: int, seconds: float, rate: float = 0.0) -> dict[str, Any]:
    """Closed loop, or `rate` requests/s spread evenly over the callers."""
    begin = time.perf_counter()
    pause = concurrency / rate if rate else 0.0
    callers = [Caller(begin + seconds, pause, i * pause / concurrency) for i in range(concurrency)]
    loop = asyncio.get_running_loop()
    await asyncio.gather(*(loop.create_connection(lambda c=c: c, "127.0.0.1", port) for c in callers))
    await asyncio.gather(*(caller.done for caller in callers))
    wall = time.perf_counter() - begin
    taken = sorted(latency for caller in callers for latency in caller.latencies)
    return {
        "concurrency": concurrency,
        "offered_per_s": rate or None,
        "requests": len(taken),
        "requests_per_s": round(len(taken) / wall, 1),
        "p50_ms": round(median(taken) * 1000, 4),
        "p99_ms": round(taken[int(len(taken) * 0.99)] * 1000, 4),
    }


async def audio_digest(port: int) -> str:
    """Of the body's bytes, without the transfer's framing."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /audio HTTP/1.1\r\nhost: x\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    digest = hashlib.sha256()
    while size := int(await reader.readline(), 16):
        digest.update(await reader.readexactly(size))
        await reader.readexactly(2)
    writer.close()
    return digest.hexdigest()


async def measure(direct: int, relayed: int, options: argparse.Namespace) -> dict[str, Any]:
    places = {"direct": direct, "relayed": relayed}
    levels = [int(level) for level in options.concurrency.split(",")]
    for port in places.values():
        await drive(port, max(levels), 0.5)
    cases = [*((level, 0.0) for level in levels), (max(levels), options.rate)]
    rounds = []
    for _ in range(options.rounds):
        for level, rate in cases:
            rounds.append({name: await drive(port, level, options.seconds, rate) for name, port in places.items()})
    for one in rounds:
        one["throughput_ratio"] = round(one["relayed"]["requests_per_s"] / one["direct"]["requests_per_s"], 3)
        one["added_p50_ms"] = round(one["relayed"]["p50_ms"] - one["direct"]["p50_ms"], 4)
    digests = [await audio_digest(port) for port in places.values() for _ in range(5)]
    return {
        "cores": len(os.sched_getaffinity(0)),
        "router": options.router,
        "audio_identical": len(set(digests)) == 1,
        "rounds": rounds,
    }


def start(*command: str) -> tuple[subprocess.Popen[str], int]:
    """A process that says where it listens."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if found := LISTENS.search(line):
            return process, int(found[2])
    raise SystemExit(f"{command} ended with status {process.wait()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--concurrency", default="1,32")
    parser.add_argument("--rate", type=float, default=1500.0, help="requests/s of the paced measurement")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stand-in", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("router", nargs="*", help="further arguments of `sgl-omni router`, after --")
    options = parser.parse_args()
    if options.stand_in:
        uvloop.run(stand_in())
        return
    worker, direct = start(sys.executable, __file__, "--stand-in")
    router, relayed = start(
        *(sys.executable, "-m", "sgl_omni.cli.main", "router", "--port", "0"),
        *("--worker-urls", f"http://127.0.0.1:{direct}", *options.router),
    )
    try:
        time.sleep(0.5)  # until the worker's health has been seen
        result = uvloop.run(measure(direct, relayed, options))
    finally:
        for process in (router, worker):
            process.send_signal(signal.SIGTERM)
        for process in (router, worker):
            process.communicate(timeout=60)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
