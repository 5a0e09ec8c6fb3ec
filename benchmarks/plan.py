"""How long a plan takes: the shipped replica example as a command, and 1,000 stages of 64 replicas in this process.

Prints one JSON object with every run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from sgl_omni.config.load import resolve
from sgl_omni.config.yaml_source import read_yaml
from sgl_omni.models.registry import PipelineRegistry
from sgl_omni.topology.builder import build_plan
from sgl_omni.topology.host import GIB, cuda_host

ROOT = Path(__file__).parents[1]
STAGE = "factory_path: sgl_omni.models.demo_voice.stages.create_vocoder, gpu: 0, gpu_memory_fraction: 0.00001"


def large_config(stages: int, replicas: int) -> str:
    """A chain of GPU stages, each a Process of its own, its replicas over eight GPUs."""
    lines = ["model_path: demo-voice", "stages:"]
    for i in range(stages):
        end = f"next: s{i + 1}" if i + 1 < stages else "terminal: true"
        lines.append(f"  - {{name: s{i}, {STAGE}, process: p{i}, {end}}}")
    lines.append("processes:")
    devices = [r % 8 for r in range(replicas)]
    lines += [f"  p{i}: {{num_replicas: {replicas}, replica_devices: {devices}}}" for i in range(stages)]
    return "\n".join(lines)


def command_seconds(config: Path) -> float:
    begin = time.perf_counter()
    command = [sys.executable, "-m", "sgl_omni.cli.main", "config", "resolve", "--platform", "cpu"]
    subprocess.run([*command, "--config", str(config)], check=True, capture_output=True)
    return time.perf_counter() - begin


def plan_seconds(text: str) -> tuple[float, float, int]:
    """Seconds to read, seconds to plan, instances planned."""
    begin = time.perf_counter()
    resolved = resolve(read_yaml(text, "large.yaml"), registry=PipelineRegistry())
    read = time.perf_counter()
    plan = build_plan(resolved, cuda_host(8, 80 * GIB), {})
    return read - begin, time.perf_counter() - read, len(plan.instances)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=ROOT / "examples/configs/demo_voice_replicas.yaml")
    parser.add_argument("--stages", type=int, default=1000)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    text = large_config(options.stages, options.replicas)
    large = [plan_seconds(text) for _ in range(options.runs)]
    result = {
        "config_resolve_command_s": [round(command_seconds(options.config), 3) for _ in range(options.runs)],
        "large_read_s": [round(read, 3) for read, _, _ in large],
        "large_plan_s": [round(planned, 3) for _, planned, _ in large],
        "large_instances": large[0][2],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
