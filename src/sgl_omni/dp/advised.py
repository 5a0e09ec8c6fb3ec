"""From what one replica was seen to use to a configuration that can be served, and the words about it. Pure."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_omni.config.scalars import core_text
from sgl_omni.dp.advice import Advice, Measured, Room, tokens_for
from sgl_omni.dp.watch import Reading

BETTER = 1.05
"""A topology is worth its memory and cores where it serves this many times what one replica does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One replica at its plateau. ``active``: share of the device's time in use. ``readings`` were taken in the window,
    the first at its beginning, the last at its end. ``device_bytes``: of the device, the engine's process."""

    active: float
    cpu_seconds: float
    seconds: float
    device_bytes: int
    weights_bytes: int
    readings: tuple[Reading, ...]

    @property
    def host_ms_a_step(self) -> float | None:
        """Host time in which a step was prepared and launched, of engines that count it."""
        steps = self.readings[-1].steps - self.readings[0].steps
        launching = self.readings[-1].launch_seconds - self.readings[0].launch_seconds
        return 1000 * launching / steps if steps else None

    @property
    def host_ms_a_row(self) -> float | None:
        """CPU time of all processes for each row (token or frame) that the engine made."""
        rows = self.readings[-1].generated_rows - self.readings[0].generated_rows
        return 1000 * self.cpu_seconds / rows if rows else None


def measured(seen: Seen) -> Measured:
    """What the arithmetic takes.

    Where an engine does not say what a token takes, all of its memory beside the weights is counted as its pool: too
    much rather than too little.
    """
    last = seen.readings[-1]
    beside = max(0, seen.device_bytes - seen.weights_bytes)
    a_token = last.bytes_per_token or max(1, beside // last.kv_capacity)
    return Measured(
        sm_active=min(1.0, max(seen.active, 0.001)),
        host_cores=max(seen.cpu_seconds / seen.seconds, 0.001),
        weights_bytes=seen.weights_bytes,
        other_bytes=max(0, beside - a_token * last.kv_capacity),
        bytes_per_token=a_token,
        tokens_needed=max(1, last.kv_peak),
        page_tokens=max(1, last.page_tokens),
    )


def replicas_forced(advice: Advice, found: Measured, room: Room, replicas: int) -> Advice:
    """The same sharing for another number of replicas, which is to be tried whatever the rule says. All pools together
    are as large as the advised ones, or as there is room for.

    Raises ``ValueError`` where so many do not fit.
    """
    pool = tokens_for(found, room, replicas, shared=advice.weight_share)
    return Advice(
        replicas=replicas,
        cores_each=room.cores // replicas,
        max_total_tokens=max(1, min(pool, advice.max_total_tokens * advice.replicas // replicas)),
        mps=replicas > 1,
        weight_share=advice.weight_share,
        bound="--replicas",
    )


def configuration(
    tree: dict[str, Any],
    advice: Advice,
    found: Measured,
    *,
    process: str,
    stage: str,
    device: int,
    memory_bytes: int,
    mps: bool,
    blocks: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """The configuration `tree` with so many copies of the engine's Process on one device.

    Args:
        process, stage: the engine's Process and stage.
        mps: whether the platform has it.
        blocks: cores for each copy; none where they are left to the kernel.
    """
    made = copy.deepcopy(tree)
    own = made.setdefault("processes", {}).setdefault(process, {})
    own |= {"num_replicas": advice.replicas, "replica_devices": [device] * advice.replicas}
    own.setdefault("replica_policy", "least_inflight")
    own.pop("cpu_cores", None)
    if blocks:
        own["cpu_cores"] = [core_text(block) for block in blocks]
    entry = _stage(made, stage)
    pool = advice.max_total_tokens // found.page_tokens * found.page_tokens or found.page_tokens
    engine = {**(entry.get("engine") or {}), "max_total_tokens": pool}
    for key in ("kv_cache_bytes", "mem_fraction_static"):
        engine.pop(key, None)
    entry["engine"] = engine
    entry.pop("total_reserve_bytes", None)
    need = found.weights_bytes + found.other_bytes + pool * found.bytes_per_token
    entry["gpu_memory_fraction"] = min(math.ceil(1000 * need / memory_bytes) / 1000, 1.0)
    made["mps"] = "on" if mps and advice.mps else "off"
    made["weight_share"] = "on" if advice.weight_share else "off"
    return made


def _stage(tree: dict[str, Any], name: str) -> dict[str, Any]:
    stages = tree["stages"]
    entry: dict[str, Any] = stages[name] if isinstance(stages, dict) else next(s for s in stages if s["name"] == name)
    return entry


def weights_in(folder: str | None) -> int:
    """Bytes of the tensor files of a checkpoint's folder; 0 where there is none to look into."""
    if folder is None or not Path(folder).is_dir():
        return 0
    return sum(path.stat().st_size for path in Path(folder).rglob("*.safetensors"))


def verdict(before: float, after: float, seconds: float, replicas: int) -> str:
    """Whether so many replicas beat one, in requests/s, each counted for so many seconds.

    A gain has to be larger than two standard deviations of what chance does to such counts.
    """
    gain = f" ({after / before - 1:+.0%})" if before else ""
    figures = f"{replicas} replicas served {after:.2f} requests/s, one {before:.2f}{gain}"
    if after < BETTER * before:
        return f"not worth it: {figures}; less than {BETTER - 1:.0%} more does not pay for the memory and cores"
    if (after - before) * seconds < 2 * math.sqrt((after + before) * seconds):
        return f"not shown: {figures}; so few requests in {seconds:g} s can differ by chance, so give more --seconds"
    return f"worth it: {figures}"
