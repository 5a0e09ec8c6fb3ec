"""The command itself: quick help, no torch, clear refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from sgl_omni.cli.main import cli
from sgl_omni.cli.options import why_not_writable

STUDY = """
name: s
cores: "0"
configurations:
  a: {serve: [--model-path, m], concurrency: 2}
"""


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


OUTPUTS = {
    "demo": ["demo", "--once", "--out"],
    "speech": ["bench", "speech", "--url", "http://127.0.0.1:9", "--out"],
    "chat": ["bench", "chat", "--url", "http://127.0.0.1:9", "--model", "m", "--out"],
    "transcription": ["bench", "transcription", "--url", "http://127.0.0.1:9", "--model", "m", "--audio", ".", "--out"],
    "plan": ["plan", "advise", "--model-path", "demo-voice", "--platform", "cpu", "--out"],
    "plan's report": ["plan", "advise", "--model-path", "demo-voice", "--platform", "cpu", "--report"],
    "study": ["bench", "study", "STUDY", "--out"],
}


@pytest.mark.parametrize("command", OUTPUTS)
@pytest.mark.parametrize("place", ["no such folder", "a file for a folder", "a folder", "a file system that refuses"])
def test_output_that_cannot_be_written_is_refused_before_any_work(
    command: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if command == "study" and place in ("no such folder", "a folder"):
        pytest.skip("a study makes its folder")
    study = tmp_path / "study.yaml"
    study.write_text(STUDY)
    (tmp_path / "file").write_text("kept")
    out = {
        "no such folder": tmp_path / "gone" / "out",
        "a file for a folder": tmp_path / "file" / "out",
        "a folder": tmp_path,
        "a file system that refuses": Path("/proc/out"),
    }[place]
    monkeypatch.chdir(tmp_path)
    arguments = [str(study) if each == "STUDY" else each for each in OUTPUTS[command]]
    done = CliRunner().invoke(cli, [*arguments, str(out)])
    assert (done.exit_code, type(done.exception)) == (2, SystemExit), done.output
    assert done.output.strip().splitlines()[-1].startswith("Error: ")
    assert (tmp_path / "file").read_text() == "kept"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "study.yaml"]


def test_a_look_at_an_output_leaves_it_as_it_was(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("kept")
    assert why_not_writable(kept) is why_not_writable(tmp_path / "new") is why_not_writable(Path("/dev/null")) is None
    assert [each.read_text() for each in tmp_path.iterdir()] == ["kept"]


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


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["bench", "speech", "--url", "http://127.0.0.1:9", "--burst", "3"], "--burst goes with --rate"),
        (["bench", "study", "STUDY"], "configurations.a.router.policy: 'nonsense'; choose"),
    ],
)
def test_options_that_would_do_nothing_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)  # where a study that was not refused would write its results
    study = tmp_path / "study.yaml"
    study.write_text(STUDY.replace("concurrency: 2", "concurrency: 2, router: {policy: nonsense}"))
    done = CliRunner().invoke(cli, [str(study) if each == "STUDY" else each for each in arguments])
    assert done.exit_code == 2 and says in done.output
