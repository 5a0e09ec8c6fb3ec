"""`sgl-omni mps`: what the servers of this user have on CUDA MPS, and cleaning up what dead ones have left."""

from __future__ import annotations

import click

from sgl_omni.gpu import mps
from sgl_omni.run_folder import base_folder


@click.group()
def app() -> None:
    """Look after CUDA MPS: see it, clean up."""


@app.command()
def status() -> None:
    """Show each GPU's daemon: its owners (running servers), its MPS servers and their clients."""
    found = mps.status(base_folder() / "mps")
    if not found:
        click.echo("no server of this user uses MPS")
    for gpu in found:
        click.echo(
            f"{gpu.uuid}: {'running' if gpu.running else 'not running'}, owners: {', '.join(gpu.owners) or 'none'}"
        )
        for server in gpu.servers:
            click.echo(f"  server {server.pid}: clients {', '.join(map(str, server.clients)) or 'none'}")


@app.command()
def clean() -> None:
    """End the daemons that no running server owns and no process is attached to. Touches nothing else.

    Exit status: 1 when something had to be left.
    """
    left = False
    for gpu, outcome in mps.clean(base_folder() / "mps"):
        click.echo(f"{gpu}: {outcome}")
        left = left or outcome != "removed"
    if left:
        raise SystemExit(1)
