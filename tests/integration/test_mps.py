"""MPS life-cycle through real processes and a stand-in for the control program."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from plans import plan_of, stage
from running import HERE, Start, children, eventually
from sgl_omni.errors import ProcessExited
from sgl_omni.gpu.devices import GpuFacts
from sgl_omni.gpu.mps import (
    MpsControl,
    MpsDaemon,
    MpsError,
    clean,
    foreign_servers,
    live_owners,
    status,
)
from sgl_omni.runtime.mps_guard import MpsGuard
from sgl_omni.topology.plan import Plan
from stages import MPS_LIMITS

UUID = "GPU-aeba05c4-8610-6a4f-ea69-3f4479a5f33f"


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch, own_run_folder: Path) -> Iterator[Path]:
    """Puts the stand-in on the path; afterwards no daemon of the test may be left."""
    monkeypatch.setenv("PATH", f"{HERE}/stand_in:{os.environ['PATH']}")
    root = own_run_folder / "sgl-omni/mps"
    yield root
    left = [pid for pid in daemons(own_run_folder) if is_alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "an MPS daemon outlived its owners"


def daemons(folder: Path) -> list[int]:
    """Pids of the daemons whose state lies below a folder."""
    return [int(p.read_text()) for p in folder.glob("**/pipe/nvidia-cuda-mps-control.pid")]


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def facts(ordinal: int) -> GpuFacts:
    return GpuFacts(UUID if ordinal == 0 else f"GPU-{ordinal}", ())


def mps_plan(*, attach: bool = True, gpus: int = 1, **fields: Any) -> Plan:
    """Two clients on each GPU, each a process of its own, in a chain."""
    names = [f"s{i}" for i in range(2 * gpus)]
    stages = [
        stage(
            name,
            "mps_client",
            next=names[i + 1 : i + 2],
            terminal=i + 1 == len(names),
            gpu=True,
            factory_args={"attach": attach or i == 0},
        )
        for i, name in enumerate(names)
    ]
    plan = plan_of(*stages, **fields)
    instances = tuple(
        dataclasses.replace(instance, device=i // 2, mps=True) for i, instance in enumerate(plan.instances)
    )
    mps = {gpu: tuple(names[2 * gpu : 2 * gpu + 2]) for gpu in range(gpus)}
    return dataclasses.replace(plan, instances=instances, mps=mps)


async def test_clients_attach_are_recorded_and_the_last_owner_ends_the_daemon(start: Start, stand_in: Path) -> None:
    pipeline = await start(mps_plan(), facts=facts)
    result = await pipeline.submit({}).result()
    assert result["s1"]["visible"] == UUID
    run = next((stand_in.parent).glob("run-*"))
    (servers,) = json.loads((run / "mps_attach.json").read_text()).values()
    (clients,) = servers.values()
    assert clients == {str(i["pid"]): i["name"] for i in pipeline.health()["instances"]}
    (found,) = status(stand_in)
    assert (found.uuid, found.running, found.owners) == (UUID, True, (run.name,))
    daemon = daemons(stand_in)[0]
    await pipeline.stop(drain_timeout=0)
    await eventually(lambda: not is_alive(daemon))
    assert not (stand_in / UUID).exists()


async def test_each_client_gets_the_limits_that_the_plan_gives_it(start: Start) -> None:
    plan = mps_plan()
    first, second = plan.instances
    first = dataclasses.replace(first, mps_thread_percentage=30, mps_memory_limit=3 * 2**30)
    pipeline = await start(dataclasses.replace(plan, instances=(first, second)), facts=facts)
    result = (await pipeline.submit({}).result())["s1"]
    assert [result[key] for key in MPS_LIMITS] == [None, None]
    shown = {i["name"]: environment(i["pid"]) for i in pipeline.health()["instances"]}
    assert [shown["s0"].get(key) for key in MPS_LIMITS] == ["30", "0=3072M"]


def environment(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


async def test_a_second_server_joins_and_the_first_leaves_it_running(start: Start, stand_in: Path) -> None:
    first = await start(mps_plan(), facts=facts)
    second = await start(mps_plan(), facts=facts)
    assert len(daemons(stand_in)) == 1 and len(live_owners(stand_in / UUID)) == 2
    await first.stop(drain_timeout=0)
    assert len(live_owners(stand_in / UUID)) == 1
    assert await second.submit({}).result()
    await second.stop(drain_timeout=0)
    assert not daemons(stand_in)


async def test_a_process_that_does_not_attach_fails_the_start_by_name(start: Start, stand_in: Path) -> None:
    with pytest.raises(MpsError, match=r"not attached to MPS: 's1' \(pid \d+\)$"):
        await start(mps_plan(attach=False), facts=facts)
    assert not daemons(stand_in)


async def test_a_dead_mps_server_is_the_death_of_its_clients(start: Start, stand_in: Path) -> None:
    pipeline = await start(mps_plan(), facts=facts)
    handle = pipeline.submit({"seconds": 30})
    await asyncio.sleep(0.1)
    (server,) = MpsControl(stand_in / UUID).servers()
    os.kill(server.pid, signal.SIGKILL)
    with pytest.raises(ProcessExited, match=rf"because its MPS server \(pid {server.pid}\) died"):
        await handle.result()
    assert "MPS server" in await asyncio.wait_for(pipeline.failed(), 2)


async def test_with_restart_the_clients_come_back_on_a_new_server(start: Start, stand_in: Path) -> None:
    pipeline = await start(mps_plan(on_process_exit="restart"), facts=facts)
    before = {i["name"]: i["pid"] for i in pipeline.health()["instances"]}
    (server,) = MpsControl(stand_in / UUID).servers()
    os.kill(server.pid, signal.SIGKILL)
    await eventually(lambda: pipeline.status == "unavailable")
    await eventually(lambda: pipeline.status == "ready")
    after = {i["name"]: i["pid"] for i in pipeline.health()["instances"]}
    assert not set(before.values()) & set(after.values())
    assert MpsControl(stand_in / UUID).clients() == set(after.values())
    assert await pipeline.submit({}).result()


async def test_a_start_that_is_cancelled_while_it_joins_leaves_no_daemon(stand_in: Path, tmp_path: Path) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def slow(ordinal: int) -> GpuFacts:
        asked.set()
        go_on.wait()
        return facts(ordinal)

    guard = MpsGuard(mps_plan(), stand_in, tmp_path, slow, lambda server, clients: None)
    starting = asyncio.create_task(guard.acquire())
    await asyncio.to_thread(asked.wait)
    starting.cancel()
    asyncio.get_running_loop().call_later(0.2, go_on.set)
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not daemons(stand_in) and status(stand_in) == []


async def test_the_release_comes_after_a_verification_that_nobody_waits_for(
    stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sgl_omni.gpu.mps.ATTACH_SECONDS", 300)
    guard = MpsGuard(mps_plan(), stand_in, tmp_path, facts, lambda server, clients: None)
    before = children()
    await guard.acquire()
    verifying = asyncio.create_task(guard.verify({"s0": os.getpid()}))  # never attached
    await asyncio.sleep(0.3)
    verifying.cancel()
    await asyncio.wait_for(guard.release(), 60)
    assert children() <= before and not daemons(stand_in)


async def test_a_failure_on_the_second_gpu_gives_the_first_back(start: Start, stand_in: Path) -> None:
    def second_is_foreign(ordinal: int) -> GpuFacts:
        return GpuFacts(f"GPU-{ordinal}", (foreign.pid,) if ordinal == 1 else ())

    foreign = subprocess.Popen(["nvidia-cuda-mps-server", "30"], executable="/bin/sleep")  # another daemon's
    try:
        with pytest.raises(MpsError, match=rf"GPU GPU-1: another MPS daemon serves it \(server pid {foreign.pid}\)"):
            await start(mps_plan(gpus=2), facts=second_is_foreign)
        assert foreign.poll() is None, "nothing ever touches a process of others"
    finally:
        foreign.kill()
        foreign.wait()
    assert not daemons(stand_in)


async def test_two_gpus_have_daemons_of_their_own(start: Start, stand_in: Path) -> None:
    pipeline = await start(mps_plan(gpus=2), facts=facts)
    assert {s.uuid for s in status(stand_in)} == {UUID, "GPU-1"}
    assert len(set(daemons(stand_in))) == 2
    assert await pipeline.submit({}).result()


SERVER = f"""
import asyncio, sys
sys.path.insert(0, {HERE!r})
from test_mps import mps_plan, facts
from sgl_omni.runtime.pipeline import Pipeline

async def main():
    async with Pipeline(mps_plan(), facts=facts) as pipeline:
        print("ready", flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


def kill_a_server() -> None:
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None and server.stdout.readline() == "ready\n"
    server.kill()
    server.wait()


async def test_after_a_killed_server_the_next_start_works_untouched(start: Start, stand_in: Path) -> None:
    kill_a_server()
    (left,) = status(stand_in)
    assert left.running and not left.owners
    pipeline = await start(mps_plan(), facts=facts)
    assert await pipeline.submit({}).result()
    await pipeline.stop(drain_timeout=0)
    assert not daemons(stand_in)


async def test_a_start_without_mps_cleans_up_too(start: Start, stand_in: Path) -> None:
    kill_a_server()
    await start(plan_of(stage("a", "tag", terminal=True)))
    assert not daemons(stand_in) and status(stand_in) == []


async def test_a_killed_daemon_is_replaced_at_the_next_start(start: Start, stand_in: Path) -> None:
    kill_a_server()
    os.kill(daemons(stand_in)[0], signal.SIGKILL)
    assert not status(stand_in)[0].running
    pipeline = await start(mps_plan(), facts=facts)
    assert await pipeline.submit({}).result()


def test_clean_leaves_what_is_in_use(stand_in: Path) -> None:
    daemon = MpsDaemon(stand_in, UUID, "run-x")
    daemon.acquire([])
    assert list(clean(stand_in)) == [(UUID, "in use by run-x")]
    assert daemon.release() is None
    assert list(clean(stand_in)) == []


def test_a_client_that_stays_keeps_the_daemon_and_the_way_out_is_told(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sgl_omni.gpu.mps.DETACH_SECONDS", 0.2)
    daemon = MpsDaemon(stand_in, UUID, "run-x")
    daemon.acquire([])
    client = subprocess.Popen(["sleep", "30"])
    daemon.control._ask(f"attach {client.pid}")
    told = daemon.release()
    assert told is not None and f"clients [{client.pid}]" in told and "echo quit | CUDA_MPS_PIPE_DIRECTORY=" in told
    with pytest.raises(MpsError, match=r"still attached to its MPS daemon.*sgl-omni mps clean"):
        MpsDaemon(stand_in, UUID, "run-y").acquire([])
    assert list(clean(stand_in)) == [(UUID, f"left alone: processes [{client.pid}] are still attached")]
    client.kill()
    client.wait()
    assert list(clean(stand_in)) == [(UUID, "removed")]


def test_the_daemon_is_gone_when_its_last_owner_has_released_it(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers no more long before its process ends."""
    daemon = MpsDaemon(stand_in, UUID, "run-x")
    daemon.acquire([])
    client = subprocess.Popen(["sleep", "30"])
    daemon.control._ask(f"attach {client.pid}")
    client.kill()
    client.wait()
    processes = [*daemons(stand_in), *(server.pid for server in daemon.control.servers())]
    assert len(processes) == 2 and all(map(is_alive, processes))
    daemon.control._ask("linger 0.7")
    assert daemon.release() is None
    assert not any(map(is_alive, processes)) and not (stand_in / UUID).exists()

    monkeypatch.setattr("sgl_omni.gpu.mps.QUIT_SECONDS", 0.3)
    daemon.acquire([])
    (pid,) = daemons(stand_in)
    daemon.control._ask("linger 300")
    assert f"has quit, but its processes [{pid}] do not end" in str(daemon.release())
    os.kill(pid, signal.SIGKILL)


def test_a_daemon_set_in_the_environment_is_not_ours(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    with pytest.raises(MpsError, match="unset it, or set mps: off"):
        MpsDaemon(stand_in, UUID, "run-x").acquire([])


def test_a_missing_program_and_a_hanging_one(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = MpsDaemon(stand_in, UUID, "run-x")
    daemon.acquire([])
    monkeypatch.setattr("sgl_omni.gpu.mps.COMMAND_SECONDS", 0.5)
    begin = time.monotonic()
    with pytest.raises(MpsError, match=r"no answer within 0\.5 s"):
        daemon.control._ask("hang")
    assert time.monotonic() - begin < 5
    assert "no answer" in str(daemon.release())
    os.kill(daemons(stand_in)[0], signal.SIGKILL)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MpsError, match="not installed"):
        MpsDaemon(stand_in, UUID, "run-y").acquire([])


def test_foreign_servers_are_told_by_their_name(stand_in: Path) -> None:
    assert foreign_servers([os.getpid(), 1], MpsControl(stand_in / UUID)) == []
