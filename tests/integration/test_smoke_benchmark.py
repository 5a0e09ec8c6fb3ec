"""The smoke run's rehearsal: model folder, server, requests, load and end, with small models on the CPU platform."""

from __future__ import annotations

import json
import re
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


KINDS = {"qwen3_tts": ("plain", "streamed"), "ming_omni_tts": ("plain", "streamed", "reference")}
LOADS = {"qwen3_tts": ["streamed"], "ming_omni_tts": ["streamed", "reference"]}
STEP_SECONDS = {"qwen3_tts": 0.08, "ming_omni_tts": 0.32}


@pytest.mark.slow
@pytest.mark.parametrize("family", KINDS)
def test_a_family_from_its_folder_to_its_end(family: str, tmp_path: Path) -> None:
    load = ("--times", "1", "--concurrency", "3", "--seconds", "0.5")
    status, (whole, summary) = smoke(tmp_path, "--family", family, *load, "--out", str(tmp_path / "results.json"))
    assert status == 0, whole
    assert json.loads((tmp_path / "results.json").read_text()) == [whole]
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    audio = {request["kind"]: request["audio_s"] for request in whole["requests"]}
    speech = 8 * STEP_SECONDS[family]  # the end was never drawn
    assert audio == dict.fromkeys(KINDS[family], pytest.approx(speech))
    assert [found["kind"] for found in whole["loads"]] == LOADS[family]
    for found in whole["loads"]:
        assert found["requests"] >= 3
        assert found["audio_seconds_per_s"] == pytest.approx(found["requests_per_s"] * speech)
    asked = sum(found["requests"] for found in whole["loads"]) + len(audio)
    assert whole["gauges"]["server"]['requests_total{outcome="ok"}'] == asked
    assert {instance["name"] for instance in whole["instances"]} == whole["memory"]["ready"]["host_bytes"].keys()
    assert whole["ended"] | {"status": 0, "processes_left": 0, "run_folders_left": 0} == whole["ended"]
    assert summary["families"][family]["ok"] is True


@pytest.mark.slow
def test_what_a_server_says_is_in_a_file_with_its_seconds(tmp_path: Path) -> None:
    logs = tmp_path / "logs" / "of today"
    command = [sys.executable, "-m", "benchmarks.smoke", "--tiny", "--json", "--folder", str(tmp_path)]
    command += ["--family", "text_llm", "--times", "1", "--concurrency", "1", "--seconds", "0.1", "--log", str(logs)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stdout
    told = [re.sub(r"[0-9.]+ s$", "", line) for line in done.stderr.splitlines()]
    assert told == ["text_llm: the model folder was made in ", "text_llm: the server was ready after "]
    (file,) = logs.iterdir()
    assert file.name == "text_llm.log"
    seconds, lines = zip(*(line.lstrip().split(" ", 1) for line in file.read_text().splitlines()), strict=True)
    assert list(map(float, seconds)) == sorted(map(float, seconds))
    ready = next(float(at) for at, line in zip(seconds, lines, strict=True) if "ready: smoke on http" in line)
    assert ready <= json.loads(done.stdout.splitlines()[0])["seconds_to_ready"]
    assert any("shutting down" in line for line in lines)


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
