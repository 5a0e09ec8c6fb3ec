"""What a second card is good for: transfers, replicas, tensor parallelism, and copies on each of two cards.

Sections, all by default, in this order: ``transfer`` (tensors by device and by host memory, on one card and across),
``replicas`` (Qwen3-Omni's speech stages on one card and on two), ``tp`` (one rank and two) and ``both`` (two cards full
of copies, alone and at once). Each attempt is a line of JSON as soon as it has ended, failed ones too, and ``--out``
keeps them in a file; the last line is a summary.

    python -m benchmarks.several_gpus --sections transfer,tp --out several.json

On a CPU (``--device cpu``) all of it runs with small models and virtual GPUs: a rehearsal whose figures mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.ending import run
from benchmarks.several import both_cards, replicas, tensor_parallel, transfer
from benchmarks.several.attempts import Attempt, Attempts, in_a_process

SECTIONS = ("transfer", "replicas", "tp", "both")
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
"""NVLink multicast stays off: it belongs to the fabric, which others may use."""


def versions() -> dict[str, Any]:
    import torch

    found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


async def machine(attempts: Attempts) -> Attempt:
    """The cards, how they are linked, and what plain copies reach."""
    found: Attempt = {"machine": platform.machine(), "cores": len(os.sched_getaffinity(0))}
    found["versions"] = await asyncio.to_thread(in_a_process, versions)
    found["environment"] = {key: os.environ.get(key) for key in (*NO_MULTICAST, "CUDA_VISIBLE_DEVICES")}
    if attempts.on_gpu:
        found["devices"] = [device.name for device in attempts.host.devices or ()]
        for name, command in {
            "links": ["topo", "-m"],
            "driver": ["--query-gpu=driver_version", "--format=csv"],
        }.items():
            done = await asyncio.to_thread(subprocess.run, ["nvidia-smi", *command], capture_output=True, text=True)
            found[name] = (done.stdout or done.stderr).splitlines()
        found["copies"] = await asyncio.to_thread(in_a_process, transfer.ceilings)
    return found


async def measure(options: argparse.Namespace) -> list[Attempt]:
    attempts = Attempts(options.device, options.out, options.until)
    await attempts.run("machine", {}, lambda: machine(attempts), 120)
    small, rounds = not attempts.on_gpu, options.rounds
    for section in options.sections.split(","):
        if section == "transfer":
            sizes = transfer.SIZES[:3] if small else transfer.SIZES
            ways = tuple(options.ways.split(";"))
            await transfer.measure(
                attempts, seconds=options.seconds or (0.1 if small else 1.0), sizes=sizes, rounds=rounds, ways=ways
            )
        elif section == "replicas":
            await replicas.measure(
                attempts,
                seconds=options.seconds or (4.0 if small else 12.0),
                concurrency=4 if small else options.concurrency,
                layers=options.layers,
                layouts=tuple(options.layouts.split(";")),
                mps=("off",) if small else tuple(options.mps.split(",")),
                rounds=rounds,
            )
        elif section == "tp":
            batches, outputs = ([1, 4], (4, 12)) if small else ([1, 32], (32, 288))
            await tensor_parallel.measure(
                attempts,
                layers=options.layers,
                outputs=outputs,
                batches=batches,
                dtypes=tuple(options.dtypes.split(",")),
            )
        else:
            await both_cards.measure(
                attempts,
                copies=options.copies,
                concurrency="4" if small else "128,192",
                seconds=options.seconds or (5.0 if small else 12.0),
                mps="off" if small else "on",
                share=options.share,
                rounds=rounds,
            )
    return attempts.all


def summary(found: list[Attempt]) -> dict[str, Any]:
    """What one reads first."""
    failed = [{k: v for k, v in a.items() if k not in ("error", "took_s")} for a in found if "error" in a]
    across = {a["way"]: {s: m["payloads_bytes_per_s"] for s, m in a["sizes"].items()} for a in found if "sizes" in a}
    spoken = {f"{a['layout']}, mps {a['mps']}": a["load"]["audio_seconds_per_s"] for a in found if "load" in a}
    steps = {
        f"{a['shape']} tp {a['tp']} {a['dtype']} {'graphs' if a['graphs'] else 'no graphs'}": {
            "step_ms": {batch: statistics.median(values) for batch, values in a["step_ms"].items()},
            "sums_share_of_step": a.get("sums_share_of_step"),
            "agreement": a.get("agreement"),
        }
        for a in found
        if "step_ms" in a
    }
    both = {str(a["cards_used"]): a["requests_per_s"] for a in found if "cards" in a}
    return {
        "benchmark": "several-gpus",
        "attempts": len(found),
        "failed": failed,
        "payloads_bytes_per_s": across,
        "audio_seconds_per_s": spoken,
        "steps": steps,
        "requests_per_s": both,
    }


def at_least(least: float, kind: type = float) -> Callable[[str], Any]:
    """Reads a number. Raises ``argparse.ArgumentTypeError`` for one below ``least``, or none."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"must be a number, not {text!r}") from error
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"must be at least {least:g}, not {text}")
        return value

    return read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--out", type=Path, help="a file for all attempts, written anew after each")
    parser.add_argument("--until", type=at_least(0), help="seconds after which no other attempt is begun")
    parser.add_argument("--seconds", type=at_least(0.01), help="of each load; by default 1 (transfer) or 12")
    parser.add_argument("--rounds", type=at_least(1, int), default=1, help="of transfer, replicas and both")
    parser.add_argument(
        "--layers", type=at_least(0, int), default=8, help="of thinker and talker in place of 48 and 20; 0 for all"
    )
    parser.add_argument("--ways", default=";".join(transfer.WAYS), help="of transfer, separated by semicolons")
    parser.add_argument("--layouts", default=";".join(replicas.LAYOUTS), help="of replicas, separated by semicolons")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="of the ranks")
    parser.add_argument("--concurrency", type=at_least(1, int), default=32, help="callers of replicas")
    parser.add_argument("--mps", default="auto", help="of replicas; several, separated by commas, one after another")
    parser.add_argument("--copies", type=at_least(1, int), default=2, help="engines on each card, for both")
    parser.add_argument("--share", choices=("on", "off"), default="on", help="weights among them")
    options = parser.parse_args()
    for name, mark, known in (
        ("sections", ",", SECTIONS),
        ("dtypes", ",", ("float32", "bfloat16")),
        ("mps", ",", ("off", "auto", "on")),
        ("ways", ";", transfer.WAYS),
        ("layouts", ";", replicas.LAYOUTS),
    ):
        if unknown := set(getattr(options, name).split(mark)) - set(known):
            told = f"{mark} ".join(repr(each) for each in sorted(unknown))
            parser.error(f"--{name}: there is no {told}, but {f'{mark} '.join(known)}")
    if options.out is not None and (options.out.is_dir() or not options.out.parent.is_dir()):
        parser.error(f"--out: no file can be written at {options.out}")
    os.environ |= {key: os.environ.get(key, value) for key, value in NO_MULTICAST.items()}
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory(prefix="omni-") as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder
        found = summary(run(measure(options)))
    print(json.dumps(found))
    sys.exit(1 if found["failed"] else 0)


if __name__ == "__main__":
    main()
