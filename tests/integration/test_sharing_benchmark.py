"""The benchmark of sharing, rehearsed with a small model on the CPU platform, and how benchmarks end when told to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]
SMALL = ("--replicas", "2", "--kill", "", "--load-seconds", "0.2", "--frames", "4")

pytestmark = [pytest.mark.alone, pytest.mark.slow]


def begin(module: str, *arguments: str, folder: Path | None = None, **options: Any) -> subprocess.Popen[str]:
    """``folder``: where it makes its temporary ones."""
    command = [sys.executable, "-m", module, *arguments]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"} | ({"TMPDIR": str(folder)} if folder else {})
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, **options)


def test_cycles_compare_outputs_memory_and_what_is_left(tmp_path: Path) -> None:
    out = tmp_path / "runs.jsonl"
    process = begin("benchmarks.sharing", *SMALL, "--cycles", "1", "--out", str(out))
    said, _ = process.communicate(timeout=240)
    found = json.loads(said)
    runs = [*found["unshared"], *found["cycles"]]
    assert [json.loads(line) for line in out.read_text().splitlines()] == runs
    assert [(run["replicas"], run["share"]) for run in runs] == [(1, False), (2, False), (2, True)]
    assert all(run["good"] for run in runs) and found["good_cycles"] == 1
    assert len({tuple(run["digests"]) for run in runs}) == 1
    (shared,) = found["cycles"]
    attached = [next(iter(w["models"].values()))["attached"] for w in shared["weights"].values()]
    assert attached == [False, True]
    assert shared["left"] == {"processes": [], "run_folders": [], "mps": [], "daemons": [], "card_bytes": 0}
    assert shared["memory"].keys() >= {"follower_bytes", "beyond_bytes"} and set(shared["memory"].values()) == {None}


def test_the_benchmark_of_weights_sees_the_same_in_every_process(tmp_path: Path) -> None:
    small = ("--gib", "0.25", "--device", "cpu", "--backend", "shm", "--repeat", "1", "--followers", "1")
    command = [sys.executable, "benchmarks/weight_share.py", *small, "--folder", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180, check=True)
    found = json.loads(done.stdout)
    (run,) = found["runs"]  # a run in which the sums differ ends with an error
    assert found["bytes"] == 2**28 and not run["leader"]["attached"] and run["followers"][0]["attached"]
    assert run["follower_writes"] == {"died": -signal.SIGSEGV} and run["afterwards"] == {"same_sum": True}
    for again in (run["leader_again"], run["from_the_descriptor_alone"]):
        assert again["attached"] and again["same_sum"]
    assert found["load_to_page_cache"][0] > 0
    said = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    assert said[-1].pop("took_seconds") > 0 and said[-1] == run
    assert not list(tmp_path.iterdir())


def descendants(process: subprocess.Popen[str], count: int) -> list[psutil.Process]:
    """Once there are so many."""
    end = time.monotonic() + 120
    while len(found := psutil.Process(process.pid).children(recursive=True)) < count:
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    return found


@pytest.mark.parametrize("when", ["starting", "loaded"])
def test_a_benchmark_that_is_told_to_end_ends_its_pipeline(when: str) -> None:
    arguments = (*SMALL, "--cycles", "9", "--load-seconds", "60")
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as name:  # short, as paths of sockets must be
        folder = Path(name)
        process = begin(
            "benchmarks.sharing", *arguments, folder=folder, stderr=subprocess.DEVNULL, start_new_session=True
        )
        family = descendants(process, 3)
        if when == "loaded":
            wait_ready(folder)
            family = descendants(process, 3)
        end_group(process)
        assert process.returncode == 128 + signal.SIGTERM
        assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        assert not list(folder.glob("omni-*")), "its run folder is still there"


def end_group(process: subprocess.Popen[str]) -> None:
    """As `timeout` does it: the program, then its process group."""
    process.send_signal(signal.SIGTERM)
    os.killpg(process.pid, signal.SIGTERM)
    process.communicate(timeout=60)


def wait_ready(folder: Path) -> None:
    """Until all three instances of the pipeline listen."""
    end = time.monotonic() + 120
    while len(list(folder.glob("omni-*/sgl-omni/run-*/[0-9].sock"))) < 3:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_server_of_a_benchmark_ends_with_it(tmp_path: Path) -> None:
    arguments = ("--tiny", "--family", "qwen3_tts", "--folder", str(tmp_path), "--seconds", "60", "--times", "1")
    process = begin("benchmarks.smoke", *arguments, stderr=subprocess.PIPE)
    family: list[psutil.Process] = []
    end = time.monotonic() + 120
    while not any("sgl_omni.runtime.worker" in p.cmdline() for p in family):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.1)
        family = [p for p in psutil.Process(process.pid).children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=90)
    assert process.returncode == 128 + signal.SIGTERM
    assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert not list(tmp_path.iterdir()), "the model's folder is still there"
