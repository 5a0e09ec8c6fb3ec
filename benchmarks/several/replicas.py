"""Qwen3-Omni with its speech stages once, twice on one card, and on a card each: what it speaks a second, over HTTP.

The checkpoint has the published widths and random weights, and all layers or fewer; speech ends by its limit alone.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.serving.asking import asks_of
from benchmarks.serving.load import closed_loop
from benchmarks.serving.server import ROOT, Server
from benchmarks.several.attempts import Attempt, Attempts
from benchmarks.smoke import size_of

SPEECH = ("talker_ar", "code2wav")
BUDGETS = {"image_encoder": 0.07, "audio_encoder": 0.06, "thinker": 0.50, "talker_ar": 0.09, "code2wav": 0.05}
"""Of a card that holds the whole model: all of it, with the speech stages twice."""
LAYOUTS: dict[str, tuple[int, ...]] = {
    "one card": (0,),
    "one card, two copies": (0, 0),
    "two cards": (0, 1),
    "two cards, speech on the second": (1,),
}
PLATFORMS = {"cpu": ("--platform", "cpu"), "cuda": ("--platform", "cuda")}


def arguments(folder: Path, devices: tuple[int, ...], device: str, mps: str) -> list[str]:
    """Of `sgl-omni serve`, with a copy of the speech stages for each of ``devices``, there, and all else on GPU 0."""
    found = ["--model-path", str(folder), "--name", "smoke", "--mps", mps, *PLATFORMS[device]]
    for stage, fraction in BUDGETS.items():
        found += [f"--{stage}.gpu_memory_fraction", str(fraction)]
    for stage in SPEECH:
        found += [f"--{stage}.gpu", str(devices[0])]
        if len(devices) > 1:
            found += [f"--processes.{stage}.num_replicas", str(len(devices))]
            found += [f"--processes.{stage}.replica_devices", ",".join(map(str, devices))]
    if device == "cpu":
        for stage in ("thinker", "talker_ar"):
            found += [f"--{stage}.engine.max_total_tokens", "16384"]
    return found


def make_model(folder: Path, *, layers: int, tiny: bool) -> Attempt:
    """In a process whose GPU memory ends with it, with all layers for 0.

    Raises ``RuntimeError`` with what that process said last.
    """
    command = [sys.executable, "-m", "benchmarks.real_size", "--family", "qwen3_omni", "--out", str(folder)]
    command += ["--tiny"] if tiny else ["--layers", str(layers)] if layers else []
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the folder could not be made: {done.stderr[-2000:]}")
    found: Attempt = json.loads(done.stdout.splitlines()[-1])
    return found


def serve(found: list[str], *, concurrency: int, seconds: float, tiny: bool) -> Attempt:
    """A server's life under load: a warm-up of a quarter of the time, then what counts."""
    ask = asks_of("qwen3_omni", size_of("qwen3_omni", tiny))["spoken"]
    with Server(*found) as server:
        result: dict[str, Any] = {"seconds_to_ready": server.wait_ready(240)}
        try:
            result["warm_up"] = asyncio.run(closed_loop(server.url, ask, concurrency, seconds / 4, 60))
            result["load"] = asyncio.run(closed_loop(server.url, ask, concurrency, seconds, 60))
            health, gauges = server.health(), server.gauges()
            result["routes"] = health["routes"]
            result["frames_of"] = {
                name: numbers.get("talker_ar_generated_rows") for name, numbers in gauges.items() if "talker" in name
            }
            result["devices"] = {i["name"]: i["device"] for i in health["instances"]}
            result["ended"] = server.stop()
        except Exception as error:
            raise RuntimeError(f"{error}\n" + "\n".join(server.lines[-30:])) from error
    return result


async def measure(
    attempts: Attempts,
    *,
    seconds: float,
    concurrency: int,
    layers: int,
    layouts: tuple[str, ...],
    mps: tuple[str, ...],
    rounds: int,
) -> None:
    tiny = not attempts.on_gpu
    folder = Path(tempfile.mkdtemp(prefix="omni-model-"))
    try:
        made = await attempts.run(
            "replicas",
            {"what": "checkpoint"},
            lambda: asyncio.to_thread(make_model, folder, layers=layers, tiny=tiny),
            240,
        )
        if "error" in made:
            return
        for number in range(rounds):
            for layout in layouts:
                for mode in mps:
                    what = {"layout": layout, "mps": mode, "round": number, "concurrency": concurrency}
                    command = arguments(folder, LAYOUTS[layout], attempts.device, mode)
                    await attempts.run(
                        "replicas",
                        what,
                        lambda c=command: asyncio.to_thread(  # type: ignore[misc]
                            serve, c, concurrency=concurrency, seconds=seconds, tiny=tiny
                        ),
                        420,
                    )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
