"""Several copies of an engine on one card, on each of two cards: one alone, the other alone, then both at once.

Each card has a pipeline of ``benchmarks/tts`` of its own, in a process of its own, on half of the cores and with an MPS
daemon of its own. Loads at once begin at the same moment.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from pathlib import Path

from benchmarks.several.attempts import Attempt, Attempts

from sgl_omni.topology.host import Host

ROOT = Path(__file__).parents[2]


def halves(host: Host) -> list[list[int]]:
    """Cores for each of two cards: those of its node where the cards are on two; else half of the physical ones, with
    all their hardware threads."""
    allowed = os.sched_getaffinity(0)
    cores = host.cores
    if cores is None:
        ordered = sorted(allowed)
        return [ordered[: len(ordered) // 2], ordered[len(ordered) // 2 :]]
    nodes = [host.node(0), host.node(1)]
    if None not in nodes and nodes[0] != nodes[1] and all(cores.of_node(node) for node in nodes):
        return [sorted(cores.of_node(node) & allowed) for node in nodes]
    physical = cores.physical(None)
    parts = (physical[: len(physical) // 2], physical[len(physical) // 2 :])
    return [sorted({cpu for core in part for cpu in cores.siblings[core]} & allowed) for part in parts]


def flags(card: int, copies: int, share: str) -> list[str]:
    found = ["--tts_engine.gpu", str(card), "--vocoder.gpu", str(card), "--vocoder.gpu_memory_fraction", "0.15"]
    found += ["--tts_engine.gpu_memory_fraction", str(round(0.8 / copies, 3))]
    if copies > 1:
        found += ["--processes.tts_engine.num_replicas", str(copies), "--weight_share", share]
        found += ["--processes.tts_engine.replica_devices", ",".join([str(card)] * copies)]
    return found


async def begin(card: int, cores: Sequence[int], command: list[str]) -> Process:
    """A pipeline that is ready and waits for the word. Raises ``RuntimeError`` with what it said last."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.tts.throughput", "--json", "--gate", *command),
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        cwd=ROOT,
        limit=2**24,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    assert process.stdout is not None
    try:
        line = await process.stdout.readline()
    except BaseException:
        process.terminate()
        await process.wait()
        raise
    if b"ready" not in line:
        _, said = await process.communicate()
        raise RuntimeError(f"card {card} did not get ready: {said.decode(errors='replace')[-2000:]}")
    return process


async def run_cards(cards: Sequence[int], cores: list[list[int]], command: list[list[str]]) -> Attempt:
    processes: list[Process] = []
    try:
        started = await asyncio.gather(
            *(begin(card, cores[card], command[card]) for card in cards), return_exceptions=True
        )
        processes = [p for p in started if not isinstance(p, BaseException)]
        for failure in started:
            if isinstance(failure, BaseException):
                raise failure
        printed = await asyncio.gather(*(process.communicate(b"go\n") for process in processes))
    finally:
        for process in processes:
            if process.returncode is None:
                process.terminate()
                await process.wait()
    found: Attempt = {"cards": {}}
    for card, (out, said) in zip(cards, printed, strict=True):
        if not out.strip():
            raise RuntimeError(f"card {card}: {said.decode(errors='replace')[-2000:]}")
        result = json.loads(out.splitlines()[-1])
        engines = {n: g for n, g in result["gauges"]["instances"].items() if n.startswith("tts_engine")}
        found["cards"][card] = {
            "cores": len(cores[card]),
            "seconds_to_ready": result["seconds_to_ready"],
            "runs": result["runs"],
            "generated_rows": {name: gauges["tts_engine.generated_rows"] for name, gauges in engines.items()},
        }
    runs = [card["runs"] for card in found["cards"].values()]
    found["requests_per_s"] = [sum(run["requests_per_s"] for run in at) for at in zip(*runs, strict=True)]
    return found


async def measure(
    attempts: Attempts, *, copies: int, concurrency: str, seconds: float, mps: str, share: str, rounds: int
) -> None:
    host = attempts.host
    cores = halves(host)
    common = ["--concurrency", concurrency, "--seconds", str(seconds), "--warm-up", str(seconds / 4), "--mps", mps]
    tokens = [] if attempts.on_gpu else ["--tts_engine.engine.max_total_tokens", "4096"]
    command = [[*common, *tokens, *flags(card, copies, share)] for card in (0, 1)]
    for number in range(rounds):
        for cards in ((0,), (1,), (0, 1)):
            what = {"cards_used": cards, "copies": copies, "mps": mps, "share": share, "concurrency": concurrency}
            await attempts.run("both", what | {"round": number}, lambda c=cards: run_cards(c, cores, command), 240)  # type: ignore[misc]
