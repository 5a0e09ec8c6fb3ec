"""`sgl-omni audit`: whether replicas of a model may share its weights."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sgl_omni.cli.told import run_until_told
from sgl_omni.errors import StartupError

if TYPE_CHECKING:
    from sgl_omni.config.resolved import ResolvedConfig
    from sgl_omni.topology.host import Host
    from sgl_omni.topology.plan import Plan

SENTENCES = (
    "The old bridge was closed for repairs.",
    "Good evening, ladies and gentlemen!",
    "What would you like?",
    "Nobody had seen the river so high before, and everyone came out to look at it.",
)


@click.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.argument("model", required=False)
@click.option("--config", "config_path", type=click.Path(path_type=Path), help="YAML configuration in place of MODEL.")
@click.option("--platform", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--virtual-gpu-memory", default="4GiB", show_default=True, help="On the CPU platform.")
@click.option("--replicas", type=click.IntRange(min=2), default=2, show_default=True, help="Copies that share.")
@click.option("--rounds", type=click.IntRange(min=1), default=4, show_default=True, help="Load: times all requests.")
@click.option(
    "--payloads",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON lines for the entry stage, in place of sentences to speak; their answers must not depend on chance.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON.")
@click.pass_context
def command(
    ctx: click.Context,
    model: str | None,
    config_path: Path | None,
    platform: str,
    virtual_gpu_memory: str,
    replicas: int,
    rounds: int,
    payloads: Path | None,
    as_json: bool,
) -> None:
    """Run MODEL with and without shared weights, without MPS and under load, and compare the answers bit for bit.

    Dotted flags override the configuration as in `serve`; the engine has to pin its KV capacity, for example with
    `--max-total-tokens 9000`.

    Exit status: 0 when the architecture passed, 1 when not, 2 when the configuration is refused.
    """
    if (model is None) == (config_path is None):
        raise click.UsageError("give MODEL or --config FILE")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)

    from sgl_omni.config.load import load_config
    from sgl_omni.models.registry import PipelineRegistry
    from sgl_omni.runtime.audit import audit

    registry = PipelineRegistry()
    resolved = load_config(config_path, ctx.args, registry=registry, model_path=model)
    host = _host(platform, virtual_gpu_memory)
    process, device = _engine_process(resolved)
    copies = [*ctx.args, f"--processes.{process}.num_replicas={replicas}", "--mps=off", "--on_process_exit=stop"]
    copies += [f"--processes.{process}.replica_devices={','.join([str(device)] * replicas)}"]
    copies += [f"--processes.{process}.replica_policy=round_robin"]

    def plan(share: str) -> Plan:
        flags = [*copies, f"--weight-share={share}"]
        return _plan(load_config(config_path, flags, registry=registry, model_path=model), host)

    requests = _read(payloads) if payloads else _sentences(resolved)
    verdict = run_until_told(audit(plan("off"), plan("on"), requests, rounds=rounds))
    architectures = resolved.cls.architectures
    if as_json:
        fields = {**dataclasses.asdict(verdict), "passed": verdict.passed, "architectures": architectures}
        click.echo(json.dumps(fields))
    else:
        _tell(verdict.problems, verdict.remarks, resolved, f"{verdict.requests} answers ({verdict.backend})")
    sys.exit(0 if verdict.passed else 1)


def _tell(problems: tuple[str, ...], remarks: tuple[str, ...], resolved: ResolvedConfig, what: str) -> None:
    name = ", ".join(resolved.cls.architectures) or "this pipeline"
    for line in (*problems, *remarks):
        click.echo(f"  {line}")
    if problems:
        click.echo(f"{name} must not share its weights")
        return
    click.echo(f"{name}: {what} with shared weights equal those without, bit for bit")
    if not set(resolved.cls.architectures) <= set(resolved.cls.shareable_architectures):
        click.echo(f"add it to {resolved.cls.__name__}.shareable_architectures to share it from now on")


def _host(platform: str, virtual_gpu_memory: str) -> Host:
    from sgl_omni.config.scalars import parse_bytes
    from sgl_omni.gpu.devices import usable_host
    from sgl_omni.topology.host import virtual_host

    host = None if platform == "cpu" else usable_host()
    if platform == "cuda" and host is None:
        raise StartupError("--platform cuda: there is no GPU here, or the installed torch is built for the CPU only")
    return host or virtual_host(parse_bytes(virtual_gpu_memory), os.cpu_count())


def _engine_process(resolved: ResolvedConfig) -> tuple[str, int]:
    """The Process whose copies are to share, and its GPU."""
    for name in resolved.engine_stages:
        stage = resolved.config.stages[name]
        if stage.gpu and stage.tp_size == 1:
            return stage.process or name, stage.gpu[0]
    raise StartupError("there is no engine stage on a single GPU, so nothing to share")


def _plan(resolved: ResolvedConfig, host: Host) -> Plan:
    """The list of architectures is what the audit is for, so it forbids nothing here."""
    from sgl_omni.topology.builder import build_plan

    cls = type(resolved.cls.__name__, (resolved.cls,), {"shareable_architectures": resolved.cls.architectures})
    return build_plan(dataclasses.replace(resolved, cls=cls), host)


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except ValueError as error:
        raise StartupError(f"{path} is not JSON lines: {error}") from error
    if not found or not all(isinstance(payload, dict) for payload in found):
        raise StartupError(f"{path} must hold one JSON object a line, and at least one")
    return found


def _sentences(resolved: ResolvedConfig) -> list[dict[str, Any]]:
    """Each sentence as likely as can be, and drawn; all with a seed, as some models begin from noise."""
    from sgl_omni.models.registry import tasks_of

    task = None if resolved.model_path is None else tasks_of(resolved.cls, resolved.model_path).speech
    if task is None:
        raise StartupError("this pipeline does not speak; give --payloads FILE with requests for its entry stage")
    base = {"voice": task.default_voice, "speed": 1.0, "temperature": 0.0}
    spoken = [{"input": text, "seed": i, **base} for i, text in enumerate(SENTENCES)]
    return [*spoken, *({**payload, "temperature": 0.7} for payload in spoken)]
