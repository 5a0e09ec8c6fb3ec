"""MPS with the real control program: the demo voice's processes overlap on one GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import pytest

from servers import Server, serving

pytestmark = pytest.mark.gpu

MPS = ("--model-path", "demo-voice", "--platform", "cuda", "--mps", "on")
REQUEST = {"model": "demo-voice", "input": "The old bridge was closed for repairs.", "response_format": "wav"}


def speaks(server: Server) -> bool:
    request = {**REQUEST, "stream": False}
    return httpx.post(f"{server.url}/v1/audio/speech", json=request, timeout=60).status_code == 200


def state(folder: Path) -> str:
    command = [sys.executable, "-m", "sgl_omni.cli.main", "mps", "status"]
    environment = os.environ | {"XDG_RUNTIME_DIR": str(folder)}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


@pytest.fixture
def folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="omni-"))


def test_processes_attach_and_the_daemon_ends_with_the_server(folder: Path) -> None:
    with serving(*MPS, run_folder=folder) as server:
        (record,) = folder.glob("sgl-omni/run-*/mps_attach.json")
        ((uuid, servers),) = json.loads(record.read_text()).items()
        (clients,) = servers.values()
        assert clients == {str(server.pid(n)): n for n in ("tts_engine", "vocoder")}
        assert f"{uuid}: running" in state(folder)
        assert speaks(server)
    assert state(folder) == "no server of this user uses MPS\n"
    assert not list(folder.glob("sgl-omni/mps/GPU-*/"))


def test_the_death_of_the_mps_server_is_told_and_ends_the_pipeline(folder: Path) -> None:
    with serving(*MPS, run_folder=folder) as server:
        (record,) = folder.glob("sgl-omni/run-*/mps_attach.json")
        (servers,) = json.loads(record.read_text()).values()
        os.kill(int(next(iter(servers))), signal.SIGKILL)
        assert server.wait(20) == 1
        assert "because its MPS server" in server.log
    assert state(folder) == "no server of this user uses MPS\n"


def test_a_killed_server_leaves_a_daemon_that_the_next_start_replaces(folder: Path) -> None:
    with serving(*MPS, run_folder=folder) as server:
        server.process.kill()
        server.process.wait()
        time.sleep(1)
    assert "owners: none" in state(folder)
    with serving(*MPS, run_folder=folder) as following:
        assert speaks(following)
    assert state(folder) == "no server of this user uses MPS\n"


def test_two_servers_share_one_daemon(folder: Path) -> None:
    with serving(*MPS, run_folder=folder) as first, serving(*MPS, run_folder=folder) as second:
        assert state(folder).count("running") == 1
        first.process.send_signal(signal.SIGTERM)
        assert first.wait(40) == 0
        assert speaks(second)
    assert state(folder) == "no server of this user uses MPS\n"
