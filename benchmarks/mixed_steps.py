"""The engine alone under a steady load: each step holds rows of prompts beside one row of every request that decodes.

    python -m benchmarks.mixed_steps --shape higgs-4b --running 384 --prompt 156 --frames 95

So many requests run at once, of random prompts that have nothing in common; whenever one ends the next comes. Nothing
is counted until the first ``--running`` have ended. Prints one JSON object; no figure of it is asserted anywhere.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import time
from typing import Any

import torch
from benchmarks.engine import SHAPES, build_model, frame_task

from sgl_omni.engine.device_runner import DeviceRunner
from sgl_omni.engine.engine import AutoregressiveEngine, EngineSettings


class SteadyLoad:
    """Requests of one kind, of which the engine always has as many as it may run."""

    def __init__(self, engine: AutoregressiveEngine, running: int, prompt: tuple[int, int], ids: int, frames: int):
        """``prompt``: rows and columns; ``ids``: below which they are drawn."""
        self._engine, self._frames, self._ids, self._shape = engine, frames, ids, prompt
        self._generator = torch.Generator().manual_seed(0)
        self._sent = 0
        for _ in range(running):
            self._send()

    def _send(self) -> None:
        self._sent += 1
        ids = torch.randint(0, self._ids, self._shape, generator=self._generator)
        options = {"max_frames": self._frames, "temperature": 0.8, "top_k": 50, "seed": self._sent}
        self._engine.add(str(self._sent), {"prompt_ids": ids.numpy(), **options})

    def run(self, requests: int) -> dict[str, float]:
        """Until so many have ended."""
        ended = steps = 0
        before, started = self._engine.stats(), time.perf_counter()
        while ended < requests:
            steps += 1
            for output in self._engine.step():
                if output.error is not None:
                    raise output.error
                if output.result is not None:
                    ended += 1
                    self._send()
        seconds, after = time.perf_counter() - started, self._engine.stats()
        waited = after.get("wait_seconds", 0.0) - before.get("wait_seconds", 0.0)
        return {
            "requests_per_s": ended / seconds,
            "step_ms": 1e3 * seconds / steps,
            "host_ms": 1e3 * (seconds - waited) / steps,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="demo")
    parser.add_argument("--running", default="8", help="requests at once, several separated by commas")
    parser.add_argument("--prompt", type=int, default=156, help="rows")
    parser.add_argument("--frames", type=int, default=95)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    shape = SHAPES[options.shape]
    model = build_model(shape, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    task = frame_task(model, shape)
    assert model.pattern is not None
    longest = options.prompt + options.frames + model.pattern.longest
    found: list[dict[str, Any]] = []
    gc.collect()
    gc.freeze()  # as a stage's process does
    for running in map(int, options.running.split(",")):
        settings = EngineSettings(
            max_total_tokens=running * (-(-longest // 16) * 16 + 16),
            max_running_requests=running,
            cuda_graph_max_bs=running,
            reuse_prefixes=False,
        )
        engine = AutoregressiveEngine.build(model, task, settings)
        load = SteadyLoad(engine, running, (options.prompt, shape.columns), shape.codebook - 1, options.frames)
        load.run(running)
        rounds = [load.run(running) for _ in range(options.rounds)]
        graphs = engine.runner.graphs if isinstance(engine.runner, DeviceRunner) else ()
        largest = graphs[-1].buckets[-1] if graphs else None
        found.append({"running": running, "rows_of_the_largest_graph": largest, "rounds": rounds})
        del engine, load, graphs  # their pool is the next one's
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "cpu"
    facts = {"benchmark": "mixed-steps", "shape": options.shape, "device": name, "torch": torch.__version__}
    print(json.dumps({**facts, "prompt_rows": options.prompt, "frames": options.frames, "levels": found}))


if __name__ == "__main__":
    main()
