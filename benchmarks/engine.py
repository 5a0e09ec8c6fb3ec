"""What a decode step costs: the engine on a decoder of a known shape with random weights, frames of codes out.

For each batch: the engine's own loop at a given context, the same loop written plainly with transformers' classes
(a static batch, eager, greedy), and the least time that the machine's memory and matrix units would need. Rounds are
interleaved and all are listed. Prints one JSON object as its last line; nothing of it is asserted anywhere.

    python benchmarks/engine.py --shape higgs-4b --batch 1,8,32,64,128 --context 256 --json

``--host`` measures the engine's own work on any machine, without a GPU: the loop in device rows around a model that
computes nothing. On a CPU a launch is the step, so what it tells is all that the thread does besides: the scheduler,
reading a step, taking its rows, handing frames on. What a launch takes of the host, only ``launch_ms`` on a GPU says.

    python benchmarks/engine.py --host --batch 1,64,128 --json
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sgl_omni.engine.attention import Attend
from sgl_omni.engine.decoder_config import DecoderConfig
from sgl_omni.engine.delay import DelayPattern
from sgl_omni.engine.device_runner import DeviceRunner
from sgl_omni.engine.engine import AutoregressiveEngine, EngineSettings
from sgl_omni.engine.kv_cache import KVShape
from sgl_omni.engine.model import CausalModel, StepModel
from sgl_omni.engine.task import FrameTask, HandOver, InputSpec
from sgl_omni.engine.weights import OwnWeights, SharePolicy, WeightStore, load_module

COMMON: dict[str, Any] = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False}


@dataclass(frozen=True)
class Shape:
    """A decoder and its codebooks."""

    config: dict[str, Any]
    columns: int
    codebook: int

    @property
    def table_rows(self) -> int:
        """Ids of all columns lie one after another, as in a real checkpoint's audio embeddings."""
        return self.columns * self.codebook


def _shape(
    kind: str, hidden: int, ffn: int, layers: int, heads: tuple[int, int, int], columns: int, book: int
) -> Shape:
    q, kv, head_dim = heads
    return Shape(
        {
            **COMMON,
            "model_type": kind,
            "hidden_size": hidden,
            "intermediate_size": ffn,
            "num_hidden_layers": layers,
            "num_attention_heads": q,
            "num_key_value_heads": kv,
            "head_dim": head_dim,
            "vocab_size": columns * book,
            "max_position_embeddings": 8192,
        },
        columns,
        book,
    )


SHAPES = {
    "tiny": _shape("qwen3", 128, 256, 2, (4, 2, 32), 4, 66),
    "demo": _shape("mistral", 320, 768, 8, (6, 2, 64), 4, 1032),
    "qwen3-0.6b": _shape("qwen3", 1024, 3072, 28, (16, 8, 128), 8, 1026),
    "higgs-4b": _shape("qwen3", 2560, 9728, 36, (32, 8, 128), 8, 1026),
}


def _endless(shape: Shape) -> DelayPattern:
    """An end that no head can choose: every request runs to its limit."""
    return DelayPattern.staircase(shape.columns, eos_id=shape.codebook, pad_id=shape.codebook - 1)


def build_model(
    shape: Shape, device: torch.device, dtype: torch.dtype, weights: WeightStore | None = None
) -> CausalModel:
    """Random weights, the same each time and small enough that nothing overflows; they live where ``weights`` says."""
    offsets = [i * shape.codebook for i in range(shape.columns)]
    with torch.device("meta"):
        model = CausalModel(
            DecoderConfig.parse(shape.config),
            columns=shape.columns,
            column_offsets=offsets,
            embedding_rows=shape.table_rows,
            head_size=shape.codebook,
            pattern=_endless(shape),
        )

    @torch.no_grad()
    def draw() -> None:
        if model.embedding.weight.is_meta:
            return  # there is nothing to check, and drawing would import torch's compiler, which takes over a second
        generator = torch.Generator(device=device).manual_seed(0)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0, 0.02, generator=generator)

    load_module(
        model,
        weights or OwnWeights(),
        draw,
        device=device,
        dtype=dtype,
        policy=SharePolicy("RandomTts"),
        fingerprint=f"random {shape} {dtype}",
    )
    return model.eval()


class Nothing(StepModel):
    """Computes nothing, and draws from two ids: what is left of a step is the engine."""

    def __init__(self, shape: Shape) -> None:
        self.columns = shape.columns
        self.pattern = _endless(shape)

    @property
    def kv_shape(self) -> KVShape:
        return KVShape(layers=1, kv_heads=1, head_dim=1, dtype=torch.float32)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def embed_ids(self, ids: Tensor) -> Tensor:
        return torch.zeros(len(ids), 1)

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.zeros(len(hidden), self.columns, 2)


def frame_task(model: StepModel, shape: Shape) -> FrameTask:
    """Frames of the model, handed on a second at a time."""
    assert model.pattern is not None
    width = model.embed_ids(torch.zeros(1, shape.columns, dtype=torch.int64, device=model.device)).shape[1]
    inputs = InputSpec(vocab_sizes=(shape.codebook,) * shape.columns, hidden_size=width)
    return FrameTask(inputs, model.pattern, hand_over=HandOver(25, 25))


class EngineLoop:
    """The engine at one batch: all requests decoding, none of them near its end."""

    def __init__(
        self,
        model: StepModel,
        shape: Shape,
        max_batch: int,
        context: int,
        steps: int,
        *,
        device_rows: bool | None = None,
        apart: bool = False,
    ) -> None:
        """``apart``: requests come one a step, so that they hand their frames on in different steps."""
        task = frame_task(model, shape)
        longest = context + 16 * steps
        settings = EngineSettings(
            max_total_tokens=max_batch * (-(-longest // 16) * 16),
            max_running_requests=max_batch,
            cuda_graph_max_bs=max_batch,
            reuse_prefixes=False,
        )
        self.shape, self.context, self.steps, self._apart = shape, context, steps, apart
        self.engine = AutoregressiveEngine.build(model, task, settings, device_rows=device_rows)

    def measure(self, batch: int) -> dict[str, float]:
        """Milliseconds, from the mean of all steps. ``host_ms``: what the thread did besides waiting,
        of it ``launch_ms`` to launch the steps. One step is under way both when the time begins and when it ends.

        ``context``: mean positions of a request, mid-way. Admission takes steps in which the first requests grow, so
        prompts are shortened until the mean is what was asked for.
        """
        length = max(1, self.context - self.steps // 2)
        while True:
            at = length + self._admit(batch, length) + self.steps / 2
            if abs(at - self.context) <= 2 or length <= 1:
                break
            length = max(1, length - round(at - self.context))
            self._clear(batch)
        before, started = self.engine.stats(), time.perf_counter()
        for _ in range(self.steps):
            self.engine.step()
        seconds, after = time.perf_counter() - started, self.engine.stats()
        self._clear(batch)
        waited = after.get("wait_seconds", 0.0) - before.get("wait_seconds", 0.0)
        launching = after.get("launch_seconds", 0.0) - before.get("launch_seconds", 0.0)
        return {
            "context": at,
            "step_ms": 1e3 * seconds / self.steps,
            "host_ms": 1e3 * (seconds - waited) / self.steps,
            "launch_ms": 1e3 * launching / self.steps,
            "frames_per_s": batch * self.steps / seconds,
        }

    def _admit(self, batch: int, length: int) -> float:
        """Returns how many rows a request has beyond its prompt, on the mean, when all are decoding."""
        generator = torch.Generator().manual_seed(batch)
        for i in range(batch):
            ids = torch.randint(0, self.shape.codebook - 1, (length, self.shape.columns), generator=generator)
            options = {"max_frames": 8 * self.steps, "temperature": 0.8, "top_k": 50, "seed": i}
            self.engine.add(str(i), {"prompt_ids": ids.numpy(), **options})
            if self._apart:
                self.engine.step()
        while self.engine.stats()["queued"]:
            self.engine.step()
        ahead = statistics.mean(len(request.outputs) for request in self.engine.running)
        for _ in range(8):
            self.engine.step()
        return ahead + 8

    def _clear(self, batch: int) -> None:
        for i in range(batch):
            self.engine.abort(str(i))
        while self.engine.has_work:
            self.engine.step()


class PlainLoop:
    """The same decoder in transformers' own classes, written as a tutorial would."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        import transformers

        kind = {"qwen3": "Qwen3", "mistral": "Mistral"}[shape.config["model_type"]]
        config = getattr(transformers, f"{kind}Config")(**{k: v for k, v in shape.config.items() if k != "model_type"})
        with torch.device(device):
            torch.set_default_dtype(dtype)
            self.model = getattr(transformers, f"{kind}Model")(config).eval()
            self.head = torch.nn.Linear(shape.config["hidden_size"], shape.table_rows, bias=False)
            torch.set_default_dtype(torch.float32)
        self.shape, self.device = shape, device

    @torch.inference_mode()
    def measure(self, batch: int, context: int, steps: int) -> dict[str, float]:
        from transformers import DynamicCache

        columns, book = self.shape.columns, self.shape.codebook
        offsets = torch.arange(columns, device=self.device) * book
        cache = DynamicCache()

        def forward(ids: Tensor) -> Tensor:
            embeddings = self.model.embed_tokens(ids + offsets).sum(2)
            out = self.model(inputs_embeds=embeddings, past_key_values=cache, use_cache=True)
            logits = self.head(out.last_hidden_state[:, -1]).view(batch, columns, book)
            return logits.argmax(-1)[:, None]

        prompt = torch.randint(0, book, (batch, context - steps // 2, columns), device=self.device)
        ids = forward(prompt)
        for _ in range(2):
            ids = forward(ids)
        _wait()
        started = time.perf_counter()
        for _ in range(steps):
            ids = forward(ids)
            ids.tolist()
        _wait()
        seconds = time.perf_counter() - started
        return {"step_ms": 1e3 * seconds / steps, "frames_per_s": batch * steps / seconds}


def measure_host(shape: Shape, batches: Sequence[int], context: int, steps: int, rounds: int) -> list[dict[str, Any]]:
    """``host_us``: microseconds a step that the engine takes besides launching it; see the top of this file."""
    torch.set_num_threads(1)
    loops = {
        name: EngineLoop(Nothing(shape), shape, max(batches), context, steps, device_rows=True, apart=name == "apart")
        for name in ("together", "apart")
    }
    gc.collect()
    gc.freeze()
    found = []
    for number in range(rounds):
        for batch in batches:
            for requests, loop in loops.items():
                times = loop.measure(batch)
                us = 1e3 * (times["host_ms"] - times["launch_ms"])
                found.append({"round": number, "batch": batch, "requests": requests, "host_us": us})
    return found


@dataclass(frozen=True)
class Machine:
    """What it can do, measured: bytes a second of a copy (read plus write), multiply-adds times two a second."""

    bandwidth: float
    flops: float

    @classmethod
    def measured(cls, device: torch.device, dtype: torch.dtype) -> Machine:
        big = device.type == "cuda"
        source = torch.empty((2 << 30) if big else (128 << 20), dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        bandwidth = 2 * source.nbytes / _best_of(partial(target.copy_, source))
        side = 8192 if big else 1024
        a = torch.randn(side, side, device=device, dtype=dtype)
        return cls(bandwidth, 2 * side**3 / _best_of(lambda: a @ a))

    def limit_ms(self, model: CausalModel, batch: int, context: float) -> float:
        """Weights and keys and values are read once, every product is made once."""
        weights = [p for name, p in model.named_parameters() if not name.startswith("embedding")]
        read = sum(p.nbytes for p in weights) + batch * context * model.kv_shape.bytes_per_token
        work = 2 * batch * sum(p.numel() for p in weights)
        return 1e3 * max(read / self.bandwidth, work / self.flops)


def _best_of(run: Callable[[], object], times: int = 10) -> float:
    run()
    seconds = []
    for _ in range(times):
        _wait()
        started = time.perf_counter()
        run()
        _wait()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="demo")
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-plain", action="store_true", help="leave the loop on transformers out")
    parser.add_argument("--host", action="store_true", help="only the engine's own work, with a model of nothing")
    parser.add_argument("--json", action="store_true", help="only the JSON object")
    args = parser.parse_args()
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape, batches = SHAPES[args.shape], [int(b) for b in args.batch.split(",")]
    if args.host:
        found = measure_host(shape, batches, args.context, args.steps, args.rounds)
        facts = {"benchmark": "engine-host", "columns": shape.columns, "machine": platform.processor() or "cpu"}
        print(json.dumps({**facts, "context": args.context, "torch": torch.__version__, "rounds": found}))
        return
    machine = Machine.measured(device, dtype)
    model = build_model(shape, device, dtype)
    loop = EngineLoop(model, shape, max(batches), args.context, args.steps)
    plain = None if args.no_plain else PlainLoop(shape, device, dtype)
    gc.collect()
    gc.freeze()  # as a stage's process does
    rounds: list[dict[str, Any]] = []
    for number in range(args.rounds):
        for batch in batches:
            engine = loop.measure(batch)
            beside = plain.measure(batch, args.context, min(args.steps, 20)) if plain else None
            limit = machine.limit_ms(model, batch, engine["context"])
            row = {"round": number, "batch": batch, "engine": engine, "plain": beside, "limit_ms": limit}
            row["share_of_limit"] = limit / engine["step_ms"]
            rounds.append(row)
            if not args.json:
                print(json.dumps(row), file=sys.stderr, flush=True)
    runner = loop.engine.runner
    graphs = runner.graphs if isinstance(runner, DeviceRunner) else ()
    print(
        json.dumps(
            {
                "benchmark": "engine",
                "shape": args.shape,
                "context": args.context,
                "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "cpu",
                "torch": torch.__version__,
                "dtype": str(dtype),
                "bandwidth_gb_per_s": machine.bandwidth / 1e9,
                "matrix_tflops": machine.flops / 1e12,
                "graph_buckets": [each.buckets for each in graphs],
                "capture_seconds": sum(each.capture_seconds for each in graphs),
                "rounds": rounds,
            }
        )
    )


if __name__ == "__main__":
    main()
