"""`sgl-omni serve`: plan, print the plan, run it behind HTTP until a signal or a failure."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sgl_omni.cli import signals
from sgl_omni.cli.config import once
from sgl_omni.cli.options import SECONDS, SECONDS_OR_NONE
from sgl_omni.errors import StartupError
from sgl_omni.topology.plan import Plan

if TYPE_CHECKING:
    from sgl_omni.config.tasks import Tasks
    from sgl_omni.media.source import MediaSource
    from sgl_omni.runtime.pipeline import Pipeline

log = logging.getLogger("sgl_omni.serve")

PORT = click.IntRange(0, 65535)


@click.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.option(
    "--config", "config_path", type=click.Path(path_type=Path), multiple=True, callback=once, help="YAML configuration."
)
@click.option(
    "--model-path",
    multiple=True,
    callback=once,
    help="Model id or folder; picks the pipeline class where no --config does.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=PORT,
    default=8091,
    show_default=True,
    help="Port to listen on; 0 takes a free one.",
)
@click.option(
    "--platform",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="What stages run on; `auto` takes CUDA where there is a GPU and a torch that can use it.",
)
@click.option(
    "--virtual-gpu-memory",
    default="4GiB",
    show_default=True,
    help="On the CPU platform, the memory of each virtual GPU.",
)
@click.option(
    "--max-in-flight",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Requests admitted at once; more get a 503.",
)
@click.option(
    "--request-timeout", type=SECONDS, default=600.0, show_default=True, help="Seconds until a request is aborted."
)
@click.option(
    "--startup-timeout",
    type=SECONDS,
    default=600.0,
    show_default=True,
    help="Seconds that each process may take; a follower's count from when its leader is ready.",
)
@click.option(
    "--liveness-timeout",
    type=SECONDS_OR_NONE,
    default=60.0,
    show_default=True,
    help="Seconds after which a process that does not answer is killed; 0 for never.",
)
@click.option(
    "--drain-timeout",
    type=SECONDS_OR_NONE,
    default=30.0,
    show_default=True,
    help="Seconds that requests get to end at shutdown.",
)
@click.option(
    "--allowed-media-domain",
    "allowed_media_domains",
    multiple=True,
    help="Host that requests may name in http(s) URLs of media; may be given several times. None by default.",
)
@click.option(
    "--allowed-local-media-path",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder below which requests may name files of media. None by default.",
)
@click.pass_context
def command(
    ctx: click.Context,
    config_path: Path | None,
    model_path: str | None,
    host: str,
    port: int,
    platform: str,
    virtual_gpu_memory: str,
    allowed_media_domains: tuple[str, ...],
    allowed_local_media_path: Path | None,
    **limits: Any,
) -> None:
    """Start a pipeline and its HTTP server.

    Every key of the configuration can be overridden by a dotted flag, for example `--vocoder.process vocoder`,
    `--processes.tts_engine.num_replicas 2` or `--mps auto`.

    Exit status: 0 after a signal, 1 when the start or a process failed, 2 when the configuration is refused.
    """
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    if config_path is None and model_path is None:
        raise click.UsageError("give --config FILE, --model-path MODEL, or both")
    plan, tasks, names = prepare(config_path, model_path, ctx.args, platform, virtual_gpu_memory)
    import uvloop

    from sgl_omni.media.source import MediaSource

    media = MediaSource(allowed_media_domains, allowed_local_media_path)
    try:
        status = uvloop.run(serve(plan, tasks, names, media, host=host, port=port, **limits))
    finally:
        signals.leave_alone()
    sys.exit(status)


def prepare(
    config_path: Path | None, model_path: str | None, flags: list[str], platform: str, virtual_gpu_memory: str
) -> tuple[Plan, Tasks, list[str]]:
    """The plan, what it serves, and the names that requests may give the model."""
    from sgl_omni.config.load import load_config
    from sgl_omni.config.scalars import parse_bytes
    from sgl_omni.config.tasks import Tasks
    from sgl_omni.gpu.affinity import read_cores
    from sgl_omni.gpu.devices import usable_host
    from sgl_omni.models.registry import PipelineRegistry, tasks_of
    from sgl_omni.topology.builder import build_plan
    from sgl_omni.topology.host import virtual_host
    from sgl_omni.topology.render import print_layout

    resolved = load_config(config_path, flags, registry=PipelineRegistry(), model_path=model_path)
    host = None if platform == "cpu" else usable_host()
    if platform == "cuda" and host is None:
        raise StartupError("--platform cuda: there is no GPU here, or the installed torch is built for the CPU only")
    if host is None:
        host = virtual_host(parse_bytes(virtual_gpu_memory), os.cpu_count(), read_cores())
    plan = build_plan(resolved, host)
    print_layout(plan, host)
    tasks = Tasks()
    if resolved.model_path is not None:
        tasks = tasks_of(resolved.cls, resolved.model_path)
    named, path = resolved.config.name, resolved.config.model_path
    return plan, tasks, list(dict.fromkeys([name for name in (named, path, plan.name) if name]))


async def serve(
    plan: Plan,
    tasks: Tasks,
    names: list[str],
    media: MediaSource,
    *,
    host: str,
    port: int,
    max_in_flight: int,
    request_timeout: float,
    startup_timeout: float,
    liveness_timeout: float,
    drain_timeout: float,
) -> int:
    """Runs until a signal (0) or a failure (1). A second signal ends everything at once."""
    from sgl_omni.listening import bind
    from sgl_omni.runtime.pipeline import Pipeline
    from sgl_omni.server.app import create_app
    from sgl_omni.server.serve import HttpServer

    sock = bind(host, port)  # before any process exists
    stopping = asyncio.Event()
    kills: list[Callable[[], None]] = []
    _on_signals(stopping, kills)
    pipeline = Pipeline(
        plan,
        max_in_flight=max_in_flight,
        request_timeout=request_timeout,
        startup_timeout=startup_timeout,
        liveness_timeout=liveness_timeout or None,
    )
    http = HttpServer(create_app(pipeline, tasks, names[0], aliases=names[1:], media=media), sock, grace=1.0)
    kills += [pipeline.kill, http.kill]
    serving = asyncio.create_task(http.run())
    try:
        if not await _start(pipeline, stopping):
            return 0
        log.info("ready: %s on %s", names[0], http.url)
        failed = asyncio.create_task(pipeline.failed())
        signalled = asyncio.create_task(stopping.wait())
        await asyncio.wait([failed, signalled, serving], return_when=asyncio.FIRST_COMPLETED)
        signalled.cancel()
        if failed.done():
            log.error("the pipeline stops: %s", failed.result())
            await pipeline.stop(drain_timeout=0)
            return 1
        failed.cancel()
        log.info("shutting down; requests in flight get %g s", drain_timeout)
        await pipeline.stop(drain_timeout)
        if pipeline.supervisor.failure.done():
            log.error("while draining: %s", pipeline.supervisor.failure.result())
            return 1
        return 0
    finally:
        http.stop()
        await serving


async def _start(pipeline: Pipeline, stopping: asyncio.Event) -> bool:
    """False: a signal came first, and what had been started has ended again."""
    starting = asyncio.create_task(pipeline.start())
    signalled = asyncio.create_task(stopping.wait())
    await asyncio.wait([starting, signalled], return_when=asyncio.FIRST_COMPLETED)
    signalled.cancel()
    if starting.done():
        starting.result()
        return True
    starting.cancel()
    await asyncio.wait([starting])
    return False


def _on_signals(stopping: asyncio.Event, kills: Sequence[Callable[[], None]]) -> None:
    """The first signal sets ``stopping``, each further one calls ``kills``."""

    def on_signal() -> None:
        if not stopping.is_set():
            stopping.set()
            return
        for kill in kills:
            kill()

    signals.tell(asyncio.get_running_loop(), on_signal)
