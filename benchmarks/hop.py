"""What a hop costs: a payload through three pass-through stages and back, closed loop, client in the server's process.

Prints one JSON object as its last line. No figure of it is asserted anywhere: machines are noisy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import uvloop

from sgl_omni.runtime.pipeline import Pipeline
from sgl_omni.runtime.stage import FunctionStage, Payload, Request
from sgl_omni.topology.plan import InstancePlan, Plan, ProcessPlan, StagePlan

SIZES = {"1KB": 1024, "64KB": 64 * 1024, "1MB": 1024 * 1024, "8MB": 8 * 1024 * 1024}
WARM_UP_SECONDS = 1.0
IDLE_SECONDS = 5.0


async def hand_on(payload: Payload, request: Request) -> Payload:
    return payload


def pass_through() -> FunctionStage:
    """The factory of all three stages."""
    return FunctionStage(hand_on, concurrency=1024)


def plan_of(processes: int) -> Plan:
    """first -> second -> third, in three processes or in one."""
    names = ("first", "second", "third")
    home = dict(zip(names, names if processes == 3 else ("all",) * 3, strict=True))
    stages = tuple(
        StagePlan(
            name=name,
            process=home[name],
            factory_path="hop.pass_through",
            next=names[i + 1 : i + 2],
            terminal=name == "third",
        )
        for i, name in enumerate(names)
    )
    groups = {p: tuple(n for n in names if home[n] == p) for p in dict.fromkeys(home.values())}
    order = tuple(groups)
    return Plan(
        name="hop",
        model_path=None,
        platform="cpu",
        entry="first",
        stages=stages,
        processes=tuple(ProcessPlan(name=p, stages=s) for p, s in groups.items()),
        instances=tuple(InstancePlan(name=p, process=p, stages=s) for p, s in groups.items()),
        edges=(),
        spawn_waves=(order,),
        shutdown_order=(order,),
    )


async def drive(pipeline: Pipeline, payload: Payload, concurrency: int, seconds: float) -> list[float]:
    """Latencies in seconds of all requests that ended within `seconds`."""
    latencies: list[float] = []
    end = time.perf_counter() + seconds

    async def client() -> None:
        while (start := time.perf_counter()) < end:
            result = await pipeline.submit(payload).result()
            latencies.append(time.perf_counter() - start)
            assert len(result["third"]["data"]) == len(payload["data"])
            del result

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return latencies


def cpu_seconds(processes: list[psutil.Process]) -> float:
    return sum(sum(p.cpu_times()[:2]) for p in processes)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    size = SIZES[options.payload]
    data = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    payload: Payload = {"data": data if size > SIZES["64KB"] else data.tobytes()}
    async with Pipeline(plan_of(options.processes), max_in_flight=4096) as pipeline:
        members = [psutil.Process(i["pid"]) for i in pipeline.health()["instances"]] + [psutil.Process()]
        await drive(pipeline, payload, options.concurrency, WARM_UP_SECONDS)
        busy = cpu_seconds(members)
        start = time.perf_counter()
        latencies = await drive(pipeline, payload, options.concurrency, options.seconds)
        wall = time.perf_counter() - start
        busy = cpu_seconds(members) - busy
        await asyncio.sleep(1.5)
        idle = cpu_seconds(members)
        await asyncio.sleep(IDLE_SECONDS)
        idle = cpu_seconds(members) - idle
    p50, p90, p99 = np.percentile(np.array(latencies) * 1000, (50, 90, 99))
    return {
        "payload": options.payload,
        "concurrency": options.concurrency,
        "processes": options.processes,
        "seconds": options.seconds,
        "requests": len(latencies),
        "requests_per_s": round(len(latencies) / wall, 1),
        "p50_ms": round(float(p50), 3),
        "p90_ms": round(float(p90), 3),
        "p99_ms": round(float(p99), 3),
        "cpu_cores_busy": round(busy / wall, 2),
        "cpu_percent_idle": round(100 * idle / IDLE_SECONDS, 2),
        "cores": len(os.sched_getaffinity(0)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--payload", choices=SIZES, default="1KB")
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--processes", type=int, choices=(1, 3), default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    result = uvloop.run(measure(options))
    if not options.json:
        for key, value in result.items():
            print(f"{key:>18}: {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
