"""The command itself: quick help, no torch, clear refusals."""

from __future__ import annotations

import subprocess
import sys

import pytest


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["serve", "--help"],
        ["config", "--help"],
        ["router", "--help"],
        ["bench", "study", "--help"],
        ["dp", "up", "--help"],
        ["--version"],
    ],
)
def test_help_imports_neither_torch_nor_numpy(arguments: list[str]) -> None:
    code = f"""
import sys
sys.argv = ["sgl-omni", *{arguments!r}]
from sgl_omni.cli.main import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
heavy = {{"torch", "numpy", "transformers", "fastapi"}} & set(sys.modules)
print("heavy:", heavy or "none")
"""
    done = python(code)
    assert done.stdout.endswith("heavy: none\n"), done.stdout + done.stderr


def test_planning_a_pipeline_imports_no_torch() -> None:
    code = """
import sys
from sgl_omni.config.load import load_config
from sgl_omni.models.registry import PipelineRegistry
from sgl_omni.topology.builder import build_plan
from sgl_omni.topology.host import virtual_host
plan = build_plan(load_config(None, registry=PipelineRegistry(), model_path="demo-voice"), virtual_host())
print(len(plan.instances), "torch" in sys.modules)
"""
    assert python(code).stdout == "3 False\n"


def test_serve_says_what_is_missing() -> None:
    done = python("import sys; sys.argv = ['sgl-omni', 'serve']; from sgl_omni.cli.main import main; main()")
    assert done.returncode == 2 and "--config FILE" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serve", "--model-path", "demo-voice", "--drain-timeout", "nan"], "nan is not a finite number"),
        (["demo", "--out", "/no such folder/a.wav"], "there is no folder /no such folder"),
    ],
)
def test_odd_arguments_are_refused_before_anything_starts(arguments: list[str], says: str) -> None:
    done = python(f"import sys; sys.argv = ['sgl-omni', *{arguments!r}]; from sgl_omni.cli.main import main; main()")
    assert (done.returncode, says in done.stderr, "Traceback" in done.stderr) == (2, True, False)


def test_an_unknown_model_is_refused_without_a_traceback() -> None:
    code = "import sys; sys.argv = ['sgl-omni', 'serve', '--model-path', 'nobody/nothing']"
    done = python(f"{code}; from sgl_omni.cli.main import main; main()")
    assert done.returncode == 2
    assert "nobody/nothing" in done.stderr and "Traceback" not in done.stderr


def test_visible_gpus_are_chosen_as_cuda_does() -> None:
    from sgl_omni.gpu.devices import select_visible

    uuids = ["GPU-aa11", "GPU-bb22", "GPU-bb33", "GPU-cc44"]
    assert select_visible("2,0", uuids) == [2, 0]
    assert select_visible("GPU-cc,1", uuids) == [3, 1]
    assert select_visible("0,7,1", uuids) == [0], "the list ends at the first entry that names no GPU"
    assert select_visible("GPU-bb", uuids) == [], "two GPUs begin like this"
    assert select_visible("1,1", uuids) == [1]
    assert select_visible("", uuids) == [] == select_visible("-1", uuids)
