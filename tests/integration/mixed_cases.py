"""Two engines on two GPUs, one of single ranks and one of two, for the tests on both platforms.

`small` says something, and `wide`, which is tensor-parallel, goes on from there.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sgl_omni.config.load import load_config
from sgl_omni.engine.engine import AutoregressiveEngine, EngineSettings
from sgl_omni.engine.model import CausalModel
from sgl_omni.engine.task import InputSpec, TokenTask
from sgl_omni.errors import ProcessExited
from sgl_omni.models.registry import PipelineRegistry
from sgl_omni.runtime.pipeline import Pipeline
from sgl_omni.topology.builder import build_plan
from sgl_omni.topology.host import Host
from sgl_omni.topology.plan import Plan

CONFIG = """
model_path: {model}
weight_share: {share}
mps: {mps}
on_process_exit: restart
stages:
  - name: small
    factory_path: weight_stages.decoder
    process: small
    gpu: 0
    gpu_memory_fraction: 0.1
    engine: {{max_total_tokens: 1024, cuda_graph_max_bs: 8}}
    next: turn
  - name: turn
    factory_path: mixed_stages.turn
    factory: {{outputs: {outputs}}}
    process: turn
    next: wide
  - name: wide
    factory_path: tp_stages.decoder
    process: wide
    tp_size: 2
    gpu: [0, 1]
    gpu_memory_fraction: 0.1
    engine: {{max_total_tokens: 1024, cuda_graph_max_bs: 8}}
    terminal: true
processes:
  small: {small}
  wide: {wide}
"""
OUTPUTS = 10
PROMPTS = [[5 * i + 1, 11, 3 * i % 7 + 2, 100 + i] for i in range(8)]
GROUP_ON_EACH = "{num_replicas: 4, replica_devices: [0, 0, 1, 1]}"
"""Of `small`: two copies on each of two GPUs."""


def mixed_plan(folder: Path, checkpoint: Path, host: Host, **changes: str) -> Plan:
    """A sharing group on each GPU beside one pair of ranks, unless `changes` say otherwise."""
    values = {"share": "on", "mps": "off", "small": GROUP_ON_EACH, "wide": "{}", **changes}
    path = folder / "mixed.yaml"
    path.write_text(CONFIG.format(model=checkpoint, outputs=OUTPUTS, **values))
    return build_plan(load_config(path, [], registry=PipelineRegistry()), host)


def expected_tokens(checkpoint: Path) -> list[list[int]]:
    """What one rank on a CPU says twice, each prompt by itself."""
    model = CausalModel.load(checkpoint)
    inputs = InputSpec(vocab_sizes=(model.config.vocab_size,), hidden_size=model.config.hidden_size)
    engine = AutoregressiveEngine.build(
        model, TokenTask(inputs, eos_ids=model.config.eos_ids), EngineSettings(max_total_tokens=512)
    )

    def say(prompt: list[int]) -> list[int]:
        engine.add("r", {"prompt_ids": prompt, "max_new_tokens": OUTPUTS, "temperature": 0.0})
        while True:
            for output in engine.step():
                if output.result is not None:
                    return list(output.result["token_ids"])

    found = [say(say(prompt)) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in found}) > len(PROMPTS) // 2
    return found


async def say(pipeline: Pipeline, prompt: list[int]) -> list[int]:
    payload = {"prompt_ids": prompt, "max_new_tokens": OUTPUTS, "temperature": 0.0}
    found: list[int] = (await pipeline.submit(payload).result())["wide"]["token_ids"]
    return found


async def check_answers(pipeline: Pipeline, expected: list[list[int]], times: int = 4) -> None:
    """Everything at once, so often that each replica has its turn at each prompt."""
    asked = [say(pipeline, prompt) for _ in range(times) for prompt in PROMPTS]
    assert await asyncio.gather(*asked) == expected * times


def pids(pipeline: Pipeline) -> dict[str, int]:
    return {i["name"]: i["pid"] for i in pipeline.health()["instances"]}


def weights(pipeline: Pipeline, name: str) -> dict[str, Any]:
    """What a replica of `small` says of its weights."""
    (found,) = (i["weights"] for i in pipeline.health()["instances"] if i["name"] == name)
    return {"role": found["role"], **found["models"]["small"]}


async def generated(pipeline: Pipeline, stage: str) -> dict[str, float]:
    await asyncio.sleep(0.2)
    await pipeline.refresh()
    gauges = pipeline.stats()["instances"]
    key = f"{stage}.generated_rows"
    return {name: numbers[key] for name, numbers in gauges.items() if key in numbers}


async def kill_under_load(pipeline: Pipeline, pid: int, fallen: Iterable[str], expected: list[list[int]]) -> None:
    """Kills a process while requests are everywhere. Those of `fallen` come back as new processes, all others stay who
    they are; requests fail by a name or are answered right."""
    before, fallen = pids(pipeline), set(fallen)
    asked = [asyncio.create_task(say(pipeline, prompt)) for _ in range(4) for prompt in PROMPTS]
    await asyncio.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    results = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 60)
    for result, right in zip(results, expected * 4, strict=True):
        assert isinstance(result, ProcessExited) or result == right, result
    await until_ready(pipeline, [before[name] for name in fallen])
    after = pids(pipeline)
    assert {name for name in before if before[name] != after[name]} == fallen


async def until_ready(pipeline: Pipeline, old: Iterable[int], seconds: float = 120.0) -> None:
    """Until nobody has one of the `old` pids, and all serve."""
    gone, end = set(old), asyncio.get_running_loop().time() + seconds
    while pipeline.status != "ready" or gone & set(pids(pipeline).values()):
        assert asyncio.get_running_loop().time() < end, f"not ready again: {pipeline.status}"
        await asyncio.sleep(0.05)
