"""Routing policies over colocated replicas: real runs, and a simulator that is driven by measured service times.

1. measure: one demo-voice server on its share of the cores gives characters/s at several numbers of requests at once.
2. real: every policy under every load, in turn, through `sgl-omni router` over several servers, each on its cores.
   All policies get the same texts at the same times.
3. simulate: the same policies (the router's own code), loads and seeds over replicas that share their measured speed
   among the requests they hold; first as many as were real, to see how far to trust it, then more.

Prints JSON: all runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from urllib.request import urlopen

from sgl_omni.bench.measure import Load as Offered
from sgl_omni.bench.measure import measure, percentiles
from sgl_omni.bench.study import Launched, parse_cores
from sgl_omni.bench.workload import Workload, arrivals, load_texts, parse_mix
from sgl_omni.router.load import Load
from sgl_omni.router.policy import POLICIES, make_policy

SERVE = ["serve", "--model-path", "demo-voice", "--platform", "cpu", "--port", "0"]
EQUAL_TEXT = "You will find the keys under the blue flower pot."
LEVELS = (1, 2, 4, 8, 16)
LOAD_INTERVAL = 0.5
BURST = 8


def workload(kind: str, seed: int) -> Workload:
    """``equal``: one text; ``mixed`` and ``bursty``: 10/60/30 short, medium and long ones."""
    if kind == "equal":
        return Workload((EQUAL_TEXT,), seed)
    return Workload(load_texts("english"), seed, parse_mix("10/60/30"))


def burst_of(kind: str) -> int:
    return BURST if kind == "bursty" else 1


def mean_characters(kind: str) -> float:
    texts = workload(kind, 0).draw(0)
    return sum(len(next(texts)) for _ in range(2000)) / 2000


# 1. What one replica does.


async def measure_speed(cores: list[int], seconds: float) -> dict[int, float]:
    """Characters/s of one replica by requests at once, over the mixed texts."""
    speed = {}
    async with Launched(SERVE, cores, {}) as server:
        url = await server.url(120)
        for level in LEVELS:
            load = Offered(concurrency=level, warmup=1.5, seconds=seconds)
            found = await measure([url], workload("mixed", 0), load, gpu=None, streams=level)
            speed[level] = found["requests_per_s"] * found["mean_characters"]
    return speed


# 2. Real runs.


async def real_runs(blocks: list[list[int]], rates: dict[str, float], options: argparse.Namespace) -> list[Any]:
    """Every policy under every load, ``repeats`` times; servers stay, the router is fresh in each run."""
    runs = []
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(Launched(SERVE, block, {})) for block in blocks]
        urls = [await server.url(120) for server in servers]
        for repeat in range(options.repeats):
            for kind, rate in rates.items():
                for policy in POLICIES:
                    runs.append(await real_run(urls, kind, rate, policy, repeat, options))
                    print(json.dumps({k: v for k, v in runs[-1].items() if k != "latency"}), file=sys.stderr)
    return runs


async def real_run(
    urls: list[str], kind: str, rate: float, policy: str, repeat: int, options: argparse.Namespace
) -> dict[str, Any]:
    arguments = ["router", "--port", "0", "--worker-urls", ",".join(urls), "--policy", policy, "--seed", "1"]
    async with Launched([*arguments, "--worker-capacity", str(options.capacity)], None, {}) as router:
        url = await router.url(60)
        load = Offered(rate=rate, burst=burst_of(kind), warmup=options.warmup, seconds=options.seconds)
        found = await measure([url], workload(kind, repeat), load, watched=urls, gpu=None)
        shares = await asyncio.to_thread(shares_of, url)
    return {
        "kind": kind, "policy": policy, "repeat": repeat, "rate": round(rate, 3), "requests": found["requests"],
        "errors": found["errors"], "ttfa_p50": found["ttfa"]["p50"], "ttfa_p95": found["ttfa"]["p95"],
        "latency_p50": found["latency"]["p50"], "latency_p95": found["latency"]["p95"], "shares": shares,
    }  # fmt: skip


def shares_of(url: str) -> list[float]:
    """Each worker's part of the requests."""
    with urlopen(f"{url}/workers", timeout=10) as answer:
        counts = [worker["outcomes"]["ok"] for worker in json.load(answer)["workers"]]
    return [round(count / max(1, sum(counts)), 3) for count in counts]


# 3. The simulator.


@dataclass
class Replica:
    """Shares ``speed`` among the requests it holds; ``load`` is what the router read last."""

    speed: dict[int, float]
    in_flight: int = 0
    work: float = 0.0
    load: Load | None = None
    held: list[list[float]] = field(default_factory=list)  # [characters left, characters, arrival]

    def rate(self) -> float:
        """Characters/s for each request, between measured levels by straight lines."""
        n = len(self.held)
        levels = sorted(self.speed)
        if n >= levels[-1]:
            return self.speed[levels[-1]] / n
        for low, high in pairwise(levels):
            if low <= n <= high:
                part = (n - low) / (high - low)
                return (self.speed[low] * (1 - part) + self.speed[high] * part) / n
        return self.speed[levels[0]]

    def next_end(self) -> float:
        """Seconds until the first of its requests is done."""
        return min(left for left, _, _ in self.held) / self.rate() if self.held else float("inf")

    def advance(self, seconds: float) -> list[tuple[float, float]]:
        """``(arrival, characters)`` of those that end."""
        if not self.held:
            return []
        done = seconds * self.rate()
        for request in self.held:
            request[0] -= done
        ended = [(arrival, size) for left, size, arrival in self.held if left <= 1e-9]
        self.held = [request for request in self.held if request[0] > 1e-9]
        for _, size in ended:
            self.in_flight -= 1
            self.work -= size
        return ended


def simulate(
    speed: dict[int, float],
    replicas: int,
    policy: str,
    kind: str,
    rate: float,
    seconds: float,
    seed: int,
    capacity: int,
) -> dict[str, Any]:
    """Latencies of one policy under one load. ``rate`` is of all replicas together."""
    chooser = make_policy(policy, capacity=capacity, seed=seed)
    pool = [Replica(speed) for _ in range(replicas)]
    texts = workload(kind, seed).draw(0)
    waiting = [(at, len(next(texts))) for at in arrivals(rate, seconds, seed, burst_of(kind))]
    now, next_reading, latencies = 0.0, 0.0, []
    while waiting or any(r.held for r in pool):
        step = min(min(r.next_end() for r in pool), (waiting[0][0] if waiting else float("inf")) - now)
        step = max(0.0, min(step, next_reading - now))
        now += step
        for replica in pool:
            latencies += [now - arrival for arrival, _ in replica.advance(step)]
        if now >= next_reading:
            next_reading = now + LOAD_INTERVAL
            for replica in pool:
                replica.load = Load(len(replica.held), 0, 0.5, replica.in_flight)
        while waiting and waiting[0][0] <= now:
            at, size = waiting.pop(0)
            chosen = chooser.choose(pool, size)
            chosen.held.append([size, size, at])
            chosen.in_flight += 1
            chosen.work += size
    found = percentiles(latencies)
    return {"kind": kind, "policy": policy, "replicas": replicas, "rate": round(rate, 3), "seed": seed,
            "requests": len(latencies), "latency_p50": found["p50"], "latency_p95": found["p95"]}  # fmt: skip


async def study(options: argparse.Namespace) -> dict[str, Any]:
    cores = parse_cores(options.cores) if options.cores else sorted(os.sched_getaffinity(0))
    share = len(cores) // options.replicas
    blocks = [cores[i * share : (i + 1) * share] for i in range(options.replicas)]
    if not share:
        raise SystemExit(f"{len(cores)} cores are too few for {options.replicas} replicas; choose fewer --replicas")
    speed = await measure_speed(blocks[0], options.seconds)
    best = max(speed.values())
    rates = {
        kind: options.utilization * options.replicas * best / mean_characters(kind)
        for kind in ("equal", "mixed", "bursty")
    }
    result: dict[str, Any] = {"cores": len(cores), "replicas": options.replicas, "capacity": options.capacity,
                              "characters_per_s": speed, "rates": rates}  # fmt: skip
    result["real"] = [] if options.no_real else await real_runs(blocks, rates, options)
    begin = time.perf_counter()
    result["simulated"] = [
        simulate(speed, n, policy, kind, rate * n / options.replicas, options.simulated_seconds, seed, options.capacity)
        for n in dict.fromkeys((options.replicas, 4, 8))
        for kind, rate in rates.items()
        for policy in POLICIES
        for seed in range(options.simulated_seeds)
    ]
    result["simulated_in_s"] = round(time.perf_counter() - begin, 1)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--cores", help="of all replicas together, as 0-3; all that there are if left out")
    parser.add_argument("--utilization", type=float, default=0.6, help="offered load, of the replicas' best together")
    parser.add_argument("--capacity", type=int, default=4, help="requests at which fill_first goes on to the next")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--warmup", type=float, default=2.0)
    parser.add_argument("--seconds", type=float, default=10.0, help="of a real run's window")
    parser.add_argument("--simulated-seconds", type=float, default=300.0)
    parser.add_argument("--simulated-seeds", type=int, default=5)
    parser.add_argument("--no-real", action="store_true", help="measure one replica and simulate only")
    print(json.dumps(asyncio.run(study(parser.parse_args()))))


if __name__ == "__main__":
    main()
