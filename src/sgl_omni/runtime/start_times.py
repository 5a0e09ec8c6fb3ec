"""Where the time of an instance's start went."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def start_times(seconds: float, facts: Mapping[str, Any]) -> dict[str, float]:
    """Seconds from a process's start until it was ready, and parts of them, from its ready report.

    ``imports``: until the first stage was built: the interpreter, the runtime and, on CUDA, torch. ``build``: the
    factories and rehearsals. In these ``wait``: for the leader to publish weights; ``weights``: loading or attaching
    those that are shared; ``capture``: CUDA graphs; ``rehearsal``.
    """
    build: float = facts.get("build_seconds", 0.0)
    models = facts.get("weights", {}).get("models", {}).values()
    engines = facts.get("engines", {}).values()
    found = {
        "seconds": seconds,
        "imports": seconds - build,
        "build": build,
        "wait": sum(model["waited"] for model in models),
        "weights": sum(model["seconds"] for model in models),
        "capture": sum(gauges.get("graph_capture_seconds", 0.0) for gauges in engines),
        "rehearsal": facts.get("rehearsal_seconds", 0.0),
    }
    return {key: round(value, 3) for key, value in found.items()}


def in_words(start: Mapping[str, float]) -> str:
    """``3.1 s, of which imports 1.2, build 1.9 (weights 0.4)``; parts that took no time are left out."""
    inside = ", ".join(f"{key} {start[key]:.1f}" for key in ("wait", "weights", "capture", "rehearsal") if start[key])
    return (
        f"{start['seconds']:.1f} s, of which imports {start['imports']:.1f}, build {start['build']:.1f}"
        f"{f' ({inside})' if inside else ''}"
    )
