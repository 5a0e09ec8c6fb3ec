"""Replicas that share one GPU and one set of weights: starts, outputs, memory, and what a kill does.

Runs the pipeline of ``benchmarks/tts`` and prints one JSON object as its last line. Every cycle and every kill is in
it, failed ones too. Other flags are the pipeline's, as in ``--tts_engine.engine.cuda_graph_max_bs 16``.

    python -m benchmarks.sharing --replicas 2,3 --cycles 20 --kill follower,leader,mps-server,parent --mps on --json
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import uvloop
from benchmarks.tts.throughput import TINY

from sgl_omni.config.load import load_config
from sgl_omni.gpu.devices import usable_host
from sgl_omni.models.registry import PipelineRegistry
from sgl_omni.runtime.pipeline import Pipeline
from sgl_omni.topology.builder import build_plan
from sgl_omni.topology.host import virtual_host
from sgl_omni.topology.plan import Plan

ENGINE = "tts_engine"
SEEDS = range(4)


class Setting:
    """The pipeline with ``replicas`` engines on one GPU."""

    def __init__(self, options: argparse.Namespace, flags: list[str]) -> None:
        self.host = usable_host() or virtual_host()
        self.on_gpu = self.host.platform == "cuda"
        self.options = options
        self.base = [] if self.on_gpu else [*TINY, "--tts_engine.engine.max_total_tokens", "4096"]
        self.base += flags
        self.frames = options.frames

    def plan(self, replicas: int, *, share: bool, on_exit: str = "stop") -> Plan:
        flags = [*self.base, f"--{ENGINE}.gpu_memory_fraction", str(round(0.85 / replicas, 3))]
        flags += ["--vocoder.gpu_memory_fraction", "0.1", "--on_process_exit", on_exit]
        flags += ["--mps", self.options.mps, "--weight_share", "on" if share else "off"]
        if replicas > 1:
            flags += [f"--processes.{ENGINE}.num_replicas", str(replicas)]
            flags += [f"--processes.{ENGINE}.replica_devices", ",".join(["0"] * replicas)]
        path = Path(__file__).parent / "tts" / "pipeline.yaml"
        return build_plan(load_config(path, flags, registry=PipelineRegistry()), self.host)

    def payload(self, seed: int) -> dict[str, Any]:
        return {"seed": seed, "max_frames": self.frames, "temperature": 0.8, "top_k": 50}

    def tell(self, run: dict[str, Any]) -> None:
        """A run that is over, so that a program which is cut short has said something."""
        if not self.options.json:
            print(json.dumps(run), file=sys.stderr, flush=True)

    def card_bytes(self) -> int:
        """Memory in use on GPU 0; 0 on a CPU."""
        if not self.on_gpu:
            return 0
        import pynvml

        pynvml.nvmlInit()
        used = int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)
        pynvml.nvmlShutdown()
        return used


async def digests(pipeline: Pipeline, setting: Setting, replicas: int) -> list[list[str]]:
    """For each seed what each replica answers, one request at a time: their turn goes round."""
    found = []
    for seed in SEEDS:
        answers = [await pipeline.submit(setting.payload(seed)).result() for _ in range(replicas)]
        found.append([hashlib.sha256(bytes(memoryview(a["vocoder"]["pcm"]).cast("B"))).hexdigest() for a in answers])
    return found


async def load(pipeline: Pipeline, setting: Setting, concurrency: int, stop: asyncio.Event) -> dict[str, Any]:
    """Requests until ``stop``; the moments at which they ended, well or not."""
    ended: list[tuple[float, str]] = []

    async def client(number: int) -> None:
        while not stop.is_set():
            try:
                await pipeline.submit(setting.payload(number)).result()
                ended.append((time.monotonic(), "ok"))
            except Exception as error:  # noqa: BLE001 - reported with the run
                ended.append((time.monotonic(), f"{type(error).__name__}: {error}"[:160]))
                await asyncio.sleep(0.05)

    await asyncio.gather(*(client(number) for number in range(concurrency)))
    return {"ended": ended}


def facts(pipeline: Pipeline) -> dict[str, Any]:
    engines = [i for i in pipeline.health()["instances"] if i["process"] == ENGINE]
    return {
        "kv_tokens": [i["kv_capacity_tokens"] for i in engines],
        "weights": {i["name"]: i["weights"] for i in engines},
    }


def left_behind() -> dict[str, Any]:
    """Processes, run folders and MPS state that outlive a pipeline; all empty where it ended well."""
    base = Path(os.environ["XDG_RUNTIME_DIR"]) / "sgl-omni"
    return {
        "processes": [p.pid for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE],
        "run_folders": [str(path) for path in base.glob("run-*")],
        "mps": [str(path) for path in base.glob("mps/GPU-*") if path.is_dir()],
        "daemons": [p.pid for p in psutil.process_iter(["name"]) if "nvidia-cuda-mps" in (p.info["name"] or "")],
    }


async def settled(setting: Setting, before: int) -> dict[str, Any]:
    """What is left, once the driver has had a moment to give the memory back."""
    for _ in range(40):
        if setting.card_bytes() <= before + (64 << 20):
            break
        await asyncio.sleep(0.1)
    return {**left_behind(), "card_bytes": setting.card_bytes() - before}


async def cycle(setting: Setting, replicas: int, *, share: bool, expected: list[str] | None) -> dict[str, Any]:
    """One start, load and stop."""
    before = setting.card_bytes()
    begin = time.monotonic()
    run: dict[str, Any] = {"replicas": replicas, "share": share}
    try:
        async with Pipeline(setting.plan(replicas, share=share)) as pipeline:
            run["seconds_to_ready"] = time.monotonic() - begin
            run["card_bytes"] = setting.card_bytes() - before
            run |= facts(pipeline)
            answers = await digests(pipeline, setting, replicas)
            run["digests"] = [each[0] for each in answers]
            run["replicas_agree"] = all(len(set(each)) == 1 for each in answers)
            run["as_expected"] = expected is None or run["digests"] == expected
            stop = asyncio.Event()
            asyncio.get_running_loop().call_later(setting.options.seconds, stop.set)
            ended = (await load(pipeline, setting, setting.options.concurrency, stop))["ended"]
            run["ok"] = sum(how == "ok" for _, how in ended)
            run["failures"] = [how for _, how in ended if how != "ok"]
    except Exception as error:  # noqa: BLE001 - a failed run is a result
        run["error"] = f"{type(error).__name__}: {error}"[:2000]
    run["left"] = await settled(setting, before)
    run["clean"] = not any(run["left"][key] for key in ("processes", "run_folders", "mps", "daemons"))
    setting.tell(run)
    return run


async def kill(setting: Setting, victim: str) -> dict[str, Any]:
    """kill -9 of one process under load, what its requests saw, and whether the next start works."""
    before = setting.card_bytes()
    run: dict[str, Any] = {"victim": victim}
    try:
        if victim == "parent":
            run |= await kill_parent(setting)
        else:
            run |= await kill_member(setting, victim)
    except Exception as error:  # noqa: BLE001 - a failed run is a result
        run["error"] = f"{type(error).__name__}: {error}"[:2000]
    run["card_bytes_after"] = setting.card_bytes() - before
    setting.tell(run)
    run["next_start"] = await cycle(setting, 2, share=True, expected=None)
    return run


async def kill_member(setting: Setting, victim: str) -> dict[str, Any]:
    restart = victim != "mps-server"
    plan = setting.plan(2, share=True, on_exit="restart" if restart else "stop")
    async with Pipeline(plan, request_timeout=60) as pipeline:
        first = await digests(pipeline, setting, 2)
        stop = asyncio.Event()
        loading = asyncio.create_task(load(pipeline, setting, setting.options.concurrency, stop))
        await asyncio.sleep(1.0)
        pid = mps_server() if victim == "mps-server" else pid_of(pipeline, victim)
        at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        if not restart:
            reason = await asyncio.wait_for(pipeline.failed(), 30)
            stop.set()
            ended = (await loading)["ended"]
            return {"seconds_to_told": time.monotonic() - at, "reason": reason.splitlines()[0], **after(ended, at)}
        while pipeline.status != "ready" or pid_of(pipeline, victim) == pid:
            if time.monotonic() - at > 120:
                raise TimeoutError(f"not ready again: {pipeline.status}")
            await asyncio.sleep(0.02)
        back = time.monotonic() - at
        await asyncio.sleep(1.0)
        stop.set()
        ended = (await loading)["ended"]
        second = await digests(pipeline, setting, 2)
        same = [set(each) for each in first] == [set(each) for each in second]
        return {"seconds_to_ready_again": back, "same_outputs": same, **facts(pipeline), **after(ended, at)}


def after(ended: list[tuple[float, str]], at: float) -> dict[str, Any]:
    """What became of the requests that a kill at ``at`` hit."""
    failed = [(moment - at, how) for moment, how in ended if how != "ok" and moment >= at]
    return {
        "failed": len(failed),
        "first_failure_s": min((moment for moment, _ in failed), default=None),
        "last_failure_of_the_first_s": max((moment for moment, _ in failed if moment < 2), default=None),
        "ok_after": sum(how == "ok" and moment >= at for moment, how in ended),
        "messages": sorted({how for _, how in failed})[:4],
    }


def pid_of(pipeline: Pipeline, victim: str) -> int:
    index = {"leader": 0, "follower": 1}[victim]
    pid = next(i["pid"] for i in pipeline.health()["instances"] if i["name"] == f"{ENGINE}@r{index}")
    return pid or -1


def mps_server() -> int:
    """The server process that `mps_attach.json` of the one running pipeline names."""
    (record,) = Path(os.environ["XDG_RUNTIME_DIR"]).glob("sgl-omni/run-*/mps_attach.json")
    (servers,) = json.loads(record.read_text()).values()
    return int(next(iter(servers)))


async def kill_parent(setting: Setting) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.sharing", "--hold", *sys.argv[1:]]
    holder = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    line = await holder.stdout.readline()
    if not line.startswith(b"{"):
        raise RuntimeError(f"the held pipeline did not start: {line!r}")
    await asyncio.sleep(1.0)
    children = psutil.Process(holder.pid).children(recursive=True)
    at = time.monotonic()
    holder.send_signal(signal.SIGKILL)
    await holder.wait()
    _, alive = await asyncio.to_thread(psutil.wait_procs, children, 10)
    return {"children": len(children), "seconds_to_all_gone": time.monotonic() - at, "alive": [p.pid for p in alive]}


async def hold(setting: Setting) -> None:
    """A pipeline under load for as long as this process lives."""
    async with Pipeline(setting.plan(2, share=True)) as pipeline:
        print(json.dumps(facts(pipeline)["kv_tokens"] and {"ready": True}), flush=True)
        await load(pipeline, setting, setting.options.concurrency, asyncio.Event())


async def measure(setting: Setting, counts: Sequence[int]) -> dict[str, Any]:
    options = setting.options
    reference = await cycle(setting, 1, share=False, expected=None)
    expected = reference.get("digests")
    compared = [reference]
    for replicas in counts:
        for share in (False, True):
            compared.append(await cycle(setting, replicas, share=share, expected=expected))
    cycles = [await cycle(setting, counts[0], share=True, expected=expected) for _ in range(options.cycles)]
    kills = [await kill(setting, victim) for victim in options.kill.split(",") if victim]
    good = [c for c in cycles if "error" not in c and c["clean"] and not c["failures"] and c["as_expected"]]
    return {
        "benchmark": "sharing",
        "platform": setting.host.platform,
        "machine": platform.machine(),
        "device": setting.host.devices[0].name if setting.host.devices else None,
        "mps": options.mps,
        "compared": compared,
        "good_cycles": len(good),
        "cycles": cycles,
        "kills": kills,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", default="2", help="as in 2,3; the first is that of the cycles")
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--kill", default="follower,leader,parent", help="also mps-server, with --mps on")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=3.0, help="load of a cycle")
    parser.add_argument("--frames", type=int, default=40)
    parser.add_argument("--mps", default="off")
    parser.add_argument("--json", action="store_true", help="nothing but the JSON object")
    parser.add_argument("--hold", action="store_true", help=argparse.SUPPRESS)
    options, flags = parser.parse_known_args()
    setting = Setting(options, flags)
    if options.hold:
        uvloop.run(hold(setting))
        return
    with tempfile.TemporaryDirectory(prefix="omni-") as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder
        print(json.dumps(uvloop.run(measure(setting, [int(n) for n in options.replicas.split(",")]))))


if __name__ == "__main__":
    main()
