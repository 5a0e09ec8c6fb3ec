"""`sgl-omni plan advise`: measures one replica, works out how many the machine has room for, and tries that."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sgl_omni.cli.config import once
from sgl_omni.cli.options import SECONDS, SECONDS_OR_NONE, writable_file
from sgl_omni.cli.told import run_until_told
from sgl_omni.errors import LaunchRefused

if TYPE_CHECKING:
    from sgl_omni.bench.measure import Load
    from sgl_omni.bench.workload import Workload
    from sgl_omni.config.resolved import ResolvedConfig
    from sgl_omni.dp.advice import Advice
    from sgl_omni.dp.advised import Seen
    from sgl_omni.topology.host import Host
    from sgl_omni.topology.plan import Plan

READING_SECONDS = 0.25


@click.group()
def app() -> None:
    """Find a topology by measuring."""


@dataclass(frozen=True, slots=True)
class Target:
    """What is advised about: the engine's stage and Process, the device and its memory, and the cores near it."""

    plan: Plan
    host: Host
    resolved: ResolvedConfig
    stage: str
    process: str
    device: int
    memory_bytes: int
    cores: tuple[int, ...]


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.option(
    "--config", "config_path", type=click.Path(path_type=Path), multiple=True, callback=once, help="YAML configuration."
)
@click.option("--model-path", multiple=True, callback=once, help="Model id or folder.")
@click.option("--platform", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--virtual-gpu-memory", default="4GiB", show_default=True, help="Memory of a GPU on the CPU platform.")
@click.option("--url", help="A running server of this configuration, which is measured; nothing is tried then.")
@click.option("--concurrency", type=click.IntRange(min=1), help="Callers; left out: doubled until the plateau.")
@click.option("--ttfa", type=SECONDS, help="Time to first audio (p95) that a level must keep to count.")
@click.option("--replicas", type=click.IntRange(min=2), help="Try so many, whatever the rule says.")
@click.option("--seconds", type=SECONDS, default=15.0, show_default=True, help="Measured, for each level.")
@click.option("--warmup", type=SECONDS_OR_NONE, default=3.0, show_default=True, help="Seconds not measured.")
@click.option("--start-timeout", type=SECONDS, default=600.0, show_default=True, help="Seconds a server may take.")
@click.option("--texts", default="english", show_default=True, help="A set that ships, or a file with a text a line.")
@click.option("--seed", default=0, show_default=True, help="Draws the same texts again.")
@click.option("--voice", help="Voice in the requests.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), help="Steps of the model that a speech may take.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("advised.yaml"),
    show_default=True,
    callback=writable_file,
    help="The configuration that is found.",
)
@click.option(
    "--report", type=click.Path(dir_okay=False, path_type=Path), callback=writable_file, help="JSON with all figures."
)
@click.pass_context
def advise(
    ctx: click.Context,
    config_path: Path | None,
    model_path: str | None,
    platform: str,
    virtual_gpu_memory: str,
    url: str | None,
    concurrency: int | None,
    ttfa: float | None,
    replicas: int | None,
    seconds: float,
    warmup: float,
    start_timeout: float,
    texts: str,
    seed: int,
    voice: str | None,
    max_new_tokens: int | None,
    out: Path,
    report: Path | None,
) -> None:
    """Measure one replica of a speech pipeline and say how many its GPU has room for.

    Copies pay where one, at its best, leaves the GPU idle: at most 60 % of its multiprocessors' time in use. Where they
    may pay, a configuration with them is written, served and measured against the one replica.

    Exit status: 0 with an answer, whatever it is; 1 when a server or a measurement failed, 2 when something is refused.
    """
    from sgl_omni.bench.measure import Load
    from sgl_omni.bench.workload import Workload, load_texts

    target = look(config_path, model_path, ctx.args, platform, virtual_gpu_memory)
    served = target.resolved.config.model_path or target.plan.name
    workload = Workload(load_texts(texts), seed, None, served, voice, max_new_tokens)
    load = Load(concurrency=concurrency or 0, warmup=warmup, seconds=seconds)
    source = ["--config", str(config_path)] if config_path else []
    source += ["--model-path", model_path] if model_path else []
    common = ["--platform", target.plan.platform, "--virtual-gpu-memory", virtual_gpu_memory]
    arguments = [*source, *common, *ctx.args]
    found: dict[str, Any] = {"stage": target.stage, "platform": target.plan.platform, "cores": list(target.cores)}
    try:
        run_until_told(
            _advise(target, arguments, common, url, workload, load, ttfa, replicas, start_timeout, out, found)
        )
    finally:
        if report is not None:
            report.write_text(json.dumps(found, indent=1) + "\n")


def look(
    config_path: Path | None, model_path: str | None, flags: list[str], platform: str, virtual_gpu_memory: str
) -> Target:
    """The plan of one replica. Refuses what cannot be advised about."""
    from sgl_omni.config.load import load_config
    from sgl_omni.config.scalars import parse_bytes
    from sgl_omni.gpu.affinity import read_cores
    from sgl_omni.gpu.devices import usable_host
    from sgl_omni.models.registry import PipelineRegistry
    from sgl_omni.topology.builder import build_plan
    from sgl_omni.topology.host import virtual_host

    if config_path is None and model_path is None:
        raise click.UsageError("give --config FILE or --model-path MODEL")
    resolved = load_config(config_path, flags, registry=PipelineRegistry(), model_path=model_path)
    host = None if platform == "cpu" else usable_host()
    if platform == "cuda" and host is None:
        raise LaunchRefused("--platform cuda: there is no GPU here, or the installed torch is built for the CPU only")
    cores = read_cores()
    if host is None:
        host = virtual_host(parse_bytes(virtual_gpu_memory), os.cpu_count(), cores)
    plan = build_plan(resolved, host)
    if len(resolved.engine_stages) != 1:
        raise LaunchRefused(f"advice is for pipelines of one engine stage; this one has {len(resolved.engine_stages)}")
    (stage,) = resolved.engine_stages
    process = plan.process(plan.stage(stage).process)
    if process.num_replicas > 1 or process.tp_size > 1:
        raise LaunchRefused(f"Process '{process.name}' has replicas or ranks; advice starts from one")
    device = plan.instances_of(process.name)[0].device
    memory = None if device is None else host.memory(device)
    if device is None or memory is None:
        raise LaunchRefused(f"stage '{stage}' uses no GPU of known memory, so there is none to fill")
    near = cores.physical(host.node(device))
    return Target(plan, host, resolved, stage, process.name, device, memory, near or cores.physical(None))


async def _advise(
    target: Target,
    arguments: list[str],
    common: list[str],
    url: str | None,
    workload: Workload,
    load: Load,
    ttfa: float | None,
    replicas: int | None,
    start_timeout: float,
    out: Path,
    report: dict[str, Any],
) -> None:
    from contextlib import AsyncExitStack

    from sgl_omni.bench.study import Launched
    from sgl_omni.config.views import effective_tree
    from sgl_omni.dp import advised

    async with AsyncExitStack() as stack:
        if url is None:
            click.echo("starting one replica", err=True)
            server = await stack.enter_async_context(Launched(["serve", "--port", "0", *arguments], None, {}))
            at = await server.url(start_timeout)
        else:
            at = url
        level, before, seen = await plateau(target, at, workload, load, ttfa)
    found = advised.measured(seen)
    report |= {"one": before, "seen": _facts(seen), "measured": asdict(found)}
    click.echo(_told(target, level, before, seen))
    advice = decide(target, seen, replicas)
    report["advice"] = asdict(advice)
    if advice.replicas == 1:
        report["verdict"] = f"not worth it: one replica is what this machine has room for, by {advice.bound}"
        click.echo(report["verdict"])
        save(effective_tree(target.resolved), report["verdict"], out)
        return
    tree = write(target, advice, seen, out)
    click.echo(
        f"{advice.replicas} replicas, bounded by {advice.bound}: {advice.cores_each} cores and "
        f"{advice.max_total_tokens} tokens each, weights {'shared' if advice.weight_share else 'each its own'}: {out}"
    )
    if url is not None:
        report["verdict"] = "not tried: the running server would have its part of the machine; run without --url"
        click.echo(report["verdict"])
        save(tree, report["verdict"], out)
        return
    after = await tried(out, common, workload, load, level, start_timeout)
    report["several"] = after
    best = max(after, key=lambda figures: float(figures["requests_per_s"]))
    rates = float(before["requests_per_s"]), float(best["requests_per_s"])
    report["verdict"] = advised.verdict(*rates, load.seconds, advice.replicas)
    click.echo(report["verdict"])
    save(tree, report["verdict"], out)


async def plateau(
    target: Target, url: str, workload: Workload, load: Load, ttfa: float | None
) -> tuple[int, dict[str, Any], Seen]:
    """The level at which one replica serves most within the target, its figures, and what was seen there."""
    from sgl_omni.bench.measure import BenchError, Sweep

    sweep = Sweep()
    levels: list[tuple[int, dict[str, Any], Seen]] = []
    while (level := load.concurrency or sweep.level) is not None:
        figures, seen = await observed(target, url, workload, replace(load, concurrency=level), 64 * len(levels))
        click.echo(f"{level} callers: {figures['requests_per_s']:.2f} requests/s", err=True)
        levels.append((level, figures, seen))
        sweep.take(figures["requests_per_s"])
        if load.concurrency:
            break
    kept = [each for each in levels if each[1]["requests"] and (ttfa is None or each[1]["ttfa"]["p95"] <= ttfa)]
    if not kept:
        errors = "; ".join(levels[0][1]["error_examples"]) or "none was complete within the window"
        raise BenchError(f"no level kept a time to first audio of {ttfa:g} s" if ttfa else f"no request: {errors}")
    return max(kept, key=lambda each: float(each[1]["requests_per_s"]))


async def observed(
    target: Target, url: str, workload: Workload, load: Load, streams: int
) -> tuple[dict[str, Any], Seen]:
    """One level: the clients' figures, and what the server used meanwhile."""
    from sgl_omni.bench.measure import CLIENT_START_SECONDS, measure
    from sgl_omni.dp.advised import Seen, weights_in
    from sgl_omni.dp.watch import Watch, busy_seconds
    from sgl_omni.gpu.devices import machine_index

    gpu = target.device if target.plan.platform == "cuda" else None
    watch = await asyncio.to_thread(Watch, url, target.stage, target.process)
    shown_as = None if gpu is None else machine_index(gpu)
    driving = asyncio.ensure_future(measure([url], workload, load, gpu=shown_as, streams=streams))
    try:
        await asyncio.sleep(CLIENT_START_SECONDS + load.warmup)
        begun, spent, busy = time.monotonic(), watch.cpu_seconds(), busy_seconds(target.cores)
        readings = []
        while time.monotonic() - begun < load.seconds and not driving.done():
            readings.append(await asyncio.to_thread(watch.reading))
            await asyncio.sleep(READING_SECONDS)
        elapsed, used = time.monotonic() - begun, watch.cpu_seconds() - spent
        busy = busy_seconds(target.cores) - busy
        held = await asyncio.to_thread(watch.device_bytes, gpu)
        figures = await driving
    finally:
        driving.cancel()
        await asyncio.gather(driving, return_exceptions=True)
    activity = figures["gpu"] or {}
    shown = activity.get("sm_active") or activity.get("gpu_util")
    active = shown["mean"] if shown else min(1.0, busy / elapsed / len(target.cores))
    if held is None:  # the driver shows no processes here: what is used of the card is the server's
        held = int(activity["memory_bytes"]["max"])
    weights = weights_in(target.resolved.model_path)
    return figures, Seen(
        active=active,
        cpu_seconds=used,
        seconds=elapsed,
        device_bytes=held,
        weights_bytes=min(weights, held),
        readings=tuple(readings),
    )


def decide(target: Target, seen: Seen, replicas: int | None) -> Advice:
    """The rule's answer, or the number that is to be tried. Refuses where not even one would fit."""
    from sgl_omni.dp.advice import Room
    from sgl_omni.dp.advice import advise as by_rule
    from sgl_omni.dp.advised import measured, replicas_forced

    others = sum(
        stage.budget_bytes or 0 for stage in target.plan.stages if stage.gpu and stage.process != target.process
    )
    room = Room(
        memory_bytes=target.memory_bytes - others,
        cores=len(target.cores),
        can_share=bool(target.resolved.cls.shareable_architectures),
    )
    try:
        advice = by_rule(measured(seen), room)
        return advice if replicas is None else replicas_forced(advice, measured(seen), room, replicas)
    except ValueError as error:
        raise LaunchRefused(str(error)) from error


def write(target: Target, advice: Advice, seen: Seen, out: Path) -> dict[str, Any]:
    """The configuration, planned, and as a file that says it was not tried."""
    from sgl_omni.config.load import load_config
    from sgl_omni.config.views import effective_tree
    from sgl_omni.dp.advised import configuration, measured
    from sgl_omni.models.registry import PipelineRegistry
    from sgl_omni.topology.builder import build_plan
    from sgl_omni.topology.cores import split_cores

    tree = configuration(
        effective_tree(target.resolved),
        advice,
        measured(seen),
        process=target.process,
        stage=target.stage,
        device=target.device,
        memory_bytes=target.memory_bytes,
        mps=target.plan.platform == "cuda" and bool(target.host.mps),
        blocks=split_cores(target.cores, advice.replicas) if advice.cores_each else (),
    )
    save(tree, "not tried: the trial did not come to its end", out)
    build_plan(load_config(out, [], registry=PipelineRegistry(), model_path=None), target.host)
    return tree


def save(tree: dict[str, Any], verdict: str, out: Path) -> None:
    """A configuration that begins with what was found of it."""
    import yaml

    text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, default_flow_style=None, width=110)
    out.write_text(f"# {verdict}\n{text}")


async def tried(
    config: Path, common: list[str], workload: Workload, load: Load, level: int, start_timeout: float
) -> Sequence[dict[str, Any]]:
    """The written configuration under the load of the plateau, and twice that."""
    from sgl_omni.bench.measure import measure
    from sgl_omni.bench.study import Launched

    click.echo("starting the configuration that was written", err=True)
    figures = []
    async with Launched(["serve", "--port", "0", "--config", str(config), *common], None, {}) as server:
        url = await server.url(start_timeout)
        for number, callers in enumerate((level, 2 * level)):
            found = await measure([url], workload, replace(load, concurrency=callers), gpu=None, streams=64 * number)
            click.echo(f"{callers} callers: {found['requests_per_s']:.2f} requests/s", err=True)
            figures.append(found)
    return figures


def _told(target: Target, level: int, figures: dict[str, Any], seen: Seen) -> str:
    used = seen.cpu_seconds / seen.seconds
    device = "GPU" if target.plan.platform == "cuda" else "CPU, which stands for the GPU,"
    lines = [
        f"one replica, {level} callers: {figures['requests_per_s']:.2f} requests/s",
        f"  {device} {seen.active:.0%} in use; {used:.1f} of {len(target.cores)} cores; "
        f"{seen.device_bytes / 2**20:.0f} MiB, of which weights {seen.weights_bytes / 2**20:.0f}",
    ]
    if seen.host_ms_a_step is not None:
        lines.append(f"  host time to launch a step: {seen.host_ms_a_step:.2f} ms")
    if seen.host_ms_a_row is not None:
        lines.append(f"  CPU time for each row of output: {seen.host_ms_a_row:.2f} ms")
    return "\n".join(lines)


def _facts(seen: Seen) -> dict[str, Any]:
    return {
        "active": seen.active,
        "cpu_seconds": seen.cpu_seconds,
        "seconds": seen.seconds,
        "device_bytes": seen.device_bytes,
        "weights_bytes": seen.weights_bytes,
        "host_ms_a_step": seen.host_ms_a_step,
        "host_ms_a_row": seen.host_ms_a_row,
        "readings": [asdict(reading) for reading in seen.readings],
    }
