"""Replicas that share one GPU and one set of weights: starts, outputs, memory, and what a kill does.

Runs the pipeline of ``benchmarks/tts`` and prints one JSON object as its last line. Every cycle and every kill is in
it, failed ones too; each is also a line of JSON on standard error, or in ``--out``, as soon as it has ended. Other
flags are the pipeline's, as in ``--tts_engine.engine.cuda_graph_max_bs 16``.

    python -m benchmarks.sharing --replicas 2,3 --cycles 20 --kill follower,leader,mps-server,parent --mps on

One replica and every number of replicas run once without sharing, for their outputs and their memory. Of a cycle with
N replicas, ``memory`` says what a follower takes of the card:

    follower_bytes = (card_bytes of the N that share - card_bytes of one replica) / (N - 1)
    beyond_bytes   = follower_bytes - kv_bytes - graph_bytes - context_bytes

``kv_bytes`` is the declared pool, ``graph_bytes`` what torch reserved while the follower captured its graphs, and
``context_bytes`` what a process takes that has made a CUDA context, an MPS client where MPS is on.
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
from benchmarks.ending import run as run_until_told
from benchmarks.tts.throughput import TINY

from sgl_omni.config.load import load_config
from sgl_omni.gpu.devices import gpu_facts, usable_host
from sgl_omni.gpu.mps import MpsDaemon
from sgl_omni.models.registry import PipelineRegistry
from sgl_omni.runtime.pipeline import Pipeline
from sgl_omni.topology.builder import build_plan
from sgl_omni.topology.host import virtual_host
from sgl_omni.topology.plan import Plan

ENGINE = "tts_engine"
SEEDS = range(2)
CLEAN_SECONDS = 10.0
"""How long what a pipeline had may take to be gone: the driver gives memory back a moment after a process has ended."""

CONTEXT = "import torch; torch.cuda.synchronize(); print('ready', flush=True); input()"
"""A process that has made a CUDA context, and nothing else."""


class Setting:
    """The pipeline with ``replicas`` engines on one GPU."""

    def __init__(self, options: argparse.Namespace, flags: list[str]) -> None:
        self.host = usable_host() or virtual_host()
        self.on_gpu = self.host.platform == "cuda"
        self.options = options
        self.base = [] if self.on_gpu else [*TINY, "--tts_engine.engine.max_total_tokens", "4096"]
        # A prompt whose beginning is known is computed in other shapes, and so rounded otherwise, than one that is not.
        self.base += ["--tts_engine.factory.reuse_prefixes", "false", *flags]
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
        if self.options.out is None:
            print(json.dumps(run), file=sys.stderr, flush=True)
            return
        with self.options.out.open("a") as file:
            file.write(json.dumps(run) + "\n")

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


async def facts(pipeline: Pipeline) -> dict[str, Any]:
    engines = [i for i in pipeline.health()["instances"] if i["process"] == ENGINE]
    await pipeline.refresh()
    gauges = pipeline.stats()["instances"]
    tokens, each = ([_gauge(gauges, i, key) for i in engines] for key in ("kv_capacity_tokens", "kv_bytes_per_token"))
    return {
        "kv_tokens": [i["kv_capacity_tokens"] for i in engines],
        "weights": {i["name"]: i["weights"] for i in engines},
        "start": {i["name"]: i["start"] for i in pipeline.health()["instances"]},
        "kv_bytes": [count * size for count, size in zip(tokens, each, strict=True)],
        "graph_bytes": [_gauge(gauges, i, "graph_bytes") for i in engines],
    }


def _gauge(gauges: dict[str, Any], instance: dict[str, Any], key: str) -> int:
    """0 for what an engine on a CPU does not have."""
    return int(gauges[instance["name"]].get(f"{ENGINE}.{key}", 0))


def left_behind() -> dict[str, Any]:
    """Processes, run folders and MPS state that outlive a pipeline; all empty where it ended well. A zombie has ended,
    whenever its parent, which may be the container's first process, takes note of it."""
    base = Path(os.environ["XDG_RUNTIME_DIR"]) / "sgl-omni"
    return {
        "processes": [p.pid for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE],
        "run_folders": [str(path) for path in base.glob("run-*")],
        "mps": [str(path) for path in base.glob("mps/GPU-*") if path.is_dir()],
        "daemons": [
            p.pid
            for p in psutil.process_iter(["name", "status"])
            if "nvidia-cuda-mps" in (p.info["name"] or "") and p.info["status"] != psutil.STATUS_ZOMBIE
        ],
    }


async def settled(setting: Setting, before: int) -> dict[str, Any]:
    """What is left, once nothing is or ``CLEAN_SECONDS`` are over."""
    begin = time.monotonic()
    while True:
        left = {**left_behind(), "card_bytes": max(0, setting.card_bytes() - before)}
        seconds = time.monotonic() - begin
        if not any(left.values()):
            return {"left": left, "clean": True, "seconds_until_clean": seconds}
        if seconds > CLEAN_SECONDS:
            return {"left": left, "clean": False, "seconds_until_clean": None}
        await asyncio.sleep(0.05)


async def context_bytes(setting: Setting) -> int | None:
    """What a second process takes of the card by its context alone, an MPS client where MPS is on: the first one also
    brings the server. None on a CPU."""
    if not setting.on_gpu:
        return None
    if setting.options.mps == "off":
        return await _second_context(setting, {})
    found = gpu_facts(0)
    daemon = MpsDaemon(Path(os.environ["XDG_RUNTIME_DIR"]) / "sgl-omni" / "mps", found.uuid, "benchmark")
    await asyncio.to_thread(daemon.acquire, list(found.compute_pids))
    try:
        return await _second_context(setting, {**daemon.control.environment, "CUDA_VISIBLE_DEVICES": found.uuid})
    finally:
        told = await asyncio.to_thread(daemon.release)
        if told is not None:
            print(told, file=sys.stderr, flush=True)


async def _second_context(setting: Setting, environment: dict[str, str]) -> int:
    processes = []
    try:
        for _ in range(2):
            before = setting.card_bytes()
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", CONTEXT),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | environment,
            )
            processes.append(process)
            assert process.stdout is not None
            if not await process.stdout.readline():
                raise RuntimeError("a process could not make a CUDA context")
        return setting.card_bytes() - before
    finally:
        for process in processes:
            await process.communicate(b"\n")


def memory_of_follower(run: dict[str, Any], one: dict[str, Any], context: int | None) -> dict[str, Any]:
    """See the top of this file; all None where one of the runs failed, or on a CPU."""
    keys = ("follower_bytes", "kv_bytes", "graph_bytes", "context_bytes", "beyond_bytes")
    if context is None or not run.get("card_bytes") or not one.get("card_bytes") or run["replicas"] < 2:
        return dict.fromkeys(keys)
    follower = (run["card_bytes"] - one["card_bytes"]) // (run["replicas"] - 1)
    kv, graphs = run["kv_bytes"][-1], run["graph_bytes"][-1]
    return dict(zip(keys, (follower, kv, graphs, context, follower - kv - graphs - context), strict=True))


async def cycle(
    setting: Setting,
    replicas: int,
    *,
    share: bool,
    expected: list[str] | None = None,
    one: dict[str, Any] | None = None,
    context: int | None = None,
) -> dict[str, Any]:
    """One start, load and stop. ``expected``: digests; ``one`` and ``context``: what its memory is compared with."""
    before = setting.card_bytes()
    begin = time.monotonic()
    run: dict[str, Any] = {"replicas": replicas, "share": share}
    try:
        async with Pipeline(setting.plan(replicas, share=share)) as pipeline:
            run["seconds_to_ready"] = time.monotonic() - begin
            run["card_bytes"] = setting.card_bytes() - before
            run |= await facts(pipeline)
            answers = await digests(pipeline, setting, replicas)
            run["digests"] = [each[0] for each in answers]
            run["replicas_agree"] = all(len(set(each)) == 1 for each in answers)
            run["as_expected"] = expected is None or run["digests"] == expected
            stop = asyncio.Event()
            asyncio.get_running_loop().call_later(setting.options.load_seconds, stop.set)
            ended = (await load(pipeline, setting, setting.options.concurrency, stop))["ended"]
            run["ok"] = sum(how == "ok" for _, how in ended)
            run["failures"] = [how for _, how in ended if how != "ok"]
    except Exception as error:  # noqa: BLE001 - a failed run is a result
        run["error"] = f"{type(error).__name__}: {error}"[:2000]
    if share and one is not None:
        run["memory"] = memory_of_follower(run, one, context)
    run |= await settled(setting, before)
    run["seconds"] = time.monotonic() - begin
    run["good"] = is_good(run)
    setting.tell(run)
    return run


def is_good(run: dict[str, Any]) -> bool:
    """All attached, equal KV capacities, the expected outputs, no failure, and nothing left."""
    if "error" in run:
        return False
    attached = [model["attached"] for weights in run["weights"].values() for model in weights["models"].values()]
    as_shared = sorted(attached) == [False] + [True] * (run["replicas"] - 1) if run["share"] else not attached
    equal = len({json.dumps(tokens) for tokens in run["kv_tokens"]}) == 1
    answered = run["ok"] > 0 and not run["failures"] and run["replicas_agree"] and run["as_expected"]
    return bool(as_shared and equal and answered and run["clean"])


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
    run["next_start"] = await cycle(setting, 2, share=True)
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
        return {"seconds_to_ready_again": back, "same_outputs": same, **await facts(pipeline), **after(ended, at)}


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
    try:
        line = await holder.stdout.readline()
        if not line.startswith(b"{"):
            raise RuntimeError(f"the held pipeline did not start: {line!r}")
        await asyncio.sleep(1.0)
    except BaseException:
        if holder.returncode is None:
            holder.terminate()
        await holder.wait()
        raise
    children = psutil.Process(holder.pid).children(recursive=True)
    at = time.monotonic()
    holder.send_signal(signal.SIGKILL)
    await holder.wait()
    _, alive = await asyncio.to_thread(psutil.wait_procs, children, 10)
    return {"children": len(children), "seconds_to_all_gone": time.monotonic() - at, "alive": [p.pid for p in alive]}


async def hold(setting: Setting) -> None:
    """A pipeline under load for as long as this process lives."""
    async with Pipeline(setting.plan(2, share=True)) as pipeline:
        print(json.dumps({"ready": True}), flush=True)
        await load(pipeline, setting, setting.options.concurrency, asyncio.Event())


async def measure(setting: Setting, counts: Sequence[int]) -> dict[str, Any]:
    options = setting.options
    context = await context_bytes(setting)
    one = await cycle(setting, 1, share=False)
    expected = one.get("digests")
    unshared = [one, *[await cycle(setting, replicas, share=False, expected=expected) for replicas in counts]]
    cycles = [
        await cycle(setting, counts[i % len(counts)], share=True, expected=expected, one=one, context=context)
        for i in range(options.cycles)
    ]
    kills = [await kill(setting, victim) for victim in options.kill.split(",") if victim]
    return {
        "benchmark": "sharing",
        "platform": setting.host.platform,
        "machine": platform.machine(),
        "device": setting.host.devices[0].name if setting.host.devices else None,
        "mps": options.mps,
        "context_bytes": context,
        "unshared": unshared,
        "good_cycles": sum(c["good"] for c in cycles),
        "cycles": cycles,
        "kills": kills,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", default="2", help="as in 2,3")
    parser.add_argument("--cycles", type=int, default=20, help="with sharing in all, each number of replicas in turn")
    parser.add_argument("--kill", default="follower,leader,parent", help="also mps-server, with --mps on")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--load-seconds", type=float, default=1.0, help="load of a cycle, after the compared outputs")
    parser.add_argument("--frames", type=int, default=40)
    parser.add_argument("--mps", default="off")
    parser.add_argument("--out", type=Path, help="a file to which each run is added as a line, not standard error")
    parser.add_argument("--json", action="store_true", help="changes nothing: standard output is JSON in any case")
    parser.add_argument("--hold", action="store_true", help=argparse.SUPPRESS)
    options, flags = parser.parse_known_args()
    setting = Setting(options, flags)
    if options.hold:
        run_until_told(hold(setting))
        return
    with tempfile.TemporaryDirectory(prefix="omni-") as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder
        counts = [int(n) for n in options.replicas.split(",")]
        if min(counts) < 2:
            parser.error("--replicas: sharing takes two or more")
        print(json.dumps(run_until_told(measure(setting, counts))))


if __name__ == "__main__":
    main()
