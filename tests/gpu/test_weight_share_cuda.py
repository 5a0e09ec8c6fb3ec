"""Weights shared on a GPU: what attaches, what a write does, what outlives whom, and what memory it takes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from servers import ROOT, Server, serving

pytestmark = pytest.mark.gpu

sys.path.insert(0, str(ROOT / "benchmarks"))

TENSORS = 16
MIB = 2**20
SLACK = 64 * MIB
"""What a driver may take beside what it is asked for."""


@pytest.fixture(scope="module")
def checkpoint() -> Iterator[Path]:
    """2 GiB, of which 128 MiB are private."""
    from weight_group import make_checkpoint

    with tempfile.TemporaryDirectory(prefix="omni-") as folder:
        yield make_checkpoint(Path(folder), TENSORS)


def free_memory() -> int:
    """Of GPU 0, as another process sees it, so that this one needs no context."""
    code = "import torch; print(torch.cuda.mem_get_info(0)[0])"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


async def total(member: Any) -> int:
    found: int = (await member.ask("sum"))["sum"]
    return found


@pytest.mark.parametrize("backend", ["vmm", "ipc"])
async def test_followers_see_the_leaders_weights_and_take_no_memory_for_them(checkpoint: Path, backend: str) -> None:
    from weight_group import TENSOR_BYTES, group

    before = free_memory()
    async with group(checkpoint, "cuda:0", backend) as found:
        leader = await found.start("leader")
        followers = [await found.start("follower") for _ in range(2)]
        assert (leader.facts["backend"], leader.facts["attached"]) == (backend, False)
        assert [f.facts["attached"] for f in followers] == [True, True]
        assert leader.facts["device_bytes"] >= TENSORS * TENSOR_BYTES
        for follower in followers:  # its copy of the private tensor is all that it has of its own
            assert TENSOR_BYTES <= follower.facts["device_bytes"] < TENSOR_BYTES + SLACK
        assert len({await total(member) for member in (leader, *followers)}) == 1
    assert abs(free_memory() - before) < SLACK, "GPU memory was left behind"


async def test_a_followers_write_faults_and_changes_nothing(checkpoint: Path) -> None:
    from weight_group import group

    async with group(checkpoint, "cuda:0", "vmm") as found:
        leader = await found.start("leader")
        content = await total(leader)
        follower = await found.start("follower")
        answer = await follower.ask("write")
        assert answer.get("write") == "faulted", answer
        assert await total(leader) == content
        assert await total(await found.start("follower")) == content


async def test_a_leader_cannot_write_either(checkpoint: Path) -> None:
    from weight_group import group

    async with group(checkpoint, "cuda:0", "vmm") as found:
        leader = await found.start("leader")
        follower = await found.start("follower")
        content = await total(follower)
        answer = await leader.ask("write")
        assert answer.get("write") == "faulted", answer
        assert await total(follower) == content


async def test_weights_outlive_the_leader_and_everyone_else(checkpoint: Path) -> None:
    """First a follower keeps them, then nothing but the descriptor of a process that has no GPU context."""
    from weight_group import group

    async with group(checkpoint, "cuda:0", "vmm") as found:
        leader = await found.start("leader")
        follower = await found.start("follower")
        content = await total(leader)
        await leader.end(kill=True)
        assert await total(follower) == content
        again = await found.start("leader")
        assert again.facts["attached"] is True and again.facts["load_seconds"] == 0
        assert await total(again) == content
        await again.end(kill=True)
        await follower.end(kill=True)
        alone = await found.start("leader")
        assert alone.facts["attached"] is True and await total(alone) == content


def test_the_driver_says_whether_it_can() -> None:
    from sgl_omni.gpu.weights.share import best_backend
    from sgl_omni.gpu.weights.vmm import VmmBackend

    device = torch.device("cuda:0")
    assert best_backend(device).name == ("vmm" if VmmBackend.refusal(device) is None else "ipc")


# The demo voice ------------------------------------------------------------------------------------------------------

DEMO = ("--config", str(ROOT / "examples/configs/demo_voice_replicas.yaml"), "--platform", "cuda")
SHARE = ("--weight-share", "on", "--tts_engine.engine.max_total_tokens", "9000", "--on_process_exit", "restart")
ENGINES = ("tts_engine@r0", "tts_engine@r1")


def speak(server: Server) -> bytes:
    request = {"model": "demo-voice", "input": "The old bridge was closed for repairs.", "response_format": "pcm"}
    response = httpx.post(f"{server.url}/v1/audio/speech", json=request, timeout=120)
    assert response.status_code == 200, response.text
    return response.content


def shared(server: Server, name: str) -> dict[str, Any]:
    weights: Any = server.instance(name)["weights"]
    found: dict[str, Any] = weights["models"]["tts_engine"]
    return found


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def unshared() -> bytes:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU and a torch built for CUDA")
    with serving(*DEMO, run_folder=Path(tempfile.mkdtemp(prefix="omni-"))) as server:
        found = speak(server)
        assert all(speak(server) == found for _ in range(3))
        return found


@pytest.mark.parametrize("mps", ["off", "on"])
def test_the_demo_voice_speaks_the_same_from_shared_weights(tmp_path: Path, unshared: bytes, mps: str) -> None:
    folder = Path(tempfile.mkdtemp(prefix="omni-"))
    before = free_memory()
    with serving(*DEMO, *SHARE, "--mps", mps, run_folder=folder) as server:
        assert [shared(server, name)["attached"] for name in ENGINES] == [False, True]
        assert all(speak(server) == unshared for _ in range(4))
        for victim in ENGINES:
            old = server.pid(victim)
            os.kill(old, signal.SIGKILL)
            until(lambda name=victim: server.instance(name)["state"] != "ready")  # type: ignore[misc]
            assert speak(server) == unshared
            until(lambda name=victim: server.instance(name)["state"] == "ready")  # type: ignore[misc]
            assert server.pid(victim) != old and shared(server, victim)["attached"] is True
        assert all(speak(server) == unshared for _ in range(4))
    assert abs(free_memory() - before) < SLACK, "GPU memory was left behind"
