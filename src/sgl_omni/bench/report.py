"""Results for people: tables in markdown, and plots where matplotlib is (extra `bench`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

from sgl_omni.bench.measure import BenchError

Runs = Sequence[Mapping[str, Any]]

HEAD = "| offered | requests/s | audio s/s | TTFA p50 / p95 (ms) | latency p50 / p95 (s) | RTF p50 | errors |"


def offered(figures: Mapping[str, Any]) -> str:
    callers = figures["concurrency"]
    return f"{figures['rate']:g}/s each" if figures["rate"] else f"{callers} caller{'s' * (callers != 1)} each"


def milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value * 1000:.0f}"


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def speech_table(levels: Sequence[Mapping[str, Any]]) -> str:
    """A line for each level of one measurement."""
    lines = [HEAD, "| --- | --- | --- | --- | --- | --- | --- |"]
    for figures in levels:
        ttfa, latency = figures["ttfa"], figures["latency"]
        lines.append(
            f"| {offered(figures)} | {figures['requests_per_s']:.2f} | {figures['audio_s_per_s']:.1f} "
            f"| {milliseconds(ttfa['p50'])} / {milliseconds(ttfa['p95'])} "
            f"| {number(latency['p50'])} / {number(latency['p95'])} | {number(figures['rtf']['p50'], 3)} "
            f"| {figures['errors']} |"
        )
    return "\n".join(lines)


def chat_table(levels: Sequence[Mapping[str, Any]]) -> str:
    """As ``speech_table``, for text."""
    lines = [
        "| offered | requests/s | tokens/s | TTFT p50 / p95 (ms) | between pieces p50 / p95 (ms) "
        "| latency p50 / p95 (s) | errors |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for figures in levels:
        ttft, itl, latency = figures["ttft"], figures["itl"], figures["latency"]
        lines.append(
            f"| {offered(figures)} | {figures['requests_per_s']:.2f} | {figures['tokens_per_s']:.1f} "
            f"| {milliseconds(ttft['p50'])} / {milliseconds(ttft['p95'])} "
            f"| {milliseconds(itl['p50'])} / {milliseconds(itl['p95'])} "
            f"| {number(latency['p50'])} / {number(latency['p95'])} | {figures['errors']} |"
        )
    return "\n".join(lines)


def transcription_table(levels: Sequence[Mapping[str, Any]]) -> str:
    """As ``speech_table``, for recordings."""
    lines = [
        "| offered | requests/s | audio s/s | TTFT p50 / p95 (ms) | latency p50 / p95 (s) | RTF p50 / p95 | errors |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for figures in levels:
        ttft, latency, rtf = figures["ttft"], figures["latency"], figures["rtf"]
        lines.append(
            f"| {offered(figures)} | {figures['requests_per_s']:.2f} | {figures['audio_s_per_s']:.1f} "
            f"| {milliseconds(ttft['p50'])} / {milliseconds(ttft['p95'])} "
            f"| {number(latency['p50'])} / {number(latency['p95'])} "
            f"| {number(rtf['p50'], 4)} / {number(rtf['p95'], 4)} | {figures['errors']} |"
        )
    return "\n".join(lines)


def span(values: Sequence[float], digits: int = 2) -> str:
    """``lowest to highest``, or the one value."""
    if not values:
        return "-"
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low} to {high}"


def study_table(study: Mapping[str, Any]) -> str:
    """A line for each configuration: ranges of its nominal runs, and how all its attempts ended; then every run."""
    runs: Runs = study["runs"]
    names: list[str] = study["configurations"]
    base = median_of(nominal(runs, names[0]))
    lines = [
        "| configuration | requests/s, nominal runs | relative to the first | audio s/s | latency p50 (s) | outcome |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in names:
        good = nominal(runs, name)
        rates = [run["figures"]["requests_per_s"] for run in good]
        relative = span([rate / base for rate in rates]) + "x" if rates and base else "-"
        audio = span([run["figures"]["audio_s_per_s"] for run in good], 1)
        latency = span([run["figures"]["latency"]["p50"] for run in good if run["figures"]["latency"]["p50"]])
        lines.append(f"| {name} | {span(rates)} | {relative} | {audio} | {latency} | {outcomes(runs, name)} |")
    lines += ["", "Every attempted run, in order:", "", "| run | configuration | outcome | requests/s | why |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for i, run in enumerate(runs, 1):
        rate = number(run["figures"]["requests_per_s"]) if run["figures"] else "-"
        lines.append(f"| {i} | {run['configuration']} | {run['outcome']} | {rate} | {one_line(run['reason'])} |")
    return "\n".join(lines) + "\n"


def one_line(text: str) -> str:
    return shorten(text, 200, placeholder=" ...").replace("|", "\\|")


def outcomes(runs: Runs, name: str) -> str:
    own = [run["outcome"] for run in runs if run["configuration"] == name]
    if not own:
        return "not run"
    parts = [f"{own.count(kind)} {kind}" for kind in ("nominal", "degraded", "failed") if own.count(kind)]
    return f"{', '.join(parts)} of {len(own)}"


def nominal(runs: Runs, name: str) -> Runs:
    return [run for run in runs if run["configuration"] == name and run["outcome"] == "nominal"]


def median_of(runs: Runs) -> float:
    rates = sorted(run["figures"]["requests_per_s"] for run in runs)
    return rates[len(rates) // 2] if rates else 0.0


def require_plots() -> None:
    """Raises ``BenchError`` where matplotlib is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise BenchError("plots need matplotlib: pip install 'sgl-omni[bench]', or leave --plots out") from error


def plot_study(study: Mapping[str, Any], folder: Path, kinds: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Throughput against concurrency, latency, GPU activity (where it was measured) and the timeline.

    Raises ``BenchError`` where matplotlib is missing.
    """
    require_plots()
    from matplotlib.figure import Figure

    done = [run for run in study["runs"] if run["figures"]]
    drawings: list[tuple[str, str, str, Any]] = [
        ("throughput", "callers in all", "requests/s", lambda f, n: [(f["concurrency"] * n, f["requests_per_s"])]),
        ("latency", "callers in all", "latency p50 and p95 (s)", _latency_points),
        ("activity", "callers in all", "SM activity, else GPU utilization", _activity_points),
    ]
    written = []
    for name, across, up, points in drawings:
        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        axes = figure.add_subplot()
        found = False
        for configuration in study["configurations"]:
            own = [r for r in done if r["configuration"] == configuration and r["figures"]["concurrency"]]
            dots = [point for run in own for point in points(run["figures"], run["clients"])]
            if dots:
                found = True
                axes.plot(*zip(*sorted(dots), strict=True), "o", label=configuration, alpha=0.75)
        if found:
            axes.set(xlabel=across, ylabel=up, ylim=(0, None))
            axes.legend()
            written += _save(figure, folder / name, kinds)
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    for i, configuration in enumerate(study["configurations"]):
        for j, run in enumerate(r for r in done if r["configuration"] == configuration):
            label = configuration if j == 0 else None
            axes.plot(run["figures"]["timeline"], color=f"C{i}", alpha=0.7, label=label)
    axes.set(xlabel="second of the run, warm-up included", ylabel="requests ended", ylim=(0, None))
    axes.legend()
    return written + _save(figure, folder / "timeline", kinds)


def _latency_points(figures: Mapping[str, Any], clients: int) -> list[tuple[float, float]]:
    callers = figures["concurrency"] * clients
    return [(callers, value) for key in ("p50", "p95") if (value := figures["latency"][key]) is not None]


def _activity_points(figures: Mapping[str, Any], clients: int) -> list[tuple[float, float]]:
    gpu = figures["gpu"] or {}
    found = gpu.get("sm_active") or gpu.get("gpu_util")
    return [(figures["concurrency"] * clients, found["mean"])] if found else []


def _save(figure: Any, stem: Path, kinds: Sequence[str]) -> list[Path]:
    paths = [stem.with_suffix(f".{kind}") for kind in kinds]
    for path in paths:
        figure.savefig(path)
    return paths
