"""`sgl-omni bench` as a user runs it: real servers, real clients, figures that fit together."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from servers import ROOT, Server, serving

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving("--model-path", "demo-voice", run_folder=tmp_path_factory.mktemp("run")) as found:
        yield found


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sgl_omni.cli.main", "bench", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert not psutil.Process().children() or all(
        "bench" not in " ".join(c.cmdline()) for c in psutil.Process().children()
    )
    return done


def test_speech_in_closed_loop(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    fast = ("--warmup", "0.5", "--seconds", "3", "--mix", "1/1/0")
    done = bench("speech", "--url", server.url, "--url", server.url, "--concurrency", "1,3", *fast, "--out", str(out))
    assert done.returncode == 0, done.stderr
    levels = json.loads(out.read_text())["levels"]
    assert [level["concurrency"] for level in levels] == [1, 3]
    for level in levels:
        assert level["errors"] == 0 and level["requests"] >= 1
        assert 0 < level["ttfa"]["p50"] < level["latency"]["p50"] <= level["latency"]["max"]
        rates = [each["requests_per_s"] for each in level["per_replica"]]
        assert len(rates) == 2 and sum(rates) == pytest.approx(level["requests_per_s"], abs=0.01)
        assert level["audio_s_per_s"] > level["requests_per_s"], "no text of this set is shorter than a second"
    running = [level["saturation"][0]["running"]["mean"] for level in levels]
    assert 0 < running[0] <= 2 and running[0] < running[1] <= 6
    assert "2 callers each" not in done.stdout and "| 3 callers each |" in done.stdout


def test_speech_in_open_loop_waits_for_nobody(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    fast = ("--warmup", "0", "--seconds", "3", "--mix", "1/0/0", "--seed", "4")
    assert bench("speech", "--url", server.url, "--rate", "3", *fast, "--out", str(out)).returncode == 0
    from sgl_omni.bench.workload import arrivals

    level = json.loads(out.read_text())["levels"][0]
    assert level["requests"] + level["errors"] == len(arrivals(3, 3, 4))


def test_nobody_there_is_an_error(tmp_path: Path) -> None:
    done = bench("speech", "--url", "http://127.0.0.1:9", "--concurrency", "1", "--warmup", "0", "--seconds", "0.3")
    assert done.returncode == 1 and "no request ended well: nobody listens at" in done.stderr
    assert "Traceback" not in done.stderr
    refused = bench("speech", "--url", "ftp://x", "--concurrency", "1")
    assert refused.returncode == 2 and "http://host:port" in refused.stderr


def test_a_study_reports_every_run_and_leaves_nothing(tmp_path: Path) -> None:
    study = tmp_path / "small.yaml"
    study.write_text(
        """
name: small
repeats: 2
concurrency: 1
warmup: 0.3
seconds: 1.5
workload: {mix: 1/0/0}
configurations:
  single: {serve: [--model-path, demo-voice]}
  routed: {serve: [--model-path, demo-voice], replicas: 2, router: {policy: least_inflight}}
  broken: {serve: [--model-path, nobody/nothing]}
"""
    )
    out = tmp_path / "out"
    done = bench("study", str(study), "--out", str(out))
    assert done.returncode == 0, done.stderr
    found = json.loads((out / "study.json").read_text())
    order = [(run["configuration"], run["repeat"]) for run in found["runs"]]
    assert order == [(name, repeat) for repeat in (0, 1) for name in ("single", "routed", "broken")]
    assert [run["outcome"] for run in found["runs"] if run["configuration"] == "broken"] == ["failed"] * 2
    routed = next(run for run in found["runs"] if run["configuration"] == "routed")
    assert len(routed["figures"]["saturation"]) == 2 and routed["figures"]["requests"] > 0
    assert "2 failed of 2" in (out / "table.md").read_text()
    left = [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]
    assert not left


def ended_after_a_line(ending: signal.Signals, *arguments: str) -> None:
    """A benchmark that is ended once it has told of one measurement."""
    command = [sys.executable, "-m", "sgl_omni.cli.main", "bench", *arguments]
    hears = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore Ctrl-C
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, cwd=ROOT)
    signal.signal(signal.SIGINT, hears)
    assert process.stderr is not None
    assert "requests/s" in process.stderr.readline()
    for _ in range(1 + (ending is signal.SIGTERM)):  # `timeout` sends two
        process.send_signal(ending)
    rest = process.stderr.read()
    assert process.wait(60) == (143 if ending is signal.SIGTERM else 1) and "Traceback" not in rest, rest


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_a_study_that_is_ended_has_reported_every_run(tmp_path: Path, ending: signal.Signals) -> None:
    study, out = tmp_path / "long.yaml", tmp_path / "out"
    study.write_text(
        """
name: long
concurrency: 1
warmup: 0.1
seconds: 1
workload: {mix: 1/0/0}
configurations:
  single: {serve: [--model-path, demo-voice]}
"""
    )
    ended_after_a_line(ending, "study", str(study), "--out", str(out))
    runs = json.loads((out / "study.json").read_text())["runs"]
    assert [(run["outcome"], run["reason"]) for run in runs] == [("nominal", ""), ("failed", "the study was ended")]
    assert "1 failed of 2" in (out / "table.md").read_text()


def test_a_sweep_that_is_ended_has_kept_its_levels(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    fast = ("--warmup", "0.1", "--seconds", "1", "--mix", "1/0/0")
    ended_after_a_line(signal.SIGINT, "speech", "--url", server.url, "--concurrency", "1,2", *fast, "--out", str(out))
    assert [level["concurrency"] for level in json.loads(out.read_text())["levels"]] == [1]
