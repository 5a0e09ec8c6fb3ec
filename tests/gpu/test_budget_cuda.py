"""A stage that outgrows an enforced budget fails itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from servers import Server, serving

pytestmark = pytest.mark.gpu

CONFIG = """
stages:
  greedy:
    factory_path: gpu_stages.take
    factory: {gib: %s}
    process: greedy
    gpu: 0
    total_reserve_bytes: 4GiB
    enforce_total_reserve: true
    terminal: true
"""


def config(folder: Path, gib: float) -> str:
    path = folder / "greedy.yaml"
    path.write_text(CONFIG % gib)
    return str(path)


def test_within_the_budget_it_runs(tmp_path: Path) -> None:
    with serving("--config", config(tmp_path, 3), "--platform", "cuda", run_folder=tmp_path, cwd=Path(__file__).parent):
        pass


def test_above_the_budget_it_fails_by_name(tmp_path: Path) -> None:
    arguments = ("--config", config(tmp_path, 5), "--platform", "cuda")
    server = Server(*arguments, run_folder=tmp_path, cwd=Path(__file__).parent)
    assert server.wait(60) == 1
    assert "stage 'greedy' (greedy) could not be built" in server.log and "OutOfMemoryError" in server.log
    server.assert_nothing_left()
