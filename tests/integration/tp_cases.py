"""A small model, and requests to it, for the tests of tensor-parallel stages on both platforms."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from checkpoints import save_random
from sgl_omni.config.load import load_config
from sgl_omni.engine.engine import AutoregressiveEngine, EngineSettings
from sgl_omni.engine.model import CausalModel
from sgl_omni.engine.task import InputSpec, TokenTask
from sgl_omni.models.registry import PipelineRegistry
from sgl_omni.runtime.pipeline import Pipeline
from sgl_omni.topology.builder import build_plan
from sgl_omni.topology.host import Host, virtual_host
from sgl_omni.topology.plan import Plan

CONFIG = """
model_path: {model}
on_process_exit: {on_exit}
stages:
  - name: llm
    factory_path: tp_stages.{factory}
    factory: {arguments}
    process: llm
    tp_size: {tp}
    gpu: {gpu}
    gpu_memory_fraction: 0.2
    engine: {{max_total_tokens: {tokens}, page_size: 4, max_running_requests: 6, cuda_graph_max_bs: {graphs}}}
    terminal: true
processes:
  llm: {processes}
"""
TIGHT = 96
"""Tokens of a pool in which six requests of up to 52 do not fit."""
PROMPTS = [[(7 * i + j * j) % 300 for j in range(4 + 3 * i)] for i in range(8)]
OUTPUTS = 24


def plan_for(folder: Path, checkpoint: Path, tp: int, host: Host | None = None, **changes: Any) -> Plan:
    """For the CPU platform unless a host is given."""
    values = {
        "model": checkpoint,
        "on_exit": "stop",
        "factory": "decoder",
        "arguments": "{}",
        "tokens": TIGHT,
        "tp": tp,
        "graphs": 6,
        "gpu": list(range(tp)) if tp > 1 else 0,
        "processes": "{}",
        **changes,
    }
    host = host or virtual_host(4 * 2**30, os.cpu_count())
    path = folder / "tp.yaml"
    path.write_text(CONFIG.format(**values))
    return build_plan(load_config(path, [], registry=PipelineRegistry()), host)


async def ask(pipeline: Pipeline, prompt: list[int], **fields: Any) -> dict[str, Any]:
    result = await pipeline.submit({"prompt_ids": prompt, "max_new_tokens": OUTPUTS, **fields}).result()
    found: dict[str, Any] = result["llm"]
    return found


async def answers(pipeline: Pipeline, apart: float = 0.01, **fields: Any) -> list[list[int]]:
    """All prompts, so many seconds apart, and requests between them that are aborted after a while."""

    async def one(prompt: list[int], index: int) -> list[int]:
        await asyncio.sleep(apart * index)
        found: list[int] = (await ask(pipeline, prompt, **fields))["token_ids"]
        return found

    async def abandoned(index: int) -> None:
        await asyncio.sleep(apart * index)
        handle = pipeline.submit({"prompt_ids": [index, 5, 9], "max_new_tokens": 40})
        await asyncio.sleep(1.5 * apart * index)
        handle.abort()

    asked = [one(prompt, index) for index, prompt in enumerate(PROMPTS)]
    results = await asyncio.gather(*asked, *(abandoned(index) for index in range(6)))
    return results[: len(PROMPTS)]  # type: ignore[return-value]


def pids(pipeline: Pipeline) -> dict[str, int]:
    return {i["name"]: i["pid"] for i in pipeline.health()["instances"]}


def write_qwen3(folder: Path) -> Path:
    """A Qwen3 of random weights, under the names that such checkpoints have."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
    }
    return save_random(folder, config)


def one_rank_tokens(checkpoint: Path) -> dict[float, list[list[int]]]:
    """What one rank answers to the prompts on a CPU, each request by itself, by temperature."""
    model = CausalModel.load(checkpoint)
    task = TokenTask(InputSpec(vocab_sizes=(320,), hidden_size=64))
    found: dict[float, list[list[int]]] = {}
    for temperature in (0.0, 1.0):
        engine = AutoregressiveEngine.build(model, task, EngineSettings(max_total_tokens=512))
        for prompt in PROMPTS:
            payload = {"prompt_ids": prompt, "max_new_tokens": OUTPUTS, "temperature": temperature, "seed": 11}
            engine.add("r", payload)
            while engine.has_work:
                for output in engine.step():
                    if output.result is not None:
                        found.setdefault(temperature, []).append(output.result["token_ids"])
    assert len({tuple(tokens) for tokens in found[0.0]}) == len(PROMPTS)
    return found
