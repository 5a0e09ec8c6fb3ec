"""One measurement: a client process per address, the servers' own gauges beside it, and the figures of both."""

from __future__ import annotations

import asyncio
import math
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any
from urllib.request import urlopen

import msgspec

from sgl_omni.bench.activity import Sample, gpu_sampler
from sgl_omni.bench.chat import ChatOptions
from sgl_omni.bench.child import before_exec
from sgl_omni.bench.client import Orders, Record
from sgl_omni.bench.transcription import TranscriptionOptions
from sgl_omni.bench.workload import Workload
from sgl_omni.errors import OmniError
from sgl_omni.gauges import read_engine_gauges

CLIENT_START_SECONDS = 1.5
SAMPLE_SECONDS = 0.25
PLATEAU_GAIN = 1.05
"""A level that gives less than this times the best before it no longer climbs; two in a row end a sweep."""
MOST_ERRORS_SHOWN = 5


class BenchError(OmniError):
    """A measurement could not be made; says of what and why."""

    code = "bench"


@dataclass(frozen=True, slots=True)
class Load:
    """What is offered to each address: ``concurrency`` callers, or ``rate`` requests/s, ``burst`` at once. Seconds."""

    concurrency: int = 0
    rate: float = 0.0
    warmup: float = 3.0
    seconds: float = 15.0
    timeout: float = 120.0
    burst: int = 1


async def measure(
    urls: Sequence[str],
    workload: Workload,
    load: Load,
    *,
    watched: Sequence[str] | None = None,
    gpu: int | None = 0,
    cores: Sequence[int] | None = None,
    streams: int = 0,
    chat: ChatOptions | None = None,
    transcription: TranscriptionOptions | None = None,
) -> dict[str, Any]:
    """Drives each of ``urls`` by a process of its own and returns the figures.

    ``watched`` are the servers whose /metrics are read, the driven ones if None. ``cores`` are the clients'.
    ``streams`` is the number of the first client's stream of texts. With ``chat`` they are asked, with
    ``transcription`` they are paths of recordings to be written down, else they are spoken.

    Raises ``BenchError`` where a client process fails.
    """
    begin = time.monotonic() + CLIENT_START_SECONDS
    orders = [
        Orders(
            url,
            workload,
            streams + i,
            begin,
            load.warmup,
            load.seconds,
            concurrency=load.concurrency,
            rate=load.rate,
            burst=load.burst,
            timeout=load.timeout,
            chat=chat,
            transcription=transcription,
        )
        for i, url in enumerate(urls)
    ]
    sampling = asyncio.ensure_future(sample(watched if watched is not None else urls, begin, load, gpu))
    clients = [asyncio.ensure_future(run_client(order, cores)) for order in orders]
    try:
        records = await asyncio.gather(*clients)
        gauges, activity = await sampling
    finally:
        for task in (*clients, sampling):
            task.cancel()
        await asyncio.gather(*clients, sampling, return_exceptions=True)
    figures_of = summarise_chat if chat else summarise_transcription if transcription else summarise
    return {
        "concurrency": load.concurrency or None,
        "rate": load.rate or None,
        **figures_of(records, load),
        "per_replica": [
            {"url": url, **figures_of([own], load, short=True)} for url, own in zip(urls, records, strict=True)
        ],
        "saturation": gauges,
        "gpu": activity,
        "timeline": timeline(records, load),
    }


async def run_client(orders: Orders, cores: Sequence[int] | None) -> list[Record]:
    """One client process, which dies with the call."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sgl_omni.bench.client"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=before_exec(cores, signal.SIGKILL),
    )
    try:
        out, err = await process.communicate(msgspec.json.encode(orders))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    words = " ".join(err.decode(errors="replace").strip().splitlines()[-1:])
    if process.returncode:
        raise BenchError(f"the client of {orders.url} ended with status {process.returncode}: {words}")
    try:
        return msgspec.json.decode(out, type=list[Record])
    except msgspec.DecodeError as error:
        raise BenchError(f"the client of {orders.url} left {len(out)} bytes, no record: {error}; {words}") from error


async def sample(
    urls: Sequence[str], begin: float, load: Load, gpu: int | None
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """The servers' ``running`` and ``queued``, and the GPU, within the window."""
    seen: dict[str, list[dict[str, float]]] = {url: [] for url in urls}
    samples: list[Sample] = []
    sampler = gpu_sampler(gpu)
    start, end = begin + load.warmup, begin + load.warmup + load.seconds
    await asyncio.sleep(max(0.0, start - time.monotonic()))
    while time.monotonic() < end:
        found = await asyncio.gather(*(asyncio.to_thread(read_gauges, url) for url in urls))
        for url, gauges in zip(urls, found, strict=True):
            if gauges:
                seen[url].append(gauges)
        if sampler is not None:
            samples.append(sampler.sample())
        await asyncio.sleep(SAMPLE_SECONDS)
    if sampler is not None:
        sampler.close()
    saturation = [{"url": url, **over_window(each)} for url, each in seen.items()]
    return saturation, over_window(samples) if samples else None


def read_gauges(url: str) -> dict[str, float]:
    """``{"running", "queued"}`` over all engines of a server; empty where it does not tell."""
    try:
        with urlopen(f"{url}/metrics", timeout=5) as answer:
            found = read_engine_gauges(answer.read())
    except OSError:
        return {}
    return {} if found is None else {"running": float(found.running), "queued": float(found.queued)}


def over_window(samples: Sequence[dict[str, float]]) -> dict[str, Any]:
    names = sorted({name for each in samples for name in each})
    found: dict[str, Any] = {"samples": len(samples)}
    for name in names:
        values = [each[name] for each in samples if name in each]
        found[name] = {"mean": round(fmean(values), 3), "max": round(max(values), 3)}
    return found


def within_window(clients: Sequence[Sequence[Record]], load: Load) -> tuple[list[Record], list[Record], list[Record]]:
    """Requests that ended well within the window, those that began in it, and those that failed in it or later."""
    start, end = load.warmup, load.warmup + load.seconds
    records = [record for client in clients for record in client]
    good = [r for r in records if r.error is None]
    ended = [r for r in good if start <= r.ended < end]
    begun = [r for r in good if start <= r.begun < end]
    failed = [r for r in records if r.error is not None and start <= r.ended]
    return ended, begun, failed


def summarise(clients: Sequence[Sequence[Record]], load: Load, *, short: bool = False) -> dict[str, Any]:
    """Throughput by what ended within the window; latencies of what began in it. Times in seconds."""
    ended, begun, failed = within_window(clients, load)
    figures = {
        "requests_per_s": round(len(ended) / load.seconds, 3),
        "audio_s_per_s": round(sum(r.audio for r in ended) / load.seconds, 3),
        "requests": len(begun),
        "errors": len(failed),
    }
    ttfa = percentiles([r.first - r.begun for r in begun if r.first is not None])
    latency = percentiles([r.ended - r.begun for r in begun])
    if short:
        return {**figures, "ttfa_p50": ttfa["p50"], "latency_p50": latency["p50"]}
    return {
        **figures,
        "error_examples": sorted({r.error for r in failed if r.error})[:MOST_ERRORS_SHOWN],
        "ttfa": ttfa,
        "latency": latency,
        "rtf": percentiles([(r.ended - r.begun) / r.audio for r in begun if r.audio]),
        "mean_characters": round(fmean([r.characters for r in begun]), 1) if begun else None,
    }


def summarise_chat(clients: Sequence[Sequence[Record]], load: Load, *, short: bool = False) -> dict[str, Any]:
    """As ``summarise``, for text: ``ttft`` to the first of it, ``itl`` between its pieces, tokens of whole answers."""
    ended, begun, failed = within_window(clients, load)
    figures = {
        "requests_per_s": round(len(ended) / load.seconds, 3),
        "tokens_per_s": round(sum(r.tokens for r in ended) / load.seconds, 3),
        "requests": len(begun),
        "errors": len(failed),
    }
    ttft = percentiles([r.first - r.begun for r in begun if r.first is not None])
    latency = percentiles([r.ended - r.begun for r in begun])
    if short:
        return {**figures, "ttft_p50": ttft["p50"], "latency_p50": latency["p50"]}
    return {
        **figures,
        "error_examples": sorted({r.error for r in failed if r.error})[:MOST_ERRORS_SHOWN],
        "ttft": ttft,
        "itl": percentiles([gap for r in begun for gap in r.gaps]),
        "latency": latency,
        "mean_tokens": round(fmean([r.tokens for r in begun]), 1) if begun else None,
        "mean_characters": round(fmean([r.characters for r in begun]), 1) if begun else None,
    }


def summarise_transcription(clients: Sequence[Sequence[Record]], load: Load, *, short: bool = False) -> dict[str, Any]:
    """As ``summarise``, for recordings: ``ttft`` to the first text; seconds of audio are those that were heard."""
    figures = summarise(clients, load, short=short)
    if short:
        figures["ttft_p50"] = figures.pop("ttfa_p50")
        return figures
    start, end = load.warmup, load.warmup + load.seconds
    good = [record for client in clients for record in client if record.error is None]
    heard = [record.audio for record in good if start <= record.begun < end]
    tokens = sum(record.tokens for record in good if start <= record.ended < end)
    figures["ttft"] = figures.pop("ttfa")
    del figures["mean_characters"]
    return {
        **figures,
        "tokens_per_s": round(tokens / load.seconds, 3),
        "mean_audio_s": round(fmean(heard), 3) if heard else None,
    }


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """Nearest rank; None where there are no values."""
    ordered = sorted(values)

    def rank(share: float) -> float | None:
        return round(ordered[max(0, math.ceil(share * len(ordered)) - 1)], 5) if ordered else None

    return {"p50": rank(0.5), "p90": rank(0.9), "p95": rank(0.95), "p99": rank(0.99), "max": rank(1.0)}


def timeline(clients: Sequence[Sequence[Record]], load: Load) -> list[float]:
    """Requests that ended well in each second, warm-up included."""
    counts = [0.0] * math.ceil(load.warmup + load.seconds)
    for client in clients:
        for record in client:
            if record.error is None and record.ended < len(counts):
                counts[int(record.ended)] += 1
    return counts


class Sweep:
    """Which concurrency comes next: it doubles until two levels in a row no longer climb."""

    def __init__(self, first: int = 1, most: int = 512) -> None:
        self._next: int | None = first
        self._most = most
        self._best = 0.0
        self._flat = 0

    @property
    def level(self) -> int | None:
        """None: the plateau is reached, or the highest level was measured."""
        return self._next

    def take(self, requests_per_s: float) -> None:
        """The figure of the level that was measured."""
        assert self._next is not None
        self._flat = 0 if requests_per_s >= self._best * PLATEAU_GAIN else self._flat + 1
        self._best = max(self._best, requests_per_s)
        self._next = self._next * 2 if self._flat < 2 and self._next * 2 <= self._most else None
