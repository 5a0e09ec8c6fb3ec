"""`sgl-omni dp`: several whole servers on one GPU as one run that is started, checked, listed and ended."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sgl_omni.cli.config import once
from sgl_omni.cli.options import SECONDS
from sgl_omni.errors import LaunchFailed, LaunchRefused

if TYPE_CHECKING:
    from sgl_omni.dp.launch import Servers
    from sgl_omni.dp.preflight import Asked, Machine, Place
    from sgl_omni.dp.state import Run, Store
    from sgl_omni.topology.host import Host

STATE_ROOT = click.option(
    "--state-root",
    type=click.Path(path_type=Path),
    help="Folder of the runs' records and logs; $XDG_STATE_HOME/sgl-omni/dp by default.",
)


@click.group()
def app() -> None:
    """Start, check and end several whole servers on one GPU."""


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.option(
    "--config", "config_path", type=click.Path(path_type=Path), multiple=True, callback=once, help="YAML configuration."
)
@click.option("--model-path", multiple=True, callback=once, help="Model id or folder, in place of --config.")
@click.option("--replicas", type=click.IntRange(1, 64), required=True, help="Servers on the GPU.")
@click.option("--gpu", type=click.IntRange(min=0), default=0, show_default=True, help="GPU that all of them use.")
@click.option(
    "--core-blocks",
    help='Physical cores of each server, as "0-9 10-19"; by default those of the node, split evenly.',
)
@click.option("--numa-node", type=click.IntRange(min=0), help="NUMA node of the cores; by default the GPU's.")
@click.option("--max-total-tokens", type=click.IntRange(min=1), help="KV capacity of each server, in tokens.")
@click.option("--mem-fraction-static", type=float, help="Weights and KV pool of each server, of the GPU's memory.")
@click.option("--base-port", type=click.IntRange(1, 65535), help="Port of the first server; free ports by default.")
@click.option(
    "--weight-share",
    type=click.Choice(["on", "off"]),
    default="off",
    show_default=True,
    help="The engines of all servers use one set of weights, which the first one loads.",
)
@click.option("--mps", type=click.Choice(["on", "off"]), help="Overlap the servers by CUDA MPS; on for a GPU.")
@click.option("--platform", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--virtual-gpu-memory", default="4GiB", show_default=True, help="Memory of a GPU on the CPU platform.")
@click.option("--parallel-start", is_flag=True, help="Start all servers at once, not one after another.")
@click.option("--startup-timeout", type=SECONDS, default=600.0, show_default=True, help="Seconds until one is ready.")
@STATE_ROOT
@click.pass_context
def up(
    ctx: click.Context,
    config_path: Path | None,
    model_path: str | None,
    max_total_tokens: int | None,
    mem_fraction_static: float | None,
    virtual_gpu_memory: str,
    startup_timeout: float,
    parallel_start: bool,
    state_root: Path | None,
    weight_share: str,
    mps: str | None,
    **asked: Any,
) -> None:
    """Start servers on one GPU, each complete and on cores of its own, and prove that they are what was asked for.

    Every key of the configuration can be overridden by a dotted flag, as for `sgl-omni serve`.

    Exit status: 0, 1 when the start failed and was undone, 2 when it was refused before anything was started.
    """
    from sgl_omni.dp.launch import Servers
    from sgl_omni.dp.preflight import Asked, gpu_key, place

    if (config_path is None) == (model_path is None):
        raise LaunchRefused(
            "give one of CONFIG (--config) and MODEL (--model-path)" + (", not both" if config_path else "")
        )
    use_mps = mps == "on" if mps else asked["platform"] == "cuda"
    wanted = Asked(mps=use_mps, weight_share=weight_share == "on", **asked)
    machine, host = look(wanted, virtual_gpu_memory)
    store = store_at(state_root)
    store.refuse_second(wanted.gpu, gpu_key(wanted, machine))  # it would hold the cores too
    placed = place(wanted, machine)
    pins = {"--max-total-tokens": max_total_tokens, "--mem-fraction-static": mem_fraction_static}
    flags = [text for name, value in pins.items() if value is not None for text in (name, str(value))]
    flags += [*ctx.args, "--mps", "on" if use_mps else "off"]
    flags += ["--weight-share", "servers"] if wanted.weight_share else []
    capacity = plan_pool(wanted, host, config_path, model_path, flags)
    source = ["--config", str(config_path.absolute())] if config_path else ["--model-path", str(model_path)]
    platform = ["--platform", wanted.platform, "--virtual-gpu-memory", virtual_gpu_memory]
    servers = Servers(
        arguments=(*source, *platform, "--startup-timeout", str(startup_timeout), *flags),
        environment={"CUDA_VISIBLE_DEVICES": placed.gpu_key} if wanted.platform == "cuda" else {},
        seconds=startup_timeout,
        parallel=parallel_start,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was started is ended again
    run = new_run(store, wanted, placed, capacity, str(config_path or model_path))
    launch(store, run, servers, machine)


def look(asked: Asked, virtual_gpu_memory: str) -> tuple[Machine, Host | None]:
    """This machine, and it as planning sees it: with the run's GPU alone, as each server will."""
    from sgl_omni.config.scalars import parse_bytes
    from sgl_omni.dp.preflight import Machine
    from sgl_omni.dp.state import cores_in_use
    from sgl_omni.gpu.affinity import gpu_node, read_cores
    from sgl_omni.gpu.devices import gpu_facts, usable_host
    from sgl_omni.topology.host import virtual_host

    cores = read_cores()
    taken = cores_in_use() if asked.core_blocks is None else {}
    if asked.platform == "cpu":
        return Machine(cores=cores, taken=taken), virtual_host(parse_bytes(virtual_gpu_memory), len(cores.allowed))
    host = usable_host()
    if host is None or host.devices is None:
        return Machine(cores=cores, why="there is none here, or the installed torch is built for the CPU only"), None
    has_mps = bool(host.mps)
    if not host.has(asked.gpu):
        return Machine(cores=cores, why=f"this process sees {len(host.devices)}", has_mps=has_mps), None
    facts = gpu_facts(asked.gpu)
    machine = Machine(cores=cores, gpu=facts, node=gpu_node(facts.bus_id), has_mps=has_mps, taken=taken)
    # Cores are divided among the servers here; what each makes of its own, its plan decides.
    return machine, replace(host, devices=(host.devices[asked.gpu],), cores=None)


def plan_pool(
    asked: Asked, host: Host | None, config_path: Path | None, model_path: str | None, flags: list[str]
) -> dict[str, int]:
    """Plans one server as `serve` will and checks that so many fit; returns the tokens that its engine stages pin."""
    from sgl_omni.config.load import load_config
    from sgl_omni.dp.preflight import check_plan
    from sgl_omni.models.registry import PipelineRegistry
    from sgl_omni.topology.builder import build_plan

    assert host is not None
    resolved = load_config(config_path, flags, registry=PipelineRegistry(), model_path=model_path)
    plan = build_plan(resolved, host)
    return check_plan(asked, plan, resolved, host.memory(0))


def new_run(store: Store, asked: Asked, placed: Place, capacity: dict[str, int], pipeline: str) -> Run:
    """The record of a run of which nothing exists yet but the folder for its sockets."""
    from datetime import UTC, datetime

    from sgl_omni.dp.marks import Mark, boot_id
    from sgl_omni.dp.state import Replica, Run, make_runtime, new_id

    launcher = Mark.of(os.getpid())
    assert launcher is not None
    run_id = new_id()
    return Run(
        id=run_id,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        boot=boot_id(),
        launcher=launcher,
        pipeline=pipeline,
        platform=asked.platform,
        gpu=asked.gpu,
        gpu_key=placed.gpu_key,
        node=placed.node,
        mps=asked.mps,
        weight_share=asked.weight_share,
        capacity=capacity,
        runtime=str(make_runtime()),
        replicas=tuple(
            Replica(index=i, port=port, cores=block, log=str(store.folder(run_id) / f"replica-{i}.log"))
            for i, (port, block) in enumerate(zip(placed.ports, placed.blocks, strict=True))
        ),
    )


def launch(store: Store, run: Run, servers: Servers, machine: Machine) -> None:
    """Starts a run and tells how to use and to end it."""
    from sgl_omni.dp.launch import Launch
    from sgl_omni.dp.state import ATTACH_FILE

    run = Launch(store, run, servers, machine.gpu, click.echo).up()
    for line in describe(run):
        click.echo(line)
    if run.mps:
        click.echo(f"MPS: every process on the GPU is attached: {store.folder(run.id) / ATTACH_FILE}")
    click.echo(f"one address: sgl-omni router --worker-urls {','.join(r.url for r in run.replicas)}")
    click.echo(f"to end it: sgl-omni dp down {run.id} --state-root {store.root}")


@app.command()
@click.argument("run_id", required=False)
@STATE_ROOT
def verify(run_id: str | None, state_root: Path | None) -> None:
    """Check a run again: servers alive and ready, KV capacity, cores, shared weights, MPS attachment. RUN_ID: the only
    run.

    Exit status: 0, or 1 with all that is wrong.
    """
    from sgl_omni.dp.launch import check

    store = store_at(state_root)
    run = store.load(run_id or only_run(store))
    with store.hold(run.id):
        run = check(store, store.load(run.id))
        store.save(run)
    for line in describe(run):
        click.echo(line)
    click.echo(f"run {run.id} is as recorded" + (", all processes on the GPU attached to MPS" if run.mps else ""))


@app.command("list")
@STATE_ROOT
def list_runs(state_root: Path | None) -> None:
    """List the runs that are recorded, with what is alive of each."""
    store = store_at(state_root)
    for run_id in store.ids():
        try:
            run = store.load(run_id)
        except LaunchFailed as error:
            click.echo(f"{run_id}  {error}")
            continue
        alive = set(run.marks())
        servers = [r for r in run.replicas if r.server in alive]
        state = "stale" if not alive else "ready" if run.ready else "starting"
        if alive and not run.ready and not store.is_held(run_id):
            state = "half started"
        if state == "ready" and len(servers) < len(run.replicas):
            state = "degraded"
        click.echo(
            f"{run.id}  {state}  GPU {run.gpu}  {len(servers)} of {len(run.replicas)} servers alive  "
            f"ports {','.join(str(r.port) for r in run.replicas)}  {run.pipeline}"
            + ("  weights shared" if run.weight_share else "")
        )
    for run_id in store.logs_of_failed():
        click.echo(f"{run_id}  failed to start, nothing of it runs; logs: {store.folder(run_id)}/replica-*.log")
    if not store.ids():
        click.echo(f"no runs in {store.root}")


@app.command()
@click.argument("run_id")
@click.option("--timeout", type=SECONDS, default=45.0, show_default=True, help="Seconds until servers are killed.")
@STATE_ROOT
def down(run_id: str, timeout: float, state_root: Path | None) -> None:
    """End a run: the recorded servers and no other process, then its MPS daemon. Requests in flight may end.

    Of a run whose start failed, the logs are removed.

    Exit status: 0 when nothing is left; 1 when that cannot be confirmed: the state is kept, and what remains is said.
    """
    from sgl_omni.dp.down import tear_down
    from sgl_omni.dp.launch import kept

    store = store_at(state_root)
    if run_id in store.logs_of_failed():
        store.forget_logs(run_id)
        click.echo(f"the logs of run {run_id}, which failed to start, are removed")
        return
    store.load(run_id)
    with store.hold(run_id):
        run = store.load(run_id)
        problems = tear_down(run, timeout)
        if problems:
            raise LaunchFailed(kept(store, run, problems))
        store.forget(run)
    click.echo(f"run {run_id} has ended, nothing is left of it")


def store_at(root: Path | None) -> Store:
    from sgl_omni.dp.state import Store, default_root

    return Store(root or default_root())


def only_run(store: Store) -> str:
    ids = store.ids()
    if len(ids) != 1:
        raise LaunchFailed(f"say which run: {', '.join(ids) or f'there is none in {store.root}'}")
    return ids[0]


def describe(run: Run) -> list[str]:
    """A line a replica, and one for what they share."""
    from sgl_omni.config.scalars import core_text

    tokens = ", ".join(f"{stage} {count} tokens" for stage, count in run.capacity.items())
    lines = [
        f"replica {r.index}: {r.url}  pid {r.server.pid if r.server else '-'}  cores {core_text(r.cores)}"
        + (f"  {tokens}" if tokens else "")
        for r in run.replicas
    ]
    for stage, model in run.weights.items():
        size = f"{model.bytes / 2**20:.0f} MiB"
        lines.append(f"weights of {stage}: {size} for all servers, loaded by replica 0 ({model.backend})")
    return lines
