"""Whether replicas may share an architecture's weights: the same requests with and without, bit for bit."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sgl_omni.errors import PipelineError
from sgl_omni.runtime.coordinator import RequestHandle
from sgl_omni.runtime.pipeline import Pipeline
from sgl_omni.runtime.stage import Payload
from sgl_omni.topology.plan import Plan

Digests = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Answers:
    """Digests of what a plan answered: each payload to each replica alone, then all at once, then alone again."""

    alone: Digests
    together: Digests
    again: Digests


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """``problems`` is empty where the architecture passed. ``remarks`` are facts that decide nothing."""

    requests: int
    backend: str
    problems: tuple[str, ...]
    remarks: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.problems


async def audit(unshared: Plan, shared: Plan, payloads: Sequence[Payload], *, rounds: int = 4) -> Verdict:
    """Runs both plans, which differ in sharing alone, without MPS: a write to a shared weight then harms its own
    process only, and is seen.

    Args:
        payloads: for the entry stage. Their answers must not depend on chance: greedy, or with a seed.
        rounds: how often all payloads are sent at once.

    Raises:
        StartupError: a plan cannot be started.
        PipelineError: the unshared plan fails, which says nothing about sharing.
    """
    reference, _ = await _run(unshared, payloads, rounds)
    try:
        found, backend = await _run(shared, payloads, rounds)
    except PipelineError as error:
        return Verdict(requests=0, backend="", problems=(f"while sharing: {error}",), remarks=())
    problems, remarks = compare(reference, found)
    total = len(found.alone) + len(found.together) + len(found.again)
    return Verdict(requests=total, backend=backend, problems=problems, remarks=remarks)


def compare(reference: Answers, found: Answers) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Problems and remarks.

    Requests alone must answer alike always. Together they must where they do without sharing too: matrix products may
    round differently in other batches, which is then no fault of sharing.
    """
    problems: list[str] = []
    remarks: list[str] = []
    for what, one in (("before the load", found.alone), ("after the load", found.again)):
        wrong = _differing(reference.alone, one)
        if wrong:
            problems.append(f"{what}, {wrong} of {len(one)} answers differ from those without sharing")
    steady = reference.alone == reference.again
    if not steady:
        problems.append("without sharing, the same requests are not answered alike: nothing can be compared")
    expected = reference.alone * (len(reference.together) // len(reference.alone))
    unsteady = _differing(expected, reference.together)
    wrong = _differing(expected, found.together)
    if unsteady:
        remarks.append(f"without sharing, {unsteady} of {len(expected)} answers under load differ from those alone")
        remarks.append(f"with sharing, {wrong} of {len(expected)} do")
    elif wrong:
        problems.append(f"under load, {wrong} of {len(expected)} answers differ from those without sharing")
    return tuple(problems), tuple(remarks)


def _differing(one: Digests, other: Digests) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


async def _run(plan: Plan, payloads: Sequence[Payload], rounds: int) -> tuple[Answers, str]:
    """The answers, and the backend that shared the weights."""
    copies = max(process.num_replicas for process in plan.processes)
    each = [payload for payload in payloads for _ in range(copies)]
    async with Pipeline(plan, max_in_flight=len(each) * rounds) as pipeline:
        shared = [i["weights"]["models"] for i in pipeline.health()["instances"] if i["weights"]]
        backends = {model["backend"] for models in shared for model in models.values()}
        alone = [await digest(pipeline.submit(payload)) for payload in each]
        together = await asyncio.gather(*(digest(pipeline.submit(payload)) for payload in each * rounds))
        again = [await digest(pipeline.submit(payload)) for payload in each]
    return Answers(tuple(alone), tuple(together), tuple(again)), ", ".join(sorted(backends))


async def digest(handle: RequestHandle) -> str:
    """Of every bit of the answer, wherever it was cut into chunks."""
    streams: dict[str, Any] = {}
    async for chunk in handle:
        for key, value in chunk.payload.items():
            if not isinstance(value, (bool, int, float)):  # said again with each chunk, as a sample rate is
                streams.setdefault(f"{chunk.stage}.{key}", hashlib.sha256()).update(content(value))
    found = {key: stream.hexdigest() for key, stream in streams.items()}
    for stage, payload in (await handle.result()).items():
        found[stage] = hashlib.sha256(content(payload)).hexdigest()
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def content(value: Any) -> bytes:
    """All of a payload's value as bytes."""
    if isinstance(value, dict):
        return b"".join(f"{key!r}:".encode() + content(value[key]) for key in sorted(value))
    if isinstance(value, (list, tuple)):
        return b"[" + b",".join(content(item) for item in value) + b"]"
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value).tobytes()
    if hasattr(value, "untyped_storage"):  # a tensor, which this process must not import torch to know
        return bytes(value.contiguous().flatten().view(sys.modules["torch"].uint8).numpy())
    return repr(value).encode()
