"""What it costs to hand a tensor on: by device memory or by the host's, on one card and across two."""

from __future__ import annotations

import asyncio
import time
from typing import Any, NamedTuple

import numpy as np
from benchmarks.several.attempts import Attempt, Attempts

from sgl_omni.runtime.pipeline import Pipeline
from sgl_omni.topology.plan import EdgePlan, InstancePlan, Plan, PlatformName, ProcessPlan, StagePlan, Transport

KIB, MIB = 2**10, 2**20
SIZES = (64 * KIB, 256 * KIB, 1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB)


class Way(NamedTuple):
    """From a process on the first device to one on the second. ``mps``: on a GPU both are clients of a daemon."""

    devices: tuple[int, int]
    transport: Transport
    mps: bool = False


WAYS = {
    "device, same card": Way((0, 0), "cuda_ipc"),
    "device, same card, MPS": Way((0, 0), "cuda_ipc", mps=True),
    "device, across cards": Way((0, 1), "cuda_ipc"),
    "host, same card": Way((0, 0), "shm"),
    "host, across cards": Way((0, 1), "shm"),
}
POOL_BYTES = 2**30
"""Room for sixteen of the largest, so that the pool is not what is measured."""
AT_ONCE = 8


def plan_of(way: Way, platform: PlatformName) -> Plan:
    mps = way.mps and platform == "cuda"
    stages = (
        StagePlan(
            name="source",
            process="source",
            factory_path="benchmarks.several.transfer_stages.create_source",
            next=("sink",),
            stream_to=("sink",),
            gpu=True,
            transport_bytes=POOL_BYTES,
        ),
        StagePlan(
            name="sink",
            process="sink",
            factory_path="benchmarks.several.transfer_stages.create_sink",
            terminal=True,
            gpu=True,
        ),
    )
    order = ("source", "sink")
    places = zip(order, way.devices, strict=True)
    return Plan(
        name="transfer",
        model_path=None,
        platform=platform,
        entry="source",
        stages=stages,
        processes=tuple(ProcessPlan(name=name, stages=(name,)) for name in order),
        instances=tuple(
            InstancePlan(name=name, process=name, stages=(name,), device=at, mps=mps) for name, at in places
        ),
        edges=(
            EdgePlan(source="source", target="sink", kind="payload", transport=way.transport),
            EdgePlan(source="source", target="sink", kind="stream", transport=way.transport),
        ),
        mps={way.devices[0]: order} if mps else {},
        spawn_waves=(order,),
        shutdown_order=(order,),
    )


class Transfer:
    """A running pair of stages on one way."""

    def __init__(self, pipeline: Pipeline, seconds: float) -> None:
        self._pipeline = pipeline
        self._seconds = seconds

    async def send(self, size: int, chunks: int = 0, *, check: bool = False) -> float:
        """Seconds until the last byte is on the receiver's device and said to be."""
        at = time.perf_counter()
        result = await self._pipeline.submit({"bytes": size, "chunks": chunks, "check": check}).result()
        took = time.perf_counter() - at
        found = result["sink"]
        if found["wrong"] or found["bytes"] != size * max(chunks, 1):
            raise RuntimeError(f"of {max(chunks, 1)} times {size} bytes arrived {found}")
        return took

    async def alone(self, size: int) -> tuple[float, float]:
        """The median seconds of requests one after another, without a tensor and with one, in turn."""
        end = time.perf_counter() + self._seconds
        found = [(await self.send(0), await self.send(size)) for _ in range(10)]
        while time.perf_counter() < end:
            found.append((await self.send(0), await self.send(size)))
        empty, whole = np.median(np.array(found), axis=0)
        return float(empty), float(whole)

    async def by_device(self) -> int:
        await self._pipeline.refresh()
        return int(self._pipeline.stats()["instances"]["source"]["device_sent_total"])

    async def measure(self, size: int) -> Attempt:
        """After a warm-up, which opens the blocks and looks at every byte."""
        for _ in range(3):
            await asyncio.gather(*(self.send(size, check=True) for _ in range(AT_ONCE)))
            await self.send(size, 4, check=True)
        before = await self.by_device()
        empty, alone = await self.alone(size)
        at, end = time.perf_counter(), time.perf_counter() + self._seconds

        async def client() -> int:
            count = 0
            while time.perf_counter() < end:
                await self.send(size)
                count += 1
            return count

        sent = sum(await asyncio.gather(*(client() for _ in range(AT_ONCE))))
        wall = time.perf_counter() - at
        chunks = max(8, min(256, int(self._seconds * 2**30) // size))
        streams = [await self.send(size, chunks) for _ in range(3)]
        return {
            "added_p50_ms": 1e3 * (alone - empty),
            "empty_p50_ms": 1e3 * empty,
            "payloads_bytes_per_s": size * sent / wall,
            "chunks": chunks,
            "chunk_ms": [1e3 * took / chunks for took in streams],
            "stream_bytes_per_s": [size * chunks / took for took in streams],
            "by_device": await self.by_device() - before,
        }


async def measure_way(attempts: Attempts, way: str, sizes: tuple[int, ...], seconds: float) -> Attempt:
    platform: PlatformName = "cuda" if attempts.on_gpu else "cpu"
    found: dict[str, Any] = {}
    begun = time.perf_counter()
    async with Pipeline(plan_of(WAYS[way], platform)) as pipeline:
        found["seconds_to_ready"] = time.perf_counter() - begun
        found["routes"] = pipeline.health()["routes"]
        transfer = Transfer(pipeline, seconds)
        found["sizes"] = {size: await transfer.measure(size) for size in sizes}
    return found


async def measure(
    attempts: Attempts,
    *,
    seconds: float,
    sizes: tuple[int, ...] = SIZES,
    rounds: int = 1,
    ways: tuple[str, ...] = tuple(WAYS),
) -> None:
    for number in range(rounds):
        for way in ways:
            what = {"way": way, "round": number}
            await attempts.run("transfer", what, lambda w=way: measure_way(attempts, w, sizes, seconds), 180)  # type: ignore[misc]


def ceilings(size: int = 256 * MIB) -> Attempt:
    """Bytes a second of plain copies on this machine's first two GPUs; to be called in a process of its own."""
    import torch

    def rate(target: Any, source: Any) -> float:
        seconds = []
        for _ in range(8):
            torch.cuda.synchronize(0)
            torch.cuda.synchronize(1)
            at = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(0)
            torch.cuda.synchronize(1)
            seconds.append(time.perf_counter() - at)
        return size / min(seconds)

    here, beside = (torch.ones(size, dtype=torch.uint8, device="cuda:0") for _ in range(2))
    there = torch.ones(size, dtype=torch.uint8, device="cuda:1")
    pinned = torch.ones(size, dtype=torch.uint8).pin_memory()
    return {
        "peer_access": [torch.cuda.can_device_access_peer(*pair) for pair in ((0, 1), (1, 0))],
        "same_card_bytes_per_s": rate(beside, here),
        "across_bytes_per_s": rate(there, here),
        "to_host_bytes_per_s": rate(pinned, here),
        "from_host_bytes_per_s": rate(there, pinned),
    }
