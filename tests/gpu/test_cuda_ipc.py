"""Tensors that stay on their GPU between processes; `test_device_tensors.py` has the same stages without one."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import tempfile
from collections.abc import AsyncIterator

import pytest
import torch

from device_plans import MIB, device_plan
from sgl_omni.errors import ProcessExited
from sgl_omni.gpu.cuda_blocks import device_memory
from sgl_omni.runtime.pipeline import Pipeline
from sgl_omni.topology.plan import Plan

pytestmark = pytest.mark.gpu
COUNT = 500_000


@pytest.fixture
async def started(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Pipeline]]:
    """Pipelines to end after the test; their run folder has a short path, as an MPS daemon's sockets need."""
    pipelines: list[Pipeline] = []
    with tempfile.TemporaryDirectory(prefix="omni-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield pipelines
        for pipeline in pipelines:
            await pipeline.stop(drain_timeout=0)


async def begin(started: list[Pipeline], plan: Plan) -> Pipeline:
    pipeline = Pipeline(plan)
    started.append(pipeline)
    await pipeline.start()
    return pipeline


async def gauge(pipeline: Pipeline, instance: str, name: str) -> float:
    await pipeline.refresh()
    value: float = pipeline.stats()["instances"][instance][name]
    return value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_block_keeps_what_is_written(dtype: torch.dtype) -> None:
    memory = device_memory(0)
    tensor = (torch.rand(1000, 700, device="cuda:0") * 5).to(dtype).T
    block = memory.create(memory.rounded(tensor.nbytes))
    block.write(tensor)
    fd = block.export()
    opened = memory.open(fd, block.size)
    os.close(fd)
    block.close()
    back = opened.read(dtype, tuple(tensor.shape))
    opened.close()
    assert back.device == tensor.device and torch.equal(back, tensor)


async def test_tensors_arrive_on_the_gpu_under_load(started: list[Pipeline]) -> None:
    pipeline = await begin(started, device_plan("cuda", limit=16 * MIB))
    for wave in range(3):
        handles = [pipeline.submit({"count": COUNT + i, "first": i}) for i in range(24)]
        results = [(await handle.result())["check"] for handle in handles]
        assert all(r["equal"] and r["untouched"] for r in results)
        if wave:
            assert "cuda:0" in {r["device"] for r in results}
    assert 0 < await gauge(pipeline, "make", "device_bytes") <= 16 * MIB


async def test_blocks_are_freed_when_the_receiver_is_killed(started: list[Pipeline]) -> None:
    pipeline = await begin(started, device_plan("cuda", on_process_exit="restart"))
    for i in range(3):
        await pipeline.submit({"count": COUNT, "first": i}).result()
    assert await gauge(pipeline, "make", "device_bytes") > 0
    handle = pipeline.submit({"count": COUNT, "first": 1, "after": 30})
    await asyncio.sleep(0.3)
    os.kill(next(i["pid"] for i in pipeline.health()["instances"] if i["name"] == "check"), signal.SIGKILL)
    with pytest.raises(ProcessExited):
        await handle.result()
    await asyncio.sleep(0.2)
    assert await gauge(pipeline, "make", "device_bytes") == 0
    for _ in range(600):
        if pipeline.status == "ready":
            break
        await asyncio.sleep(0.1)
    results = [(await pipeline.submit({"count": COUNT, "first": i}).result())["check"] for i in range(4)]
    assert all(r["equal"] for r in results) and results[-1]["device"] == "cuda:0"


@pytest.mark.parametrize("gpus", [1, 2])
async def test_streams_of_large_chunks_keep_to_the_device(started: list[Pipeline], gpus: int) -> None:
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    pipeline = await begin(started, device_plan("cuda", devices=(0, gpus - 1), limit=16 * MIB, stream=True))
    (route,) = pipeline.health()["routes"]
    await pipeline.submit({"count": COUNT, "chunks": 1}).result()
    before = await gauge(pipeline, "make", "device_sent_total")
    handles = [pipeline.submit({"count": COUNT, "chunks": 100}) for _ in range(2)]
    assert [(await handle.result())["check"] for handle in handles] == [{"right": 100, "next": 100}] * 2
    sent = await gauge(pipeline, "make", "device_sent_total") - before
    assert sent == (200 if route["by"] == "device" else 0)


async def test_they_cross_between_two_gpus(started: list[Pipeline]) -> None:
    """By the way that the trial at the start found, which cannot be another than the driver's own answer."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    pipeline = await begin(started, device_plan("cuda", devices=(0, 1)))
    (route,) = pipeline.health()["routes"]
    results = [(await pipeline.submit({"count": COUNT, "first": i}).result())["check"] for i in range(4)]
    assert all(r["equal"] for r in results)
    assert results[-1]["device"] == ("cuda:0" if route["by"] == "device" else "cpu"), (
        "each process numbers its own first"
    )
    assert (await gauge(pipeline, "make", "device_sent_total") > 0) == (route["by"] == "device")
    if not torch.cuda.can_device_access_peer(1, 0):
        assert route["by"] == "host", route


async def test_one_sender_reaches_its_own_gpu_and_another_at_once(started: list[Pipeline]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    pipeline = await begin(started, device_plan("cuda", devices=(0, 0, 1)))
    near, far = pipeline.health()["routes"]
    handles = [pipeline.submit({"count": COUNT + i, "first": i}) for i in range(24)]
    assert all([(await handle.result())["check"]["equal"] for handle in handles])
    before = await gauge(pipeline, "make", "device_sent_total")
    for i in range(8):
        assert (await pipeline.submit({"count": COUNT, "first": i}).result())["check"]["equal"]
    sent = await gauge(pipeline, "make", "device_sent_total") - before
    assert sent == 4 * [near["by"], far["by"]].count("device"), pipeline.health()["routes"]


@pytest.mark.parametrize("gpus", [1, 2])
async def test_under_mps_too(started: list[Pipeline], gpus: int) -> None:
    """With a daemon for each GPU, whose clients see no other; a way that MPS does not allow leads through the host."""
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    plan = device_plan("cuda", devices=(0, gpus - 1))
    instances = tuple(dataclasses.replace(i, mps=True) for i in plan.instances)
    clients = {0: ("make", "check")} if gpus == 1 else {0: ("make",), 1: ("check",)}
    pipeline = await begin(started, dataclasses.replace(plan, instances=instances, mps=clients))
    (route,) = pipeline.health()["routes"]
    results = [(await pipeline.submit({"count": COUNT, "first": i}).result())["check"] for i in range(4)]
    assert all(r["equal"] for r in results)
    assert results[-1]["device"] == ("cuda:0" if route["by"] == "device" else "cpu"), route
    assert gpus == 2 or route["by"] == "device", route
