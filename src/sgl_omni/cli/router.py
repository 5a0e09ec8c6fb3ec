"""`sgl-omni router`: one address in front of several servers."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sgl_omni.cli.options import SECONDS, SECONDS_OR_NONE
from sgl_omni.errors import InvalidRequest
from sgl_omni.router.policy import POLICIES

if TYPE_CHECKING:
    from sgl_omni.router.workers import Address

COUNT = click.IntRange(min=1)


@click.command()
@click.option(
    "--worker-urls",
    multiple=True,
    metavar="URL[,URL...]",
    help="Servers, as http://host:port; separated by commas or spaces, or given again.",
)
@click.option(
    "--worker-file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="File with a server a line; `#` begins a comment.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8090, show_default=True, help="Port; 0 takes a free one."
)
@click.option(
    "--policy", type=click.Choice(POLICIES), default="least_inflight", show_default=True, help="Who gets a request."
)
@click.option(
    "--worker-capacity", type=COUNT, default=64, show_default=True, help="Requests that `fill_first` gives a worker."
)
@click.option("--seed", type=int, help="Makes `random` and `power_of_two` draw the same again.")
@click.option(
    "--max-connections",
    type=COUNT,
    default=1024,
    show_default=True,
    help="Requests with workers at once; at least the concurrency that is offered.",
)
@click.option(
    "--queue-size",
    type=click.IntRange(min=0),
    default=1024,
    show_default=True,
    help="Requests that wait; more get a 503.",
)
@click.option("--queue-timeout", type=SECONDS, default=30.0, show_default=True, help="Seconds that a request waits.")
@click.option("--connect-timeout", type=SECONDS, default=2.0, show_default=True, help="Seconds to reach a worker.")
@click.option(
    "--silence-timeout",
    type=SECONDS,
    default=600.0,
    show_default=True,
    help="Seconds that a worker may send nothing of an answer.",
)
@click.option("--health-path", default="/health", show_default=True, help="What workers are asked.")
@click.option("--health-interval", type=SECONDS, default=2.0, show_default=True, help="Seconds between two looks.")
@click.option("--health-timeout", type=SECONDS, default=2.0, show_default=True, help="Seconds that a look may take.")
@click.option("--fail-threshold", type=COUNT, default=3, show_default=True, help="Failures in a row until it is out.")
@click.option(
    "--recover-threshold", type=COUNT, default=2, show_default=True, help="Good looks in a row until it gets a trial."
)
@click.option(
    "--load-interval",
    type=SECONDS,
    default=0.5,
    show_default=True,
    help="Seconds between two readings of `least_work`.",
)
@click.option(
    "--processes",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="Processes on the port, each with its share of --max-connections and --queue-size.",
)
@click.option(
    "--drain-timeout",
    type=SECONDS_OR_NONE,
    default=30.0,
    show_default=True,
    help="Seconds that requests get to end at shutdown.",
)
def command(
    worker_urls: Sequence[str],
    worker_file: Path | None,
    host: str,
    port: int,
    policy: str,
    worker_capacity: int,
    seed: int | None,
    max_connections: int,
    queue_size: int,
    queue_timeout: float,
    connect_timeout: float,
    silence_timeout: float,
    health_path: str,
    health_interval: float,
    health_timeout: float,
    fail_threshold: int,
    recover_threshold: int,
    load_interval: float,
    processes: int,
    drain_timeout: float,
) -> None:
    """Relay requests to several servers behind one address.

    Workers may also be added and drained while it runs, by POST and DELETE to /workers.

    Exit status: 0 after a signal, 1 when it cannot listen or a process failed, 2 when an option is refused.
    """
    if not health_path.startswith("/") or not health_path.isascii() or " " in health_path:
        raise click.UsageError(f"--health-path {health_path!r} is no path; write for example /health")
    addresses = read_addresses(worker_urls, worker_file)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    import uvloop

    from sgl_omni.listening import bind
    from sgl_omni.router.app import BACKLOG, RouterOptions
    from sgl_omni.router.dispatch import Limits
    from sgl_omni.router.health import Thresholds
    from sgl_omni.router.probe import Probing
    from sgl_omni.router.processes import run_one, run_several

    options = RouterOptions(
        policy=policy,
        capacity=worker_capacity,
        seed=seed,
        limits=Limits(
            max_connections=-(-max_connections // processes),
            queue=-(-queue_size // processes),
            queue_seconds=queue_timeout,
            connect_seconds=connect_timeout,
            silence_seconds=silence_timeout,
            retry_after=health_interval,
        ),
        thresholds=Thresholds(fail_threshold, recover_threshold),
        probing=Probing(health_path, health_interval, health_timeout, load_interval),
    )
    if processes > 1:
        sys.exit(run_several(processes, options, addresses, host, port, drain_timeout))
    sock = bind(host, port, backlog=BACKLOG)
    sys.exit(uvloop.run(run_one(options, addresses, sock, drain_timeout)))


def read_addresses(urls: Sequence[str], file: Path | None) -> list[Address]:
    """All workers that the command line names, each once, in order. Refuses what is no address, by its place."""
    from sgl_omni.router.workers import parse_address

    named = [("--worker-urls", url) for given in urls for url in given.replace(",", " ").split()]
    if file is not None:
        for number, line in enumerate(file.read_text().splitlines(), 1):
            if text := line.partition("#")[0].strip():
                named.append((f"{file}:{number}", text))
    addresses = []
    for place, text in named:
        try:
            addresses.append(parse_address(text))
        except InvalidRequest as error:
            raise click.UsageError(f"{place}: {error}") from error
    return list(dict.fromkeys(addresses))
