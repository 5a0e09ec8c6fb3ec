"""Tensors that stay on their device between processes, in a real pipeline; memory files stand for the device."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from device_plans import MIB, device_plan
from running import Start, eventually
from sgl_omni.errors import ProcessExited, StageFailed
from sgl_omni.runtime.pipeline import Pipeline
from sgl_omni.runtime.routes import Look
from sgl_omni.topology.plan import InstancePlan, Plan

COUNT = 200_000


async def gauge(pipeline: Pipeline, instance: str, name: str) -> float:
    await pipeline.refresh()
    value: float = pipeline.stats()["instances"][instance][name]
    return value


async def settled(pipeline: Pipeline) -> None:
    """Every block has come back to the sender."""
    for _ in range(200):
        if not await gauge(pipeline, "make", "device_blocks_out"):
            return
        await asyncio.sleep(0.02)
    raise AssertionError("a block is still with the receiver")


async def test_tensors_arrive_whole_under_load_and_memory_stays_in_its_bounds(start: Start) -> None:
    pipeline = await start(device_plan(limit=8 * MIB))
    for _ in range(3):
        handles = [pipeline.submit({"count": COUNT + i, "first": i}) for i in range(24)]
        results = await asyncio.gather(*(handle.result() for handle in handles))
        assert all(r["check"] == {"equal": True, "untouched": True, "device": "cpu"} for r in results)
    await settled(pipeline)
    assert 0 < await gauge(pipeline, "make", "device_bytes") <= 8 * MIB
    assert await gauge(pipeline, "check", "device_bytes") == 0


async def test_every_payload_keeps_to_the_device_the_first_ones_too(start: Start) -> None:
    pipeline = await start(device_plan(limit=8 * MIB))
    handles = [pipeline.submit({"count": COUNT + i, "first": i}) for i in range(24)]
    results = await asyncio.gather(*(handle.result() for handle in handles))
    assert all(r["check"]["equal"] for r in results)
    assert await gauge(pipeline, "make", "device_sent_total") == 24


async def test_streams_wait_for_blocks_and_keep_to_the_device(start: Start) -> None:
    """Two at a time, with room for eight chunks in all and many more in a window."""
    pipeline = await start(device_plan(limit=16 * MIB, stream=True))
    asked = {"count": COUNT, "chunks": 40}
    await pipeline.submit({"count": COUNT, "chunks": 1}).result()  # opens the channel
    before = await gauge(pipeline, "make", "device_sent_total")
    handles = [pipeline.submit(asked) for _ in range(2)]
    results = await asyncio.gather(*(handle.result() for handle in handles))
    assert all(r["check"] == {"right": 40, "next": 40} for r in results)
    assert await gauge(pipeline, "make", "device_sent_total") - before == 80
    await settled(pipeline)


async def test_a_stream_that_waits_for_a_block_ends_with_an_abort(start: Start) -> None:
    pipeline = await start(device_plan(limit=2 * MIB, stream=True))
    await pipeline.submit({"count": COUNT, "chunks": 1}).result()
    handles = [pipeline.submit({"count": COUNT, "chunks": 100_000}) for _ in range(3)]
    await asyncio.sleep(0.3)
    for handle in handles:
        handle.abort()
    await settled(pipeline)
    assert (await pipeline.submit({"count": COUNT, "chunks": 9}).result())["check"] == {"right": 9, "next": 9}


async def test_a_payload_that_cannot_travel_fails_alone(start: Start) -> None:
    pipeline = await start(device_plan())
    handles = [pipeline.submit({"count": COUNT, "first": i, "sparse": i == 1}) for i in range(3)]
    results = await asyncio.gather(*(handle.result() for handle in handles), return_exceptions=True)
    assert [type(result) for result in results] == [dict, StageFailed, dict]
    assert (await pipeline.submit({"count": COUNT, "first": 1}).result())["check"]["equal"]
    await settled(pipeline)


async def test_streams_beside_many_payloads_have_their_turn(start: Start) -> None:
    """One block for all: a stream is not overtaken for ever by payloads that wait for it too."""
    pipeline = await start(device_plan(limit=2 * MIB, stream=True))
    long = pipeline.submit({"count": COUNT, "chunks": 100_000})
    await asyncio.sleep(0.3)
    short = [pipeline.submit({"count": COUNT, "chunks": 9}) for _ in range(4)]
    results = await asyncio.wait_for(asyncio.gather(*(handle.result() for handle in short)), 30)
    assert [r["check"] for r in results] == [{"right": 9, "next": 9}] * 4
    long.abort()
    await settled(pipeline)


async def test_without_the_transport_nothing_of_it_is_used(start: Start) -> None:
    pipeline = await start(device_plan(transport="shm"))
    for _ in range(2):
        assert (await pipeline.submit({"count": COUNT, "first": 1}).result())["check"]["equal"]
    assert await gauge(pipeline, "make", "device_bytes") == 0


async def test_aborts_on_either_side_give_every_block_back(start: Start) -> None:
    pipeline = await start(device_plan())
    await pipeline.submit({"count": COUNT, "first": 0}).result()
    before = [pipeline.submit({"count": COUNT, "first": i, "before": 0.3}) for i in range(8)]
    after = [pipeline.submit({"count": COUNT, "first": i, "after": 30}) for i in range(8)]
    await asyncio.sleep(0.2)
    for handle in (*before, *after):
        handle.abort()
    await eventually(lambda: pipeline.coordinator.pending == 0)
    await asyncio.sleep(0.3)
    await settled(pipeline)
    assert (await pipeline.submit({"count": COUNT, "first": 5}).result())["check"]["equal"]


@pytest.mark.parametrize("victim", ["make", "check"])
async def test_after_a_kill_the_other_side_holds_nothing_and_goes_on(start: Start, victim: str) -> None:
    pipeline = await start(device_plan(on_process_exit="restart"))
    for i in range(3):
        await pipeline.submit({"count": COUNT, "first": i}).result()
    pids = {i["name"]: i["pid"] for i in pipeline.health()["instances"]}
    handle = pipeline.submit({"count": COUNT, "first": 1, "before": 30 if victim == "make" else 0, "after": 30})
    await asyncio.sleep(0.2)
    os.kill(pids[victim], signal.SIGKILL)
    with pytest.raises(ProcessExited):
        await handle.result()
    if victim == "check":
        await asyncio.sleep(0.3)
        assert await gauge(pipeline, "make", "device_bytes") == 0
    await eventually(lambda: pipeline.status == "ready", 60)  # its start imports torch
    for i in range(3):
        assert (await pipeline.submit({"count": COUNT, "first": i}).result())["check"]["equal"]
    await settled(pipeline)
    assert await gauge(pipeline, "make", "device_bytes") > 0


async def test_the_way_to_another_device_is_tried_at_the_start_and_shown(start: Start) -> None:
    pipeline = await start(device_plan(devices=(0, 1)))
    assert pipeline.health()["routes"] == [{"from": "GPU 0", "to": "GPU 1", "by": "device", "reason": ""}]
    for i in range(4):
        assert (await pipeline.submit({"count": COUNT, "first": i}).result())["check"]["equal"]
        await settled(pipeline)
    assert await gauge(pipeline, "make", "device_sent_total") == 4
    assert await gauge(pipeline, "make", "device_sent_bytes_total") == 4 * 4 * COUNT


async def test_only_the_way_that_was_refused_leads_through_the_host(start: Start) -> None:
    """Two replicas, one on each device, and no peer access between these."""

    async def probe(plan: Plan, source: InstancePlan, target: InstancePlan, look: Look) -> str:
        return "" if source.device == target.device else "cuMemSetAccess failed: CUDA_ERROR_INVALID_DEVICE (101)"

    pipeline = await start(device_plan(devices=(0, 0, 1)), probe=probe)
    near, far = pipeline.health()["routes"]
    assert (near["by"], far["by"], far["to"]) == ("device", "host", "GPU 1")
    assert "CUDA_ERROR_INVALID_DEVICE" in far["reason"]
    for i in range(8):
        assert (await pipeline.submit({"count": COUNT, "first": i}).result())["check"]["equal"]
        await settled(pipeline)
    assert await gauge(pipeline, "make", "device_sent_total") == 4, "those to the near replica"
    assert await gauge(pipeline, "check@r1", "requests") == 0
