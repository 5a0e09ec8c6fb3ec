"""Speech over HTTP, closed loop: time to first audio, real-time factor and throughput at several concurrencies.

Starts its own server unless --url is given. Rounds visit the concurrencies in turn, so that a drifting machine
touches all of them; the ratio to the first concurrency is taken within a round. Prints JSON, every round included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import httpx

TEXTS = (
    "The children walked to school in the rain this morning.",
    "Could you please turn down the music a little?",
    "We are planning a short trip to the coast next month.",
    "Please leave your shoes by the front door.",
    "The library is open every day except Sunday.",
    "A strong wind blew the leaves across the street.",
    "Do you know where the nearest gas station is?",
    "Thank you for calling, how can I help you today?",
)
READY = re.compile(r"ready: \S+ on (http://\S+)")


@dataclass(frozen=True)
class Spoken:
    """One request: seconds to first audio, seconds in all, seconds of audio."""

    first: float
    total: float
    audio: float


async def speak(client: httpx.AsyncClient, text: str, voice: str) -> Spoken:
    request = {"model": "demo-voice", "input": text, "voice": voice, "response_format": "pcm"}
    begin = time.perf_counter()
    first = 0.0
    size = 0
    async with client.stream("POST", "/v1/audio/speech", json=request) as response:
        response.raise_for_status()
        rate = int(response.headers["X-Sample-Rate"])
        async for piece in response.aiter_raw():
            first = first or time.perf_counter() - begin
            size += len(piece)
    return Spoken(first, time.perf_counter() - begin, size / 2 / rate)


async def drive(client: httpx.AsyncClient, concurrency: int, requests: int, voice: str) -> dict[str, Any]:
    """`requests` requests from `concurrency` callers that each wait for their last one."""
    waiting = iter(range(requests))
    done: list[Spoken] = []

    async def caller() -> None:
        for i in waiting:
            done.append(await speak(client, TEXTS[i % len(TEXTS)], voice))

    begin = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(concurrency)))
    wall = time.perf_counter() - begin
    return {
        "concurrency": concurrency,
        "requests": len(done),
        "requests_per_s": round(len(done) / wall, 2),
        "audio_s_per_s": round(sum(s.audio for s in done) / wall, 2),
        "first_audio_ms_median": round(median(s.first for s in done) * 1000, 1),
        "first_audio_ms_max": round(max(s.first for s in done) * 1000, 1),
        "rtf_median": round(median(s.total / s.audio for s in done), 4),
        "rtf_max": round(max(s.total / s.audio for s in done), 4),
    }


async def measure(url: str, options: argparse.Namespace) -> dict[str, Any]:
    levels = [int(c) for c in options.concurrency.split(",")]
    rounds: list[list[dict[str, Any]]] = []
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=None)) as client:
        await drive(client, max(levels), 2 * max(levels), options.voice)
        for _ in range(options.rounds):
            rounds.append([await drive(client, c, max(options.requests, 4 * c), options.voice) for c in levels])
    ratios = {
        level: [round(r[i]["audio_s_per_s"] / r[0]["audio_s_per_s"], 2) for r in rounds]
        for i, level in enumerate(levels)
    }
    return {"cores": len(os.sched_getaffinity(0)), "throughput_ratio_to_first": ratios, "rounds": rounds}


def start_server(arguments: list[str]) -> tuple[subprocess.Popen[str], str, float]:
    """The server, its address, and the seconds until it was ready."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "sgl_omni.cli.main", "serve", "--port", "0", *arguments]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    for line in server.stderr:
        if found := READY.search(line):
            return server, found[1], time.perf_counter() - begin
    raise SystemExit(f"the server ended with status {server.wait()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--concurrency", default="1,8", help="comma-separated; the first is what ratios refer to")
    parser.add_argument("--requests", type=int, default=16, help="for each concurrency and round (at least 4 a caller)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--voice", default="rms")
    parser.add_argument("--url", help="a running server; otherwise one is started with the arguments that follow --")
    parser.add_argument("server", nargs="*", help="arguments of `sgl-omni serve` (default: --model-path demo-voice)")
    options = parser.parse_args()
    if options.url:
        print(json.dumps(asyncio.run(measure(options.url, options))))
        return
    server, url, start_seconds = start_server(options.server or ["--model-path", "demo-voice"])
    try:
        result = asyncio.run(measure(url, options))
    finally:
        begin = time.perf_counter()
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)
    result["start_to_ready_s"] = round(start_seconds, 2)
    result["sigterm_to_gone_s"] = round(time.perf_counter() - begin, 2)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
