"""`sgl-omni config`: resolve, explain and describe a configuration. Starts nothing and imports no torch."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from sgl_omni.config.load import load_config
from sgl_omni.config.resolved import ResolvedConfig
from sgl_omni.config.scalars import parse_bytes
from sgl_omni.config.violations import PlanError
from sgl_omni.gpu.affinity import read_cores
from sgl_omni.gpu.devices import real_host
from sgl_omni.models.registry import PipelineRegistry
from sgl_omni.topology.host import Host, cuda_host, virtual_host


def once(ctx: click.Context, option: click.Parameter, values: tuple[Any, ...]) -> Any:
    """Callback of an option that may be repeated with one value only: click by itself takes the last."""
    if len(set(values)) > 1:
        given = " and ".join(f"'{value}'" for value in dict.fromkeys(values))
        raise click.UsageError(f"{option.opts[0]} is given as {given}", ctx)
    return values[0] if values else None


_FLAGS = {"ignore_unknown_options": True, "allow_extra_args": True}
REFUSED = 2


@click.group()
def app() -> None:
    """Check, explain and draw a configuration; starts nothing."""


@app.command(context_settings=_FLAGS)
@click.option(
    "--config", "config_path", type=click.Path(path_type=Path), multiple=True, callback=once, help="YAML configuration."
)
@click.option(
    "--model-path",
    multiple=True,
    callback=once,
    help="Model id or folder; picks the pipeline class where no --config does.",
)
@click.option(
    "--show", type=click.Choice(["layout", "config", "plan", "diff", "provenance"]), default="layout", show_default=True
)
@click.option("--format", "form", type=click.Choice(["text", "json", "svg"]), default="text", show_default=True)
@click.option("--host", "host_path", type=click.Path(path_type=Path), help="YAML file that describes a machine.")
@click.option("--platform", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--virtual-gpu-memory", default="4GiB", show_default=True, help="Memory of a GPU on the CPU platform.")
@click.pass_context
def resolve(
    ctx: click.Context,
    config_path: Path | None,
    model_path: str | None,
    show: str,
    form: str,
    host_path: Path | None,
    platform: str,
    virtual_gpu_memory: str,
) -> None:
    """Plan a pipeline and print the plan that `serve` would execute.

    Every key can be overridden by a dotted flag, as in `--vocoder.process vocoder` or `--mps auto`.

    Exit status: 0, or 2 when the configuration is refused.
    """
    if form == "svg" and show != "layout":
        raise click.UsageError("--format svg draws --show layout only")
    try:
        resolved = load_config(config_path, ctx.args, registry=PipelineRegistry(), model_path=model_path)
        host, note = _host(host_path, platform, virtual_gpu_memory)
        _show(resolved, host, note, show, form)
    except PlanError as error:
        _refuse(error, form)


@app.command(context_settings=_FLAGS)
@click.argument("path")
@click.option(
    "--config", "config_path", type=click.Path(path_type=Path), multiple=True, callback=once, help="YAML configuration."
)
@click.option("--model-path", multiple=True, callback=once, help="Model id or folder.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.pass_context
def explain(ctx: click.Context, path: str, config_path: Path | None, model_path: str | None, form: str) -> None:
    """Say what the key PATH means, its default, and where its value came from."""
    from sgl_omni.config.views import explain as explain_key

    try:
        resolved = None
        if config_path is not None or model_path is not None:
            resolved = load_config(config_path, ctx.args, registry=PipelineRegistry(), model_path=model_path)
        facts = explain_key(path, resolved)
    except PlanError as error:
        _refuse(error, form)
        return
    if form == "json":
        click.echo(json.dumps(facts, indent=2))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        click.echo(f"{name:<{width}}  {_text(value)}")


@app.command()
def schema() -> None:
    """Print a JSON Schema of the configuration file, for editors."""
    from sgl_omni.config.views import json_schema

    click.echo(json.dumps(json_schema(), indent=2))


def _show(resolved: ResolvedConfig, host: Host, note: str | None, show: str, form: str) -> None:
    import msgspec

    from sgl_omni.config import views
    from sgl_omni.topology.builder import plan_config

    planned = plan_config(resolved, host)
    if show == "plan":
        click.echo(msgspec.json.format(msgspec.json.encode(planned.plan), indent=2).decode())
    elif show == "layout":
        _show_layout(planned, note, form)
    elif show == "config":
        _show_config(views.effective_tree(resolved), form)
    elif show == "diff":
        rows = views.differences(resolved)
        _show_rows(rows, form, lambda r: f"{r['path']}: {_text(r['default'])} -> {_text(r['value'])}")
    else:
        rows = views.provenance(resolved)
        _show_rows(rows, form, lambda r: f"{r['path']}: {_text(r['value'])}")


def _show_layout(planned: Any, note: str | None, form: str) -> None:
    from sgl_omni.topology import render

    if form == "json":
        click.echo(json.dumps(render.layout_facts(planned.plan, planned.host, planned.eligible, note), indent=2))
    elif form == "svg":
        click.echo(render.layout_svg(planned.plan, planned.host, planned.eligible))
    else:
        render.print_layout(planned.plan, planned.host, planned.eligible)
        if note is not None:
            click.echo(note, err=True)


def _show_config(tree: dict[str, Any], form: str) -> None:
    if form == "json":
        click.echo(json.dumps(tree, indent=2))
        return
    import yaml

    click.echo(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, default_flow_style=None, width=110), nl=False)


def _show_rows(rows: list[dict[str, Any]], form: str, describe: Any) -> None:
    if form == "json":
        click.echo(json.dumps(rows, indent=2))
        return
    lines = [describe(row) for row in rows]
    width = min(max(map(len, lines), default=0), 78)
    for line, row in zip(lines, rows, strict=True):
        click.echo(f"{line:<{width}}  # {row['from']}")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _refuse(error: PlanError, form: str) -> None:
    if form == "json":
        click.echo(json.dumps({"violations": [v.as_dict() for v in error.violations]}, indent=2))
    else:
        count = len(error.violations)
        click.echo(f"{count} {'problem' if count == 1 else 'problems'}, nothing can start:\n{error}", err=True)
    sys.exit(REFUSED)


def _host(path: Path | None, platform: str, virtual_gpu_memory: str) -> tuple[Host, str | None]:
    """The machine to plan for, and what is to be said about the choice."""
    if path is not None:
        from sgl_omni.topology.host_file import read_host

        return read_host(path), None
    if platform == "cpu":
        return virtual_host(parse_bytes(virtual_gpu_memory), os.cpu_count(), read_cores()), None
    host = real_host()
    if host is not None:
        return host, None
    note = (
        "note: no GPU here, so the plan is for a CUDA machine of unknown size and nothing is checked against its "
        "GPUs; --host FILE describes one, --platform cpu plans for this machine"
    )
    return cuda_host(None), note
