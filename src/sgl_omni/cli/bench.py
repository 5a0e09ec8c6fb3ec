"""`sgl-omni bench`: what a server does under load, and several configurations compared."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sgl_omni.cli.options import SECONDS, SECONDS_OR_NONE, writable_file, writable_folder
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


def load_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(LOAD_OPTIONS):
        command = option(command)
    return command


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
    urls: Sequence[str],
    concurrency: str | None,
    rate: float | None,
    texts: str,
    mix: str | None,
    seed: int,
    model: str,
    voice: str | None,
    max_new_tokens: int | None,
    gpu: int,
    out: Path | None,
    warmup: float,
    seconds: float,
    timeout: float,
    burst: int,
) -> None:
    """Speech from running servers, driven by one client process a replica.

    Exit status: 1 when a client fails or no request ends well, 2 when an option is refused.
    """
    from sgl_omni.bench.measure import Load
    from sgl_omni.bench.report import speech_table
    from sgl_omni.bench.workload import Workload, load_texts, parse_mix

    if concurrency is not None and rate is not None:
        raise click.UsageError("give --concurrency (closed loop) or --rate (open loop), not both")
    levels = parse_levels(concurrency) if concurrency is not None else None
    try:
        parsed = parse_mix(mix) if mix is not None else None
        workload = Workload(load_texts(texts), seed, parsed, model, voice, max_new_tokens)
    except InvalidRequest as error:
        raise click.UsageError(str(error)) from error
    load = Load(rate=rate or 0.0, warmup=warmup, seconds=seconds, timeout=timeout, burst=burst)
    _report(urls, workload, levels, load, gpu, out, speech_table)


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
    urls: Sequence[str],
    concurrency: str | None,
    rate: float | None,
    texts: str,
    seed: int,
    model: str,
    max_tokens: int,
    ignore_eos: bool,
    temperature: float | None,
    gpu: int,
    out: Path | None,
    warmup: float,
    seconds: float,
    timeout: float,
    burst: int,
) -> None:
    """Streamed chat answers from running servers, driven by one client process a replica.

    Exit status: 1 when a client fails or no request ends well, 2 when an option is refused.
    """
    from sgl_omni.bench.chat import ChatOptions
    from sgl_omni.bench.measure import Load
    from sgl_omni.bench.report import chat_table
    from sgl_omni.bench.workload import Workload, load_texts

    if concurrency is not None and rate is not None:
        raise click.UsageError("give --concurrency (closed loop) or --rate (open loop), not both")
    levels = parse_levels(concurrency) if concurrency is not None else None
    try:
        workload = Workload(load_texts(texts), seed, model=model)
    except InvalidRequest as error:
        raise click.UsageError(str(error)) from error
    load = Load(rate=rate or 0.0, warmup=warmup, seconds=seconds, timeout=timeout, burst=burst)
    options = ChatOptions(max_tokens, ignore_eos, temperature)
    _report(urls, workload, levels, load, gpu, out, chat_table, options)


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
    urls: Sequence[str],
    concurrency: str | None,
    rate: float | None,
    audio: Path,
    seed: int,
    model: str,
    language: str | None,
    prompt: str | None,
    max_new_tokens: int | None,
    gpu: int,
    out: Path | None,
    warmup: float,
    seconds: float,
    timeout: float,
    burst: int,
) -> None:
    """Streamed transcriptions from running servers, driven by one client process a replica.

    Exit status: 1 when a client fails or no request ends well, 2 when an option is refused.
    """
    from sgl_omni.bench.measure import Load
    from sgl_omni.bench.report import transcription_table
    from sgl_omni.bench.transcription import TranscriptionOptions, find_recordings
    from sgl_omni.bench.workload import Workload

    if concurrency is not None and rate is not None:
        raise click.UsageError("give --concurrency (closed loop) or --rate (open loop), not both")
    levels = parse_levels(concurrency) if concurrency is not None else None
    try:
        recordings = find_recordings(audio)
    except InvalidRequest as error:
        raise click.UsageError(str(error)) from error
    workload = Workload(tuple(recordings), seed, model=model)
    load = Load(rate=rate or 0.0, warmup=warmup, seconds=seconds, timeout=timeout, burst=burst)
    options = TranscriptionOptions(recordings, language, prompt, max_new_tokens)
    _report(urls, workload, levels, load, gpu, out, transcription_table, transcription=options)


def _report(
    urls: Sequence[str],
    workload: Workload,
    levels: Sequence[int] | None,
    load: Load,
    gpu: int,
    out: Path | None,
    table: Callable[[Sequence[dict[str, Any]]], str],
    chat: ChatOptions | None = None,
    transcription: TranscriptionOptions | None = None,
) -> None:
    """Measures, prints the table, and writes the figures down."""
    urls = [check_url(url) for url in urls]
    figures = asyncio.run(_measure(urls, workload, levels, load, gpu, chat, transcription))
    click.echo(table(figures))
    for level in figures:
        click.echo(_balance(level))
    if out is not None:
        out.write_text(json.dumps({"urls": urls, "levels": figures}, indent=1) + "\n")
    if not any(level["requests"] for level in figures):
        raise click.ClickException("no request ended well: " + "; ".join(figures[0]["error_examples"]))


async def _measure(
    urls: Sequence[str],
    workload: Workload,
    levels: Sequence[int] | None,
    load: Load,
    gpu: int,
    chat: ChatOptions | None,
    transcription: TranscriptionOptions | None,
) -> list[dict[str, Any]]:
    from sgl_omni.bench.measure import Sweep, measure

    asked = partial(measure, urls, workload, gpu=gpu, chat=chat, transcription=transcription)
    if load.rate:
        return [await asked(load)]
    figures: list[dict[str, Any]] = []

    async def at(level: int) -> dict[str, Any]:
        offered = replace(load, concurrency=level)
        found = await asked(offered, streams=64 * len(figures))
        click.echo(f"{level} callers each: {found['requests_per_s']:.2f} requests/s", err=True)
        figures.append(found)
        return found

    if levels is not None:
        for level in levels:
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


@app.command()
@click.argument("study", type=click.Path(path_type=Path))
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="Folder of the results; STUDY's name if left out."
)
@click.option("--plots/--no-plots", default=False, show_default=True, help="Draw PNG and SVG (extra `bench`).")
def study(study: Path, out: Path | None, plots: bool) -> None:
    """Compare configurations: interleaved, fresh servers in every run, every attempt reported.

    Writes study.json and table.md (and plots) into a folder. Exit status: 1 when no run was completed.
    """
    from sgl_omni.bench.report import plot_study, require_plots, study_table
    from sgl_omni.bench.study import load_study, run_study

    spec = load_study(study)
    try:
        spec.workload.build()
    except InvalidRequest as error:
        raise click.UsageError(f"{study}: workload: {error}") from error
    folder = out or Path(study.stem)
    writable_folder(folder, ("study.json", "table.md"), "--out" if out else "the study's name")
    if plots:
        require_plots()
    result = asyncio.run(run_study(spec, lambda line: click.echo(line, err=True)))
    (folder / "study.json").write_text(json.dumps(result, indent=1) + "\n")
    table = study_table(result)
    (folder / "table.md").write_text(table)
    click.echo(table)
    if not any(run["figures"] for run in result["runs"]):
        click.echo("error: no run was completed", err=True)
        sys.exit(1)
    if plots:
        for path in plot_study(result, folder):
            click.echo(f"wrote {path}", err=True)
