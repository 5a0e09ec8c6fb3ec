"""A language model's engine for one rank or several, and what its sums cost alone."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from sgl_omni.engine.engine import AutoregressiveEngine, EngineSettings
from sgl_omni.engine.model import CausalModel
from sgl_omni.engine.shard import Shard
from sgl_omni.engine.task import InputSpec, TokenTask
from sgl_omni.runtime.stage import EngineStage

SUMS_PER_LAYER = 2
"""After attention and after the experts or the MLP."""


def create_llm(
    model_path: str,
    device: str = "cpu",
    engine: dict[str, Any] | None = None,
    shard: Shard | None = None,
    dtype: str = "float32",
    rows: list[int] | None = None,
    notes: str = "",
) -> EngineStage:
    """``rows``: of steps whose sums are timed before the engine is built; rank 0 writes ``notes``, a JSON file."""
    shard, kind = shard or Shard(), getattr(torch, dtype)
    model = CausalModel.load(Path(model_path), device, kind, shard=shard)
    if shard.size > 1 and rows:
        sums = SUMS_PER_LAYER * model.config.num_layers
        found = {count: sums_ms(shard, sums, (count, model.config.hidden_size), device, kind) for count in rows}
        if shard.index == 0:
            Path(notes).write_text(json.dumps({"sums_per_step": sums, "sums_ms": found}))
    inputs = InputSpec(vocab_sizes=(model.config.vocab_size,), hidden_size=model.config.hidden_size)
    return EngineStage(AutoregressiveEngine.build(model, TokenTask(inputs), EngineSettings.parse(engine or {})))


def sums_ms(shard: Shard, count: int, shape: tuple[int, int], device: str, dtype: torch.dtype) -> dict[str, float]:
    """Milliseconds of a step's sums with nothing between them, the least of ten: in one graph, and launched each.

    Between the sums of a real step each rank computes, and waits for the other where that took longer; that is not in.
    """
    x = torch.zeros(shape, device=device, dtype=dtype)

    def all_of_them() -> None:
        for _ in range(count):
            shard.reduce(x)

    found = {"launched": _least_ms(all_of_them)}
    if x.is_cuda:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            all_of_them()
        found["graph"] = _least_ms(graph.replay)
    return found


def _least_ms(run: Any) -> float:
    def wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    run()
    seconds = []
    for _ in range(10):
        wait()
        at = time.perf_counter()
        run()
        wait()
        seconds.append(time.perf_counter() - at)
    return 1e3 * min(seconds)
