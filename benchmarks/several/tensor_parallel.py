"""One rank or two: the same tokens, what a step takes, and how much of it two ranks spend adding up.

A thinker's decoder (the widths and experts of Qwen3-Omni's, fewer layers) and a small one, of a code predictor's size.
Tokens are compared in float32, where two ranks must give those of one, and in bfloat16, where sums of other order may
turn a near tie; the share that is the same is told.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.several.attempts import Attempt, Attempts, in_a_process

from sgl_omni.config.load import load_config
from sgl_omni.models.registry import PipelineRegistry
from sgl_omni.runtime.pipeline import Pipeline
from sgl_omni.topology.builder import build_plan
from sgl_omni.topology.host import Host
from sgl_omni.topology.plan import Plan

CONFIG = """
model_path: {folder}
stages:
  - name: llm
    factory_path: benchmarks.several.tp_stages.create_llm
    factory: {{dtype: {dtype}, rows: {rows}, notes: {notes}}}
    process: llm
    tp_size: {tp}
    gpu: {gpu}
    gpu_memory_fraction: 0.8
    engine: {{max_total_tokens: {tokens}, max_running_requests: {most}, cuda_graph_max_bs: {graphs}}}
    terminal: true
"""
COMMON: dict[str, Any] = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False, "hidden_act": "silu"}


def _decoder(
    kind: str, hidden: int, ffn: int, layers: int, heads: tuple[int, int, int], vocabulary: int
) -> dict[str, Any]:
    q, kv, head_dim = heads
    return {
        **COMMON,
        "architectures": ["Qwen3MoeForCausalLM" if kind == "qwen3_moe" else "Qwen3ForCausalLM"],
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": q,
        "num_key_value_heads": kv,
        "head_dim": head_dim,
        "vocab_size": vocabulary,
        "max_position_embeddings": 8192,
    }


def shapes(layers: int, *, tiny: bool) -> dict[str, dict[str, Any]]:
    if tiny:
        experts = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
        return {
            "thinker": {**_decoder("qwen3_moe", 64, 96, 2, (4, 2, 16), 320), **experts},
            "small": _decoder("qwen3", 32, 64, 2, (4, 2, 16), 160),
        }
    experts = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
    return {
        "thinker": {**_decoder("qwen3_moe", 2048, 768, layers, (32, 4, 128), 152064), **experts},
        "small": _decoder("qwen3", 1024, 3072, 5, (16, 8, 128), 2048),
    }


def write_model(folder: str, config: dict[str, Any]) -> float:
    """Random weights in the published format; returns the GB written. Draws on a GPU where there is one."""
    import torch
    from benchmarks.sizes.draw import Rules, write_weights

    from sgl_omni.engine.decoder_config import DecoderConfig
    from sgl_omni.engine.model import CausalModel

    with torch.device("meta"):
        slots = CausalModel(DecoderConfig.parse(config)).slots("model.", "lm_head")
        found = {slot.name: tuple(slot.shape) for slot in slots}
    Path(folder, "config.json").write_text(json.dumps(config))
    return write_weights(Path(folder), found, Rules(zero_rows={}, constants={}), seed=0).drawn_bytes / 1e9


class Ranks:
    """How one attempt runs the engine."""

    def __init__(self, tp: int, *, graphs: bool, dtype: str, batches: list[int], outputs: tuple[int, int]) -> None:
        self.tp, self.graphs, self.dtype, self.batches, self.outputs = tp, graphs, dtype, batches, outputs
        self.most = max(16, *batches)

    def plan(self, folder: Path, host: Host, notes: Path) -> Plan:
        path = folder / "tp.yaml"
        values = {
            "folder": folder,
            "dtype": self.dtype,
            "rows": self.batches,
            "notes": notes,
            "tp": self.tp,
            "gpu": list(range(self.tp)) if self.tp > 1 else 0,
            "tokens": self.most * (64 + self.outputs[1]),
            "most": self.most,
            "graphs": self.most if self.graphs else 0,
        }
        path.write_text(CONFIG.format(**values))
        return build_plan(load_config(path, [], registry=PipelineRegistry()), host)


async def ask(pipeline: Pipeline, prompt: list[int], outputs: int) -> list[int]:
    payload = {"prompt_ids": prompt, "max_new_tokens": outputs, "temperature": 0.0, "ignore_eos": True}
    tokens: list[int] = (await pipeline.submit(payload).result())["llm"]["token_ids"]
    return tokens


def prompts(count: int, vocabulary: int) -> list[list[int]]:
    return [[(7919 * (i + 1) * (j + 1) + j * j) % vocabulary for j in range(8 + 3 * (i % 16))] for i in range(count)]


async def timed(pipeline: Pipeline, batch: int, outputs: int, vocabulary: int) -> float:
    at = time.perf_counter()
    await asyncio.gather(*(ask(pipeline, prompt, outputs) for prompt in prompts(batch, vocabulary)))
    return time.perf_counter() - at


async def run_ranks(ranks: Ranks, folder: Path, host: Host, vocabulary: int, tokens: int) -> Attempt:
    """``step_ms``: the time that more outputs take, over their number, so that prompts and the way there are not in."""
    notes = folder / "notes.json"
    notes.unlink(missing_ok=True)
    begun = time.perf_counter()
    async with Pipeline(ranks.plan(folder, host, notes)) as pipeline:
        found: Attempt = {"seconds_to_ready": time.perf_counter() - begun}
        asked = [ask(pipeline, prompt, tokens) for prompt in prompts(16, vocabulary)]
        found["tokens"] = await asyncio.gather(*asked)
        short, long = ranks.outputs
        found["step_ms"] = {}
        for batch in ranks.batches:
            await timed(pipeline, batch, short, vocabulary)
            pairs = [[await timed(pipeline, batch, n, vocabulary) for n in (short, long)] for _ in range(3)]
            found["step_ms"][batch] = [1e3 * (more - less) / (long - short) for less, more in pairs]
        await pipeline.refresh()
        gauges = pipeline.stats()["instances"]
        found["graph_buckets"] = {name: g.get("llm.graph_buckets") for name, g in gauges.items()}
    if notes.exists():
        found |= json.loads(notes.read_text())
        way = "graph" if ranks.graphs and "graph" in next(iter(found["sums_ms"].values())) else "launched"
        found["sums_share_of_step"] = {
            batch: found["sums_ms"][str(batch)][way] / statistics.median(found["step_ms"][batch])
            for batch in ranks.batches
        }
    return found


def agreement(one: list[list[int]], two: list[list[int]]) -> Attempt:
    """How many of the answers are the same, and after how many tokens the others part."""
    parted = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), -1)
        for x, y in zip(one, two, strict=True)
    ]
    return {"answers": len(one), "same": parted.count(-1), "parted_after": [at for at in parted if at >= 0]}


async def measure(
    attempts: Attempts, *, layers: int, outputs: tuple[int, int], batches: list[int], dtypes: tuple[str, ...]
) -> None:
    tiny = not attempts.on_gpu
    tokens = 12 if tiny else 64
    for name, config in shapes(layers or 48, tiny=tiny).items():
        folder = Path(tempfile.mkdtemp(prefix="omni-model-"))

        async def write(into: Path = folder, config: dict[str, Any] = config) -> Attempt:
            return {"gigabytes": await asyncio.to_thread(in_a_process, write_model, str(into), config)}

        try:
            if "error" not in await attempts.run("tp", {"shape": name, "what": "checkpoint"}, write, 240):
                await _compare(attempts, name, folder, config["vocab_size"], batches, outputs, tokens, dtypes)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


async def _compare(
    attempts: Attempts,
    name: str,
    folder: Path,
    vocabulary: int,
    batches: list[int],
    outputs: tuple[int, int],
    tokens: int,
    dtypes: tuple[str, ...],
) -> None:
    """One rank and two, in turn, for each of the ways to run a step. On GPUs the small one is there for its time alone,
    and `tests/gpu/test_tp_cuda.py` compares tokens of such a one."""
    ways = [("bfloat16", True), ("bfloat16", False)] if attempts.on_gpu else []
    if name == "thinker" or not attempts.on_gpu:
        ways.insert(0, ("float32", True))
    for dtype, graphs in (way for way in ways if way[0] in dtypes):
        answers: dict[int, Any] = {}
        for tp in (1, 2):
            ranks = Ranks(tp, graphs=graphs, dtype=dtype, batches=batches, outputs=outputs)

            async def work(ranks: Ranks = ranks, answers: dict[int, Any] = answers) -> Attempt:
                found = await run_ranks(ranks, folder, attempts.host, vocabulary, tokens)
                answers[ranks.tp] = found.pop("tokens")
                return found | ({"agreement": agreement(answers[1], answers[2])} if len(answers) == 2 else {})

            what = {"shape": name, "tp": tp, "dtype": dtype, "graphs": graphs, "outputs": outputs}
            await attempts.run("tp", what, work, 150)
