"""`sgl-omni bench`: what a server does under load, and several configurations compared."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sgl_omni.cli.options import SECONDS, SECONDS_OR_NONE, writable_file, writable_folder
from sgl_omni.cli.told import run_until_told
from sgl_omni.errors import InvalidRequest

if TYPE_CHECKING:
    from sgl_omni.bench.chat import ChatOptions
    from sgl_omni.bench.measure import Load
    from sgl_omni.bench.transcription import TranscriptionOptions
    from sgl_omni.bench.workload import Workload


LOAD_OPTIONS = (
    click.option(
        "--url", "urls", multiple=True, required=True, help="A running server, or a router; again for each replica."
    ),
    click.option(
        "--concurrency",
        help="Callers a replica, closed loop; several as 1,8,64. Left out: doubled from 1 until the plateau.",
    ),
    click.option("--rate", type=SECONDS, help="Open loop instead: requests/s for each replica, Poisson arrivals."),
    click.option(
        "--burst", type=click.IntRange(min=1), default=1, show_default=True, help="With --rate: arrive at once."
    ),
    click.option("--seconds", type=SECONDS, default=15.0, show_default=True, help="Measured, for each level."),
    click.option("--warmup", type=SECONDS_OR_NONE, default=3.0, show_default=True, help="Seconds not measured."),
    click.option("--timeout", type=SECONDS, default=120.0, show_default=True, help="Seconds that a request may take."),
    click.option(
        "--gpu", type=click.IntRange(min=0), default=0, show_default=True, help="GPU that is watched, if any."
    ),
    click.option(
        "--out", type=click.Path(dir_okay=False, path_type=Path), callback=writable_file, help="JSON with all figures."
    ),
)
"""What is offered to whom, and where the figures go; the same for each kind of load."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What ``LOAD_OPTIONS`` say; without ``levels`` callers are doubled until the plateau."""

    urls: Sequence[str]
    levels: Sequence[int] | None
    load: Load
    gpu: int
    out: Path | None


def load_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command ``LOAD_OPTIONS``, which it gets as an ``Offer``, its first argument."""

    @wraps(command)
    def offered(
        urls: Sequence[str],
        concurrency: str | None,
        rate: float | None,
        burst: int,
        seconds: float,
        warmup: float,
        timeout: float,
        gpu: int,
        out: Path | None,
        **of_this_kind: Any,
    ) -> None:
        from sgl_omni.bench.measure import Load

        if concurrency is not None and rate is not None:
            raise click.UsageError("give --concurrency (closed loop) or --rate (open loop), not both")
        if burst > 1 and rate is None:
            raise click.UsageError("--burst goes with --rate: callers of a closed loop do not arrive")
        levels = parse_levels(concurrency) if concurrency is not None else None
        load = Load(rate=rate or 0.0, warmup=warmup, seconds=seconds, timeout=timeout, burst=burst)
        command(Offer(urls, levels, load, gpu, out), **of_this_kind)

    found: Callable[..., None] = offered
    for option in reversed(LOAD_OPTIONS):
        found = option(found)
    return found


@click.group()
def app() -> None:
    """Measure servers under load."""


@app.command()
@load_options
@click.option("--texts", default="english", show_default=True, help="A set that ships, or a file with a text a line.")
@click.option(
    "--mix", help="Weights of short, medium and long texts, as 10/60/30; each text equally often if left out."
)
@click.option("--seed", default=0, show_default=True, help="Draws the same texts and arrivals again.")
@click.option("--model", default="demo-voice", show_default=True, help="Model name in the requests.")
@click.option("--voice", help="Voice in the requests; the server's default if left out.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), help="Steps of the model that a speech may take.")
def speech(
    offer: Offer,
    texts: str,
    mix: str | None,
    seed: int,
    model: str,
    voice: str | None,
    max_new_tokens: int | None,
) -> None:
    """Speech from running servers, driven by one client process a replica.

    Exit status: 1 when a client fails or no request ends well, 2 when an option is refused.
    """
    from sgl_omni.bench.report import speech_table
    from sgl_omni.bench.workload import Workload, load_texts, parse_mix

    try:
        parsed = parse_mix(mix) if mix is not None else None
        workload = Workload(load_texts(texts), seed, parsed, model, voice, max_new_tokens)
    except InvalidRequest as error:
        raise click.UsageError(str(error)) from error
    _report(offer, workload, speech_table)


@app.command()
@load_options
@click.option(
    "--texts", default="english", show_default=True, help="A set that ships, or a file with a question a line."
)
@click.option("--seed", default=0, show_default=True, help="Draws the same texts and arrivals again.")
@click.option("--model", required=True, help="Model name in the requests.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Of an answer, at most.")
@click.option("--ignore-eos", is_flag=True, help="Every answer has --max-tokens tokens, whatever the model says.")
@click.option("--temperature", type=click.FloatRange(0, 2), help="The server's default if left out.")
def chat(
    offer: Offer,
    texts: str,
    seed: int,
    model: str,
    max_tokens: int,
    ignore_eos: bool,
    temperature: float | None,
) -> None:
    """Streamed chat answers from running servers, driven by one client process a replica.

    Exit status: 1 when a client fails or no request ends well, 2 when an option is refused.
    """
    from sgl_omni.bench.chat import ChatOptions
    from sgl_omni.bench.report import chat_table
    from sgl_omni.bench.workload import Workload, load_texts

    try:
        workload = Workload(load_texts(texts), seed, model=model)
    except InvalidRequest as error:
        raise click.UsageError(str(error)) from error
    options = ChatOptions(max_tokens, ignore_eos, temperature)
    _report(offer, workload, chat_table, options)


@app.command()
@load_options
@click.option(
    "--audio",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    required=True,
    help="Folder of recordings (wav, flac, ogg, opus, mp3, ...); each is asked for equally often.",
)
@click.option("--seed", default=0, show_default=True, help="Draws the same recordings and arrivals again.")
@click.option("--model", required=True, help="Model name in the requests.")
@click.option("--language", help="Of the recordings, as a code; found by the model if left out.")
@click.option("--prompt", help="Context in the requests.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), help="Of an answer, at most.")
def transcription(
    offer: Offer,
    audio: Path,
    seed: int,
    model: str,
    language: str | None,
    prompt: str | None,
    max_new_tokens: int | None,
) -> None:
    """Streamed transcriptions from running servers, driven by one client process a replica.

    Exit status: 1 when a client fails or no request ends well, 2 when an option is refused.
    """
    from sgl_omni.bench.report import transcription_table
    from sgl_omni.bench.transcription import TranscriptionOptions, find_recordings
    from sgl_omni.bench.workload import Workload

    try:
        recordings = find_recordings(audio)
    except InvalidRequest as error:
        raise click.UsageError(str(error)) from error
    workload = Workload(tuple(recordings), seed, model=model)
    options = TranscriptionOptions(recordings, language, prompt, max_new_tokens)
    _report(offer, workload, transcription_table, transcription=options)


def _report(
    offer: Offer,
    workload: Workload,
    table: Callable[[Sequence[dict[str, Any]]], str],
    chat: ChatOptions | None = None,
    transcription: TranscriptionOptions | None = None,
) -> None:
    """Measures, prints the table, and writes the figures down, level by level: it may be ended before it is through."""
    offer = replace(offer, urls=[check_url(url) for url in offer.urls])
    for url in offer.urls:
        check_answers(url)

    def keep(levels: Sequence[dict[str, Any]]) -> None:
        if offer.out is not None:
            offer.out.write_text(json.dumps({"urls": offer.urls, "levels": levels}, indent=1) + "\n")

    figures = run_until_told(_measure(offer, workload, chat, transcription, keep))
    click.echo(table(figures))
    for level in figures:
        click.echo(_balance(level))
    if not any(level["requests"] for level in figures):
        raise click.ClickException("no request ended well: " + "; ".join(figures[0]["error_examples"]))


async def _measure(
    offer: Offer,
    workload: Workload,
    chat: ChatOptions | None,
    transcription: TranscriptionOptions | None,
    keep: Callable[[Sequence[dict[str, Any]]], None],
) -> list[dict[str, Any]]:
    from sgl_omni.bench.measure import Sweep, measure

    asked = partial(measure, offer.urls, workload, gpu=offer.gpu, chat=chat, transcription=transcription)
    figures: list[dict[str, Any]] = []
    if offer.load.rate:
        figures.append(await asked(offer.load))
        keep(figures)
        return figures

    async def at(level: int) -> dict[str, Any]:
        found = await asked(replace(offer.load, concurrency=level), streams=64 * len(figures))
        click.echo(f"{level} callers each: {found['requests_per_s']:.2f} requests/s", err=True)
        figures.append(found)
        keep(figures)
        return found

    if offer.levels is not None:
        for level in offer.levels:
            await at(level)
        return figures
    sweep = Sweep()
    while sweep.level is not None:
        sweep.take((await at(sweep.level))["requests_per_s"])
    return figures


def _balance(level: dict[str, Any]) -> str:
    """Each replica's part, and how full its engine was."""
    from sgl_omni.bench.report import offered

    parts = [f"{each['requests_per_s']:.2f}/s" for each in level["per_replica"]]
    for each in level["saturation"]:
        if "running" in each:
            parts.append(f"running {each['running']['mean']:g}, queued {each['queued']['mean']:g} ({each['url']})")
    gpu = level["gpu"] or {}
    parts += [f"{name} {gpu[name]['mean']:.0%}" for name in ("sm_active", "gpu_util") if name in gpu]
    return f"{offered(level)}: {'; '.join(parts)}"


def parse_levels(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise click.UsageError(f"--concurrency {text!r}: write whole numbers from 1, as 1,8,64")
    return [int(part) for part in parts]


def check_url(text: str) -> str:
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(text)
        usable = parts.scheme == "http" and parts.hostname and parts.port and parts.path in ("", "/")
    except ValueError:
        usable = False
    if not usable:
        raise click.UsageError(f"--url {text!r}: write http://host:port")
    return text.rstrip("/")


def check_answers(url: str) -> None:
    """Raises where nobody listens, before any load is offered."""
    from urllib.parse import urlsplit

    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname, parts.port), timeout=5).close()
    except OSError as error:
        raise click.ClickException(f"no request ended well: nobody listens at {url}: {error}") from error


@app.command()
@click.argument("study", type=click.Path(path_type=Path))
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="Folder of the results; STUDY's name if left out."
)
@click.option("--plots/--no-plots", default=False, show_default=True, help="Draw PNG and SVG (extra `bench`).")
def study(study: Path, out: Path | None, plots: bool) -> None:
    """Compare configurations: interleaved, fresh servers in every run, every attempt reported.

    Writes study.json and table.md (and plots) into a folder, the first two anew after each run. Exit status: 1 when no
    run was completed.
    """
    from sgl_omni.bench.report import plot_study, require_plots, study_table
    from sgl_omni.bench.study import load_study, run_study
    from sgl_omni.router.policy import POLICIES

    spec = load_study(study)
    for name, each in spec.configurations.items():
        if each.router is not None and each.router.policy not in POLICIES:
            known = ", ".join(POLICIES)
            raise click.UsageError(
                f"{study}: configurations.{name}.router.policy: {each.router.policy!r}; choose {known}"
            )
    try:
        spec.workload.build()
    except InvalidRequest as error:
        raise click.UsageError(f"{study}: workload: {error}") from error
    folder = out or Path(study.stem)
    writable_folder(folder, ("study.json", "table.md"), "--out" if out else "the study's name")
    if plots:
        require_plots()

    def keep(result: dict[str, Any]) -> None:
        (folder / "study.json").write_text(json.dumps(result, indent=1) + "\n")
        (folder / "table.md").write_text(study_table(result))

    result = run_until_told(run_study(spec, lambda line: click.echo(line, err=True), keep))
    click.echo(study_table(result))
    if not any(run["figures"] for run in result["runs"]):
        click.echo("error: no run was completed", err=True)
        sys.exit(1)
    if plots:
        for path in plot_study(result, folder):
            click.echo(f"wrote {path}", err=True)
