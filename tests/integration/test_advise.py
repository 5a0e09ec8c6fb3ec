"""`sgl-omni plan advise` with the demo voice on the CPU platform: measured, tried and told, whatever comes of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from servers import ROOT, serving

pytestmark = pytest.mark.alone


def command(tmp_path: Path, *arguments: str) -> list[str]:
    """Texts are short, so that a slow machine ends some."""
    texts = tmp_path / "texts"
    texts.write_text("Yes.\nNo.\nGood.\n")
    found = [sys.executable, "-m", "sgl_omni.cli.main", "plan", "advise", "--platform", "cpu", "--concurrency", "2"]
    found += ["--seconds", "3", "--warmup", "1", "--texts", str(texts), "--report", str(tmp_path / "report.json")]
    return [*found, "--out", str(tmp_path / "advised.yaml"), *arguments]


def advise(tmp_path: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """The command and its report."""
    done = subprocess.run(
        command(tmp_path, *arguments), capture_output=True, text=True, timeout=170, cwd=ROOT, env=os.environ
    )
    report = tmp_path / "report.json"
    return done, json.loads(report.read_text()) if report.exists() else {}


def test_two_replicas_are_written_served_and_judged(tmp_path: Path, own_run_folder: Path) -> None:
    done, report = advise(tmp_path, "--model-path", "demo-voice", "--replicas", "2")
    assert done.returncode == 0, done.stderr
    assert re.search(r"one replica, 2 callers: \d+\.\d+ requests/s", done.stdout)
    assert re.search(r"CPU time for each row of output: \d+\.\d+ ms", done.stdout)
    verdict = done.stdout.splitlines()[-1]
    assert verdict == report["verdict"] and re.match(
        r"(worth it|not worth it|not shown): 2 replicas served \d", verdict
    )
    assert report["one"]["requests"] > 0 and len(report["several"]) == 2
    assert 0 < report["seen"]["active"] <= 1 and report["seen"]["weights_bytes"] > 2**20
    assert report["measured"]["tokens_needed"] > 1
    written = (tmp_path / "advised.yaml").read_text()
    assert written.startswith(f"# {verdict}\n")
    copies = yaml.safe_load(written)["processes"]["tts_engine"]
    assert (copies["num_replicas"], copies["replica_devices"]) == (2, [0, 0])
    assert not list(own_run_folder.glob("sgl-omni/run-*")), "both servers have ended"


def test_a_running_server_is_measured_and_left_alone(tmp_path: Path, own_run_folder: Path) -> None:
    with serving("--model-path", "demo-voice", "--platform", "cpu", run_folder=own_run_folder) as server:
        before = psutil.Process(server.process.pid).children()
        done, report = advise(tmp_path, "--model-path", "demo-voice", "--url", server.url)
        assert done.returncode == 0, done.stderr
        assert report["verdict"].startswith(("not tried: the running server", "not worth it: one replica is what"))
        written = (tmp_path / "advised.yaml").read_text()
        assert written.startswith(f"# {report['verdict']}\n") and yaml.safe_load(written)["model_path"] == "demo-voice"
        assert psutil.Process(server.process.pid).children() == before


def test_one_that_is_told_to_end_leaves_no_answer(tmp_path: Path, own_run_folder: Path) -> None:
    """While what it has written is being tried."""
    asked = command(tmp_path, "--model-path", "demo-voice", "--replicas", "2")
    process = subprocess.Popen(asked, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, cwd=ROOT)
    assert process.stderr is not None
    while "starting the configuration" not in (line := process.stderr.readline()):
        assert line, "it ended before that"
    process.terminate()
    rest = process.stderr.read()
    assert process.wait(60) == 143 and "Traceback" not in rest, rest
    written = (tmp_path / "advised.yaml").read_text()
    assert written.startswith("# not tried: the trial did not come to its end\n")
    assert not list(own_run_folder.glob("sgl-omni/run-*")), "its server has ended"


def test_what_cannot_be_advised_about_is_refused(tmp_path: Path) -> None:
    replicas = ["--processes.tts_engine.num_replicas", "2", "--processes.tts_engine.replica_devices", "0,0"]
    done, _ = advise(tmp_path, "--model-path", "demo-voice", *replicas)
    assert done.returncode == 2 and "'tts_engine' has replicas or ranks; advice starts from one" in done.stderr
    done, _ = advise(tmp_path, "--config", "examples/echo_pipeline/pipeline.yaml")
    assert done.returncode == 2 and "pipelines of one engine stage; this one has 0" in done.stderr
    done, _ = advise(tmp_path)
    assert done.returncode == 2 and "give --config FILE or --model-path MODEL" in done.stderr
