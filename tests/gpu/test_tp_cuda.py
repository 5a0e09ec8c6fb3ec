"""Tensor-parallel stages on two GPUs: NCCL, inside CUDA graphs and without them."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sgl_omni.errors import ProcessExited
from sgl_omni.gpu.devices import usable_host
from sgl_omni.runtime.pipeline import Pipeline
from tp_cases import PROMPTS, answers, ask, one_rank_tokens, pids, plan_for, write_qwen3

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with tempfile.TemporaryDirectory(prefix="omni-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3(tmp_path_factory.mktemp("qwen3"))


@pytest.mark.parametrize("graphs", [0, 6])
async def test_two_gpus_answer_as_one_cpu_does(tmp_path: Path, qwen3: Path, graphs: int) -> None:
    """Several requests at a time, aborts in between, and a pool that forces retraction."""
    alone = one_rank_tokens(qwen3)
    plan = plan_for(tmp_path, qwen3, 2, usable_host(), graphs=graphs)
    async with Pipeline(plan) as pipeline:
        for apart in (0.0, 0.001, 0.01):
            assert await answers(pipeline, apart) == alone[0.0]
        await asyncio.sleep(1.2)
        assert (await ask(pipeline, PROMPTS[0]))["token_ids"] == alone[0.0][0]
        await asyncio.sleep(0.1)
        await pipeline.refresh()
        gauges = pipeline.stats()["instances"]
        for key in ("running", "queued", "kv_used_tokens", "retractions", "generated_rows", "graph_buckets"):
            assert gauges["llm_tp0"][f"llm.{key}"] == gauges["llm_tp1"][f"llm.{key}"], key
        assert (gauges["llm_tp0"]["llm.graph_buckets"] > 0) == (graphs > 0)
        assert gauges["llm_tp0"]["llm.retractions"] > 0


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_killed_rank_takes_its_group_along(tmp_path: Path, qwen3: Path, rank: int) -> None:
    """The other may wait in an NCCL kernel that never ends."""
    plan = plan_for(tmp_path, qwen3, 2, usable_host(), tokens=512, on_exit="restart")
    async with Pipeline(plan) as pipeline:
        before = pids(pipeline)

        async def keep_asking(prompt: list[int]) -> None:
            while True:
                await ask(pipeline, prompt, max_new_tokens=400)

        waiting = [asyncio.create_task(keep_asking(prompt)) for prompt in PROMPTS[:4]]
        await asyncio.sleep(0.5)
        os.kill(before[f"llm_tp{rank}"], signal.SIGKILL)
        for task in waiting:
            with pytest.raises(ProcessExited, match=f"llm_tp{rank}.* was killed by SIGKILL"):
                await asyncio.wait_for(task, 2)
        end = asyncio.get_running_loop().time() + 60
        while pipeline.status != "ready":
            assert asyncio.get_running_loop().time() < end, "the group did not come back"
            await asyncio.sleep(0.1)
        assert set(before.values()).isdisjoint(pids(pipeline).values())
        assert len((await ask(pipeline, PROMPTS[0]))["token_ids"]) > 0
