"""The `sgl-omni` command. A subcommand's module is imported only when it is called, so `--help` stays quick."""

from __future__ import annotations

import importlib
import os
import sys

from sgl_omni.cli import signals

if sys.argv[1:2] == ["serve"]:
    signals.leave_at_once()  # before all that takes time

import click

from sgl_omni import __version__
from sgl_omni.errors import OmniError

COMMANDS = {
    "serve": ("sgl_omni.cli.serve:command", "Start a pipeline and its HTTP server."),
    "config": ("sgl_omni.cli.config:app", "Check, explain and draw a configuration; starts nothing."),
    "audit": ("sgl_omni.cli.audit:command", "Tell whether replicas of a model may share its weights."),
    "plan": ("sgl_omni.cli.plan:app", "Find the topology that a machine has room for, and try it."),
    "dp": ("sgl_omni.cli.dp:app", "Start, check and end several whole servers on one GPU."),
    "mps": ("sgl_omni.cli.mps:app", "See what runs on CUDA MPS, and clean up after servers that died."),
    "router": ("sgl_omni.cli.router:command", "Relay requests to several servers behind one address."),
    "bench": ("sgl_omni.cli.bench:app", "Measure servers under load; compare configurations."),
    "demo": ("sgl_omni.cli.demo:command", "Start the built-in voice and let it speak a sentence."),
}


class LazyGroup(click.Group):
    """Knows its subcommands' names and one-line help without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        found = getattr(importlib.import_module(module), name)
        if isinstance(found, click.Command):
            return found
        from typer.main import get_command

        return get_command(found)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="sgl-omni")
def cli() -> None:
    """A serving runtime for omni, speech and TTS models that pass through several stages."""


def main() -> None:
    """Entry point: errors raised on purpose become one message, without a traceback.

    Exit status: 2 when the command line or the configuration is refused, 1 for everything else that fails.
    """
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)  # a config may name stages of the folder that it is served from
    try:
        cli()
    except OmniError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2 if error.code in ("plan", "launch_refused") else 1)


if __name__ == "__main__":
    main()
