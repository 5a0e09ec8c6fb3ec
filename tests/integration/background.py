"""A pipeline of real processes that many tests ask, on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

from sgl_omni.config.load import load_config
from sgl_omni.models.registry import PipelineRegistry
from sgl_omni.runtime.coordinator import RequestHandle
from sgl_omni.runtime.pipeline import Pipeline
from sgl_omni.topology.builder import build_plan
from sgl_omni.topology.host import virtual_host
from sgl_omni.topology.plan import Plan

T = TypeVar("T")


def plan_for(folder: Path, *flags: str) -> Plan:
    """Of the folder's pipeline class on the CPU platform, with these flags."""
    resolved = load_config(None, list(flags), registry=PipelineRegistry(), model_path=str(folder))
    return build_plan(resolved, virtual_host(4 * 2**30, os.cpu_count()))


@dataclass
class Said:
    """Chunks and results of one request, by stage."""

    chunks: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    results: dict[str, dict[str, Any]] = field(default_factory=dict)

    def joined(self, stage: str, key: str) -> list[Any]:
        return [chunk[key] for chunk in self.chunks.get(stage, [])]


class Background:
    """``ask`` from a test; ``run`` for what has to be on the pipeline's loop."""

    def __init__(self, plan: Plan) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.pipeline = self.run(self._made(plan))

    async def _made(self, plan: Plan) -> Pipeline:
        return Pipeline(plan)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(120)

    def start(self) -> None:
        self.run(self.pipeline.start())

    def close(self) -> None:
        self.run(self.pipeline.stop(drain_timeout=0))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def ask(self, payload: dict[str, Any], outputs: Collection[str] | None = None) -> Said:
        return self.run(self.asked(payload, outputs))

    def ask_all(self, requests: Sequence[tuple[dict[str, Any], Collection[str] | None]]) -> list[Said]:
        async def all_of_them() -> list[Said]:
            return await asyncio.gather(*(self.asked(payload, outputs) for payload, outputs in requests))

        return self.run(all_of_them())

    async def asked(self, payload: dict[str, Any], outputs: Collection[str] | None = None) -> Said:
        return await listen(self.pipeline.submit(payload, outputs=outputs))

    def gauges(self) -> dict[str, float]:
        """Of all instances, ``<instance> <gauge>``."""
        self.run(self.pipeline.refresh())
        instances = self.pipeline.stats()["instances"]
        return {f"{name} {key}": value for name, gauges in instances.items() for key, value in gauges.items()}


async def listen(handle: RequestHandle) -> Said:
    said = Said()
    async for chunk in handle:
        said.chunks.setdefault(chunk.stage, []).append(chunk.payload)
    said.results = await handle.result()
    return said


@contextmanager
def in_background(plan: Plan, run_folder: Path) -> Iterator[Background]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(run_folder))
        background = Background(plan)
        try:
            background.start()
            yield background
        finally:
            background.close()
    assert not list((run_folder / "sgl-omni").glob("run-*")), "a run folder outlived its pipeline"
