"""Tensor-parallel stages, as real processes on the CPU platform."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from running import Start, eventually
from sgl_omni.errors import InvalidRequest, ProcessExited, StartupError
from tp_cases import PROMPTS, TIGHT, answers, ask, one_rank_tokens, pids, plan_for, write_qwen3


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def alone(qwen3: Path) -> dict[float, list[list[int]]]:
    return one_rank_tokens(qwen3)


async def test_two_ranks_answer_as_one_does(
    start: Start, tmp_path: Path, qwen3: Path, alone: dict[float, list[list[int]]]
) -> None:
    """With aborts in between, and a pool so small that requests are retracted and resumed."""
    pipeline = await start(plan_for(tmp_path, qwen3, 2))
    assert list(pids(pipeline)) == ["llm_tp0", "llm_tp1"]
    assert await answers(pipeline) == alone[0.0]
    assert await answers(pipeline, temperature=1.0, seed=11) == alone[1.0]
    with pytest.raises(InvalidRequest, match="positions"):
        await ask(pipeline, [1] * 100)
    await asyncio.sleep(1.1)  # until the gauges are those of the end
    assert await answers(pipeline) == alone[0.0]
    await asyncio.sleep(0.1)
    await pipeline.refresh()
    gauges = pipeline.stats()["instances"]
    ours, theirs = gauges["llm_tp0"], gauges["llm_tp1"]
    for key in ("running", "queued", "kv_used_tokens", "retractions", "generated_rows", "reused_tokens"):
        assert ours[f"llm.{key}"] == theirs[f"llm.{key}"], key
    assert ours["llm.retractions"] > 0
    assert (ours["llm.running"], ours["llm.queued"], ours["llm.kv_used_tokens"]) == (0, 0, 0)
    assert [i["kv_capacity_tokens"] for i in pipeline.health()["instances"]] == [{"llm": TIGHT}] * 2


async def test_one_rank_runs_the_same_factory(
    start: Start, tmp_path: Path, qwen3: Path, alone: dict[float, list[list[int]]]
) -> None:
    pipeline = await start(plan_for(tmp_path, qwen3, 1))
    assert list(pids(pipeline)) == ["llm"]
    assert await answers(pipeline) == alone[0.0]


async def test_replicas_of_two_ranks(
    start: Start, tmp_path: Path, qwen3: Path, alone: dict[float, list[list[int]]]
) -> None:
    processes = "{num_replicas: 2, replica_devices: [0, 1, 1, 2]}"
    pipeline = await start(plan_for(tmp_path, qwen3, 2, gpu=[0, 1], processes=processes, tokens=512))
    assert list(pids(pipeline)) == ["llm@r0_tp0", "llm@r0_tp1", "llm@r1_tp0", "llm@r1_tp1"]
    assert await answers(pipeline) == alone[0.0]
    await asyncio.sleep(0.1)
    await pipeline.refresh()
    rows = {name: gauges["llm.generated_rows"] for name, gauges in pipeline.stats()["instances"].items()}
    assert rows["llm@r0_tp0"] == rows["llm@r0_tp1"] > 0
    assert rows["llm@r1_tp0"] == rows["llm@r1_tp1"] > 0


async def test_what_is_left_to_chance_falls_out_alike(start: Start, tmp_path: Path, qwen3: Path) -> None:
    """Seeds that nobody gave, the generators of a process, the order of sets; and bulk data reaches every rank. Were
    the ranks to differ in any of it, the next step would end them."""
    pipeline = await start(plan_for(tmp_path, qwen3, 3, factory="drawing"))
    bulk = np.arange(300_000, dtype=np.int32)
    found = []
    for count in range(4):
        payload = {"bulk": bulk[: 100_000 * count], "tensor": torch.ones(5), "text": "x" * 100_000 * count}
        found.append((await pipeline.submit(payload).result())["llm"])
    assert [f["bulk"] for f in found] == [int(bulk[: 100_000 * count].sum()) for count in range(4)]
    assert [f["text"] for f in found] == [0, 100_000, 200_000, 300_000]
    assert len({f["seed"] for f in found}) == 4
    assert (await pipeline.submit({"seed": 5}).result())["llm"]["seed"] == 5
    assert pipeline.status == "ready"


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_killed_rank_stops_the_pipeline_by_name(start: Start, tmp_path: Path, qwen3: Path, rank: int) -> None:
    pipeline = await start(plan_for(tmp_path, qwen3, 2, tokens=512))
    waiting = [asyncio.create_task(ask(pipeline, prompt, max_new_tokens=400)) for prompt in PROMPTS[:4]]
    await asyncio.sleep(0.2)
    os.kill(pids(pipeline)[f"llm_tp{rank}"], signal.SIGKILL)
    reason = await asyncio.wait_for(pipeline.failed(), 2)
    assert f"llm_tp{rank}" in reason and "SIGKILL" in reason
    for task in waiting:
        with pytest.raises(ProcessExited, match=f"llm_tp{rank}.* was killed by SIGKILL"):
            await task
    await eventually(lambda: all(i["state"] == "exited" for i in pipeline.health()["instances"]), 2)


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_killed_rank_comes_back_with_its_group(
    start: Start, tmp_path: Path, qwen3: Path, alone: dict[float, list[list[int]]], rank: int
) -> None:
    processes = "{num_replicas: 2, replica_devices: [0, 1, 2, 3]}"
    plan = plan_for(tmp_path, qwen3, 2, on_exit="restart", processes=processes, tokens=512)
    pipeline = await start(plan)
    before = pids(pipeline)
    waiting = [asyncio.create_task(ask(pipeline, PROMPTS[i], max_new_tokens=400)) for i in range(4)]
    await asyncio.sleep(0.2)
    os.kill(before[f"llm@r0_tp{rank}"], signal.SIGKILL)
    with pytest.raises(ProcessExited, match=f"llm@r0_tp{rank}.* was killed by SIGKILL"):
        await waiting[0]
    assert pipeline.status == "degraded"
    assert (await ask(pipeline, PROMPTS[0]))["token_ids"] == alone[0.0][0], "the other replica serves meanwhile"
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(r) for r in results] == [ProcessExited, dict] * 2
    await eventually(lambda: pipeline.status == "ready", 60)
    after = pids(pipeline)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"llm@r0_tp0", "llm@r0_tp1"}
    assert await answers(pipeline) == alone[0.0]
    restarts = {i["name"]: i["restarts"] for i in pipeline.health()["instances"]}
    assert restarts == {"llm@r0_tp0": 1, "llm@r0_tp1": 1, "llm@r1_tp0": 0, "llm@r1_tp1": 0}


async def test_a_rank_that_was_killed_while_idle(start: Start, tmp_path: Path, qwen3: Path) -> None:
    pipeline = await start(plan_for(tmp_path, qwen3, 2))
    os.kill(pids(pipeline)["llm_tp1"], signal.SIGKILL)
    assert "llm_tp1" in await asyncio.wait_for(pipeline.failed(), 2)
    await eventually(lambda: all(i["state"] == "exited" for i in pipeline.health()["instances"]), 2)


async def test_a_rank_whose_step_fails_ends_its_group(start: Start, tmp_path: Path, qwen3: Path) -> None:
    """Rank 0 waits in a sum for the rank that failed, and would for ever."""
    pipeline = await start(plan_for(tmp_path, qwen3, 2))
    waiting = asyncio.create_task(ask(pipeline, [1, 2, 3], fail_in_rank=1))
    reason = await asyncio.wait_for(pipeline.failed(), 10)
    assert "llm_tp1" in reason and "told to fail" in reason
    with pytest.raises(ProcessExited, match="llm_tp1"):
        await waiting


async def test_ranks_that_differ_are_found_out(start: Start, tmp_path: Path, qwen3: Path) -> None:
    pipeline = await start(plan_for(tmp_path, qwen3, 2))
    asked = [asyncio.create_task(ask(pipeline, [1, 2, 3], do="differ", stream=True))]
    reason = await asyncio.wait_for(pipeline.failed(), 10)
    assert "rank 1 and rank 0 came to different results" in reason
    await asyncio.gather(*asked, return_exceptions=True)


@pytest.mark.parametrize(
    ("factory", "arguments", "says"),
    [
        ("unshardable", "{}", r"stage 'llm' \(llm_tp1\) could not be built.*part of the checkpoint is missing"),
        ("unshardable", "{how: exit}", "instance 'llm_tp1' exited with status 3"),
        ("no_engine", "{}", "stage 'llm' is tensor-parallel, but its factory returned a FunctionStage"),
    ],
)
async def test_a_group_that_cannot_start(
    start: Start, tmp_path: Path, qwen3: Path, factory: str, arguments: str, says: str
) -> None:
    with pytest.raises(StartupError, match=says):
        await start(plan_for(tmp_path, qwen3, 2, factory=factory, arguments=arguments))


async def test_heads_that_cannot_be_divided(start: Start, tmp_path: Path, qwen3: Path) -> None:
    with pytest.raises(StartupError, match="cannot be divided among 3 ranks"):
        await start(plan_for(tmp_path, qwen3, 3))
