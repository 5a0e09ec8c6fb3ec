"""The smoke run's rehearsal: model folder, server, requests, load and end, with small models on the CPU platform."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def smoke(folder: Path, *arguments: str) -> tuple[int, list[dict[str, object]]]:
    """Exit status, and the lines of JSON."""
    command = [sys.executable, "-m", "benchmarks.smoke", "--tiny", "--json", "--folder", str(folder)]
    done = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_a_family_from_its_folder_to_its_end(tmp_path: Path) -> None:
    load = ("--times", "1", "--concurrency", "3", "--seconds", "0.5")
    status, (whole, summary) = smoke(tmp_path, "--family", "qwen3_tts", *load, "--out", str(tmp_path / "results.json"))
    assert status == 0, whole
    assert json.loads((tmp_path / "results.json").read_text()) == [whole]
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    audio = {request["kind"]: request["audio_s"] for request in whole["requests"]}
    assert audio == {"plain": pytest.approx(8 * 0.08), "streamed": pytest.approx(8 * 0.08)}  # the end was never drawn
    (load_result,) = whole["loads"]
    assert load_result["requests"] >= 3
    assert load_result["audio_seconds_per_s"] == pytest.approx(load_result["requests_per_s"] * 8 * 0.08)
    assert whole["gauges"]["server"]['requests_total{outcome="ok"}'] == load_result["requests"] + 2
    assert {instance["name"] for instance in whole["instances"]} == whole["memory"]["ready"]["host_bytes"].keys()
    assert whole["ended"] | {"status": 0, "processes_left": 0, "run_folders_left": 0} == whole["ended"]
    assert summary["families"]["qwen3_tts"]["ok"] is True


@pytest.mark.slow
def test_a_family_that_fails_is_a_result_and_the_next_one_is_begun(tmp_path: Path) -> None:
    status, (first, second, summary) = smoke(tmp_path, "--family", "whisper,text_llm", "--serve", "--no_such.flag", "1")
    assert status == 1
    for result in (first, second):
        assert result["ok"] is False
        assert "before it was ready" in result["error"]
        assert any("no_such" in line for line in result["log"])
    assert summary["families"].keys() == {"whisper", "text_llm"}
    assert not list(tmp_path.iterdir())
