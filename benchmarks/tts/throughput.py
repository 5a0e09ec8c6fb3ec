"""Requests a second of a whole TTS pipeline of real size with random weights, closed loop.

A request is 156 prompt rows and 102 steps of 8 codebooks: 95 frames, 3.8 s of audio at 25 frames a second, through
frontend, engine and codec, in processes of their own. Prints one JSON object as its last line.

    python -m benchmarks.tts.throughput --concurrency 64,128,192 --seconds 20 --mps on --json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from benchmarks.ending import run

from sgl_omni.config.load import load_config
from sgl_omni.gpu.devices import usable_host
from sgl_omni.models.registry import PipelineRegistry
from sgl_omni.runtime.pipeline import Pipeline
from sgl_omni.topology.builder import build_plan
from sgl_omni.topology.host import virtual_host

FRAMES = 95
FRAME_SECONDS = 0.04
TINY = [
    *["--tts_engine.factory.shape", "tiny", "--frontend.factory.columns", "4", "--frontend.factory.codebook", "66"],
    *["--vocoder.factory.decoder_width", "32"],
]
"""For a look at the program on a machine without a GPU."""


async def drive(pipeline: Pipeline, concurrency: int, seconds: float, warm_up: float) -> dict[str, Any]:
    """Latencies of the requests that ended within ``seconds`` after the warm-up."""
    ended: list[tuple[float, float]] = []
    failures: list[str] = []
    stop = time.perf_counter() + warm_up + seconds
    seeds = iter(range(1 << 30))

    async def client() -> None:
        while (start := time.perf_counter()) < stop:
            payload = {"seed": next(seeds), "max_frames": FRAMES, "temperature": 0.8, "top_k": 50}
            try:
                result = await pipeline.submit(payload).result()
            except Exception as error:  # noqa: BLE001 - counted and reported with the run
                failures.append(repr(error)[:200])
                return
            assert result["vocoder"]["frames"] == FRAMES
            ended.append((time.perf_counter(), time.perf_counter() - start))

    await asyncio.gather(*(client() for _ in range(concurrency)))
    first, last = stop - seconds, stop
    inside = [latency for at, latency in ended if first <= at < last]
    p50, p90, p99 = np.percentile(inside or [0.0], (50, 90, 99))
    return {
        "concurrency": concurrency,
        "requests_per_s": len(inside) / seconds,
        "audio_seconds_per_s": len(inside) * FRAMES * FRAME_SECONDS / seconds,
        "latency_s": {"p50": p50, "p90": p90, "p99": p99},
        "failures": failures,
    }


async def measure(options: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    host = usable_host() or virtual_host()
    tiny = [] if host.platform == "cuda" else TINY
    config = load_config(
        Path(__file__).parent / "pipeline.yaml", [*tiny, "--mps", options.mps, *flags], registry=PipelineRegistry()
    )
    plan = build_plan(config, host)
    started = time.perf_counter()
    runs = []
    async with Pipeline(plan, max_in_flight=4096) as pipeline:
        ready = time.perf_counter() - started
        members = {i["name"]: psutil.Process(i["pid"]) for i in pipeline.health()["instances"]}
        members["client and coordinator"] = psutil.Process()
        if options.gate:
            print(json.dumps({"ready": ready}), flush=True)
            if not await asyncio.to_thread(sys.stdin.readline):
                raise SystemExit("who started this is gone")
        for concurrency in [int(c) for c in options.concurrency.split(",")]:
            before = {name: sum(p.cpu_times()[:2]) for name, p in members.items()}
            at = time.perf_counter()
            found = await drive(pipeline, concurrency, options.seconds, options.warm_up)
            wall = time.perf_counter() - at
            found["cores_busy"] = {n: (sum(p.cpu_times()[:2]) - before[n]) / wall for n, p in members.items()}
            runs.append(found)
            if not options.json:
                print(json.dumps(found), file=sys.stderr, flush=True)
        await pipeline.refresh()
        gauges = pipeline.stats()
    return {
        "benchmark": "tts-throughput",
        "platform": host.platform,
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "mps": options.mps,
        "flags": flags,
        "seconds_to_ready": ready,
        "runs": runs,
        "gauges": gauges,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--concurrency", default="64,128,192")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--warm-up", type=float, default=5.0)
    parser.add_argument("--mps", default="off")
    parser.add_argument("--gate", action="store_true", help="say when ready, and begin at a line of standard input")
    parser.add_argument("--json", action="store_true", help="only the JSON object")
    options, flags = parser.parse_known_args()
    print(json.dumps(run(measure(options, flags))))


if __name__ == "__main__":
    main()
