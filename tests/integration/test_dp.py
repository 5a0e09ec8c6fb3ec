"""`sgl-omni dp` through real processes: servers of the demo voice on the CPU platform, and MPS by its stand-in."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from dp_stand_in import UUID
from running import HERE
from servers import fetch, serving
from test_weight_share import mapped

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples/mps_dp/configs/demo_cpu_dp2.yaml"
SCRIPT = ROOT / "examples/mps_dp/launch.sh"
CORES = [str(cpu) for cpu in sorted(os.sched_getaffinity(0))]

pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="two servers need two cores")


class Shell:
    """A user's shell: `sgl-omni` on the path, a state root, and what was started from it."""

    def __init__(self, root: Path, run_folder: Path) -> None:
        self.root = root
        self.run_folder = run_folder

    def dp(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self._run(sys.executable, "-m", "sgl_omni.cli.main", "dp", *arguments, "--state-root", str(self.root))

    def script(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return self._run("bash", str(SCRIPT), *arguments, STATE_ROOT=str(self.root), **environment)

    def demo_up(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        asked = {"PLATFORM": "cpu", "CONFIG": str(DEMO), "N": "2", "CORE_BLOCKS": " ".join(CORES[:2])} | environment
        return self.script("up", *arguments, **asked)

    def stand_in_up(self, *options: str) -> subprocess.CompletedProcess[str]:
        return self._run(*self.stand_in_command(*options))

    def stand_in_command(self, *options: str) -> list[str]:
        return [sys.executable, f"{HERE}/dp_stand_in.py", "up", str(self.root), "2", *options]

    def begin(self, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)

    def _run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=os.environ | environment
        )

    @property
    def run_id(self) -> str:
        (record,) = self.root.glob("*/run.json")
        return record.parent.name

    @property
    def record(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.root / self.run_id / "run.json").read_text())
        return found

    def servers(self) -> list[psutil.Process]:
        return [psutil.Process(r["server"]["pid"]) for r in self.record["replicas"] if r["server"]]

    def assert_nothing_left(self) -> None:
        end = time.monotonic() + 60
        while (left := below(self.run_folder)) and time.monotonic() < end:
            time.sleep(0.05)
        assert not left
        assert not list(self.run_folder.glob("dp*"))
        assert [p.name for p in (self.run_folder / "sgl-omni/dp").iterdir()] == ["lock"]
        assert not list(self.root.glob("*/run.json"))


def below(run_folder: Path) -> list[psutil.Process]:
    """Processes that were started with this test's run folder, or one in it, and are alive."""
    found = []
    for process in psutil.process_iter():
        try:
            folder, status = process.environ().get("XDG_RUNTIME_DIR", ""), process.status()
        except psutil.Error:
            continue
        if Path(folder).is_relative_to(run_folder) and status != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


@pytest.fixture
def shell(tmp_path: Path, own_run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    """Afterwards nothing may be left of any run."""
    program = tmp_path / "bin/sgl-omni"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m sgl_omni.cli.main "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{HERE}/stand_in:{os.environ['PATH']}")
    shell = Shell(tmp_path / "state", own_run_folder)
    yield shell
    try:
        shell.assert_nothing_left()
    finally:
        for process in below(own_run_folder):
            process.kill()


def until(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.02)


def kill(process: psutil.Process) -> None:
    process.kill()
    until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)


# Servers of the demo voice on the CPU platform -------------------------------------------------------------------


def address(replica: dict[str, Any]) -> str:
    return f"http://127.0.0.1:{replica['port']}"


def speak(url: str) -> bytes:
    asked = {"model": "demo-voice", "input": "Good morning.", "voice": "rms", "response_format": "pcm"}
    answer = httpx.post(f"{url}/v1/audio/speech", json=asked, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.content


@pytest.fixture(scope="module")
def unshared() -> list[bytes]:
    """What servers say that share nothing; filled by the first test that starts some."""
    return []


def test_two_servers_start_speak_on_their_own_cores_and_end(shell: Shell, unshared: list[bytes]) -> None:
    up = shell.demo_up()
    assert up.returncode == 0, up.stderr
    assert f"to end it: sgl-omni dp down {shell.run_id}" in up.stdout
    replicas = shell.record["replicas"]
    for replica, core in zip(replicas, CORES, strict=False):
        speech = speak(address(replica))
        assert len(speech) > 10_000
        unshared.append(speech)
        instances = fetch(f"{address(replica)}/health").json()["instances"]
        assert {w["name"]: w["mark"]["pid"] for w in replica["workers"]} == {i["name"]: i["pid"] for i in instances}
        for pid in (replica["server"]["pid"], *(i["pid"] for i in instances)):
            assert psutil.Process(pid).cpu_affinity() == [int(core)]
    assert len({r["port"] for r in replicas}) == 2
    assert "2 of 2 servers alive" in shell.script("list").stdout
    assert "is as recorded" in shell.script("verify").stdout
    second = shell.demo_up()
    assert second.returncode == 2 and f"already has run '{shell.run_id}'" in second.stderr
    run_id = shell.run_id
    down = shell.script("down", run_id)
    assert down.returncode == 0 and not (shell.root / run_id).exists()
    again = shell.script("down", run_id)
    assert again.returncode == 1 and f"there is no run '{run_id}'" in again.stderr


def test_servers_that_share_weights_outlive_the_first_which_is_named_and_the_run_still_ends(
    shell: Shell, unshared: list[bytes], tmp_path: Path
) -> None:
    if not unshared:
        with serving("--config", str(DEMO), "--platform", "cpu", run_folder=tmp_path / "alone") as server:
            unshared.append(speak(server.url))
    up = shell.demo_up("--parallel-start", "--on_process_exit", "restart", WEIGHT_SHARE="1")
    assert up.returncode == 0, up.stderr
    assert re.search(r"weights of tts_engine: \d+ MiB for all servers, loaded by replica 0 \(shm\)", up.stdout)
    urls = [address(replica) for replica in shell.record["replicas"]]
    engines = [engine(url) for url in urls]
    assert [e["weights"]["role"] for e in engines] == ["leader", "borrower"]
    assert [e["weights"]["models"]["tts_engine"]["attached"] for e in engines] == [False, True]
    assert [e["kv_capacity_tokens"] for e in engines] == [{"tts_engine": 9936}] * 2
    assert {speak(url) for url in urls} == set(unshared)
    size = shell.record["weights"]["tts_engine"]["bytes"]
    assert size > 30e6 and sum(mapped(e["pid"])["Pss"] for e in engines) < 1.01 * size, "the weights are there twice"
    assert "is as recorded" in shell.dp("verify").stdout and "weights shared" in shell.dp("list").stdout

    kill(shell.servers()[0])
    assert speak(urls[1]) in unshared
    verify = shell.dp("verify")
    assert verify.returncode == 1 and re.search(r"replica 0 \(port \d+\): its server, pid \d+, is gone", verify.stderr)
    assert "1 of 2 servers alive" in shell.dp("list").stdout
    os.kill(engines[1]["pid"], signal.SIGKILL)
    until(lambda: engine(urls[1])["restarts"] == 1 and engine(urls[1])["state"] == "ready", 60)
    assert engine(urls[1])["weights"]["models"]["tts_engine"]["attached"] and speak(urls[1]) in unshared
    assert shell.dp("down", shell.run_id).returncode == 0


def engine(url: str) -> dict[str, Any]:
    """The engine's instance as /health tells of it."""
    found: dict[str, Any] = next(i for i in fetch(f"{url}/health").json()["instances"] if i["name"] == "tts_engine")
    return found


def test_of_a_killed_launcher_the_half_started_run_is_refused_and_ended(shell: Shell) -> None:
    launcher = shell.begin(*demo_command(shell))
    until(lambda: list(shell.root.glob("*/run.json")) and all(r["server"] for r in shell.record["replicas"]))
    launcher.kill()
    launcher.wait()
    assert "half started" in shell.dp("list").stdout
    assert "already has run" in shell.demo_up().stderr
    assert shell.dp("down", shell.run_id).returncode == 0


def test_an_interrupted_start_is_undone_and_a_running_one_is_not_ended_by_another(shell: Shell) -> None:
    launcher = shell.begin(*demo_command(shell))
    until(lambda: list(shell.root.glob("*/run.json")) and shell.servers())
    down = shell.dp("down", shell.run_id)
    assert down.returncode == 1 and "is being started" in down.stderr
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(60) == 1


def demo_command(shell: Shell) -> list[str]:
    options = ["--config", str(DEMO), "--replicas", "2", "--platform", "cpu", "--state-root", str(shell.root)]
    return [sys.executable, "-m", "sgl_omni.cli.main", "dp", "up", *options]


def test_a_capacity_that_pages_round_down_fails_the_start_and_says_what_to_set(shell: Shell) -> None:
    up = shell.demo_up(MAX_TOTAL_TOKENS="10000")
    assert up.returncode == 1
    assert "replica 0" in up.stderr and "resolved 9936 tokens" in up.stderr and "set 9936" in up.stderr
    (log,) = shell.root.glob("*/replica-0.log")
    listed = shell.dp("list").stdout
    assert f"{log.parent.name}  failed to start, nothing of it runs; logs: {log.parent}/replica-*.log" in listed
    assert "are removed" in shell.dp("down", log.parent.name).stdout
    assert not log.parent.exists() and shell.dp("list").stdout == f"no runs in {shell.root}\n"


def test_what_is_wrong_is_refused_before_anything_starts(shell: Shell) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        refusals = {
            "not both": {"MODEL": "demo-voice"},
            f"busy: {port}": {"BASE_PORT": port},
            "1 block for 2 replicas": {"CORE_BLOCKS": CORES[0]},
            "core blocks 0 and 1 overlap": {"CORE_BLOCKS": f"{CORES[0]} {CORES[0]}"},
            "this machine has no core 4095": {"CORE_BLOCKS": f"{CORES[0]} 4095"},
            "there is no NUMA node 77": {"NUMA_NODE": "77"},
            "no GPU 0": {"PLATFORM": "cuda"},
            "pins no max_total_tokens": {"CONFIG": "", "MODEL": "demo-voice"},
            "'tts_engine' pins no KV capacity": {"CONFIG": "", "MODEL": "demo-voice", "WEIGHT_SHARE": "1"},
            "declare at most 0.5": {"MF": ""},
        }
        for message, changed in refusals.items():
            extra = ["--tts_engine.gpu_memory_fraction", "0.4"] if "declare" in message else []
            up = shell.demo_up(*extra, **changed)
            assert up.returncode == 2 and message in up.stderr, up.stderr
    neither = shell.script("up", N="2")
    assert neither.returncode == 2 and "give one of CONFIG (--config) and MODEL" in neither.stderr
    assert not shell.root.exists()
    (shell.run_folder / "sgl-omni/dp").mkdir(parents=True)
    (shell.run_folder / "sgl-omni/dp/lock").touch()


# Through MPS, by the stand-in ------------------------------------------------------------------------------------


def test_every_process_is_proved_to_be_a_client_and_the_daemon_ends_with_the_run(shell: Shell) -> None:
    up = shell.stand_in_up()
    assert up.returncode == 0, up.stdout + up.stderr
    lines = [line.split() for line in (shell.root / shell.run_id / "mps_attach.txt").read_text().splitlines()]
    workers = {w["mark"]["pid"] for r in shell.record["replicas"] for w in r["workers"]}
    assert {int(client) for _, client, *_ in lines} == workers and len(workers) == 2
    assert [" ".join(name) for _, _, *name in lines] == ["replica 0 talker", "replica 1 talker"]
    assert psutil.Process(int(lines[0][0])).cmdline()[0] == "nvidia-cuda-mps-server"
    assert "attached to MPS" in shell.dp("verify").stdout
    assert shell.dp("down", shell.run_id).returncode == 0


@pytest.mark.parametrize("cycle", range(2))
def test_cycles_leave_nothing(shell: Shell, cycle: int) -> None:
    up = shell.stand_in_up(*(["--parallel"] if cycle % 2 else []))
    assert up.returncode == 0, up.stdout + up.stderr
    assert shell.dp("down", shell.run_id).returncode == 0


def test_a_process_that_does_not_attach_fails_the_start_by_name(shell: Shell) -> None:
    up = shell.stand_in_up("--detached", "1")
    assert up.returncode == 1
    assert "replica 1 ended with status 1" in up.stderr and "not attached to MPS: 'talker'" in up.stderr


def test_a_server_killed_while_another_starts_ends_the_start_by_name(shell: Shell) -> None:
    launcher = shell.begin(*shell.stand_in_command())
    until(lambda: list(shell.root.glob("*/run.json")) and len(shell.servers()) == 2)
    shell.servers()[0].kill()
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 1 and "replica 0 ended with status -9 during the start; the end of" in output


def test_killed_servers_leave_a_daemon_that_down_ends(shell: Shell) -> None:
    assert shell.stand_in_up().returncode == 0
    for server in shell.servers():
        kill(server)
    assert "stale" in shell.dp("list").stdout
    refused = shell.stand_in_up()
    assert refused.returncode != 0 and "has the stale run" in refused.stderr
    assert shell.dp("down", shell.run_id).returncode == 0


def test_a_launcher_killed_in_the_middle_leaves_a_run_that_down_ends(shell: Shell) -> None:
    launcher = shell.begin(*shell.stand_in_command("--parallel"))
    until(lambda: list(shell.root.glob("*/run.json")) and shell.servers())
    launcher.kill()
    launcher.wait()
    assert shell.dp("down", shell.run_id).returncode == 0


def test_while_a_stranger_is_attached_the_state_is_kept_and_the_commands_are_told(shell: Shell) -> None:
    assert shell.stand_in_up().returncode == 0
    pipe = Path(shell.record["runtime"]) / f"sgl-omni/mps/{UUID}/pipe"
    with subprocess.Popen(["sleep", "60"]) as stranger:
        subprocess.run(
            ["nvidia-cuda-mps-control"],
            input=f"attach {stranger.pid}\n",
            text=True,
            check=True,
            env=os.environ | {"CUDA_MPS_PIPE_DIRECTORY": str(pipe)},
        )
        run_id = shell.run_id
        down = shell.dp("down", run_id)
        assert down.returncode == 1 and f"processes [{stranger.pid}] are still attached" in down.stderr
        assert f"CUDA_MPS_PIPE_DIRECTORY={pipe} nvidia-cuda-mps-control" in down.stderr
        assert f"then: sgl-omni dp down {run_id}" in down.stderr and stranger.poll() is None
        stranger.kill()
    assert shell.dp("down", run_id).returncode == 0


def test_a_process_that_has_a_recorded_pid_now_is_left_alone(shell: Shell) -> None:
    assert shell.stand_in_up().returncode == 0
    (first, second), record = shell.servers(), shell.record
    kill(first)
    with subprocess.Popen(["sleep", "60"]) as stranger:
        record["replicas"][0]["server"]["pid"] = stranger.pid
        (shell.root / record["id"] / "run.json").write_text(json.dumps(record))
        assert shell.dp("down", record["id"]).returncode == 0
        assert stranger.poll() is None
        assert not second.is_running() or second.status() == psutil.STATUS_ZOMBIE
        stranger.kill()
