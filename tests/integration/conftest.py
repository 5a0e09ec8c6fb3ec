"""Fixtures of the tests that run real processes."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from sgl_omni.runtime.pipeline import Pipeline
from sgl_omni.topology.plan import Plan

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)

from running import Start, children  # noqa: E402 - it lies beside this file


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """As pytest's, with a short path: many tests let a server keep its sockets there."""
    with tempfile.TemporaryDirectory(prefix="omni-") as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def own_run_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Run folders of a test lie in a folder of its own, so that what is left can be counted; its path is short, as
    socket addresses are."""
    with tempfile.TemporaryDirectory(prefix="omni-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


@pytest.fixture
async def start(own_run_folder: Path) -> AsyncIterator[Start]:
    """Starts a pipeline from a plan; stops it after the test and checks that nothing is left of it."""
    pipelines: list[Pipeline] = []

    async def begin(plan: Plan, **options: Any) -> Pipeline:
        pipeline = Pipeline(plan, **options)
        pipelines.append(pipeline)
        await pipeline.start()
        return pipeline

    before = children()
    yield begin
    for pipeline in pipelines:
        await pipeline.stop(drain_timeout=0)
    assert children() <= before, "a child process outlived its pipeline"
    assert not list((own_run_folder / "sgl-omni").glob("run-*")), "a run folder outlived its pipeline"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights, 26 MB, under the names that such checkpoints have."""
    from checkpoints import save_llama

    return save_llama(tmp_path_factory.mktemp("llama"))
