"""Start, stop, and processes that die: what the supervisor promises."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from plans import plan_of, stage
from running import HERE, Start, children, eventually
from sgl_omni.errors import Overloaded, ProcessExited, RequestAborted, StartupError
from sgl_omni.runtime.pipeline import Pipeline
from sgl_omni.runtime.rundir import RunDir
from sgl_omni.topology.plan import Plan

pytestmark = pytest.mark.alone


async def test_a_factory_that_raises_fails_the_start_with_its_traceback(start: Start, own_run_folder: Path) -> None:
    before = children()
    with pytest.raises(StartupError) as info:
        await start(plan_of(stage("a", "tag", next="b"), stage("b", "broken_factory", terminal=True)))
    text = str(info.value)
    assert "stage 'b' (b) could not be built: OSError" in text
    assert "in broken_factory" in text and "the checkpoint is not where it should be" in text
    assert children() == before


async def test_what_a_factory_refuses_on_purpose_is_told_without_a_traceback(start: Start) -> None:
    with pytest.raises(StartupError) as info:
        await start(plan_of(stage("a", "refusing_factory", terminal=True)))
    assert str(info.value) == "stage 'a' (a) could not be built: /models/m/model.safetensors: a.weight is [3], not [4]"


async def test_stages_are_rehearsed_on_the_cuda_platform_alone(start: Start) -> None:
    plan = plan_of(stage("a", "rehearsed", terminal=True))
    for platform, rehearsals in (("cpu", 0), ("cuda", 1)):
        pipeline = await start(replace(plan, platform=platform))
        result = (await pipeline.submit({}).result())["a"]
        assert result == {"rehearsals": rehearsals, "here": bool(rehearsals)}


async def test_a_rehearsal_that_fails_fails_the_start_with_the_stages_name(start: Start) -> None:
    def plan(fails: str) -> Plan:
        bad = stage("b", "rehearsed", factory_args={"fails": fails}, process="a", terminal=True)
        return replace(plan_of(stage("a", "rehearsed", next="b"), bad), platform="cuda")

    with pytest.raises(StartupError) as info:
        await start(plan("damaged"))
    assert str(info.value) == (
        "stage 'b' (a) could not be built: its rehearsal failed: the features are not all finite: the model's weights "
        "may be damaged"
    )
    with pytest.raises(StartupError, match=r"stage 'b' \(a\) could not be built: OSError") as info:
        await start(plan("broken"))
    assert "in rehearse" in str(info.value) and "the library is of another version" in str(info.value)


@pytest.mark.parametrize("policy", ["stop", "restart"])
async def test_a_process_that_dies_while_it_starts_is_named_with_its_last_lines(start: Start, policy: str) -> None:
    with pytest.raises(StartupError, match="instance 'a' exited with status 3 before it was ready") as info:
        await start(plan_of(stage("a", "dying_factory", terminal=True), on_process_exit=policy))
    assert "last words of the child" in str(info.value)


async def test_a_factory_that_gives_no_stage_is_told_so(start: Start) -> None:
    with pytest.raises(StartupError, match="stage 'a' returned a int"):
        await start(plan_of(stage("a", "no_stage", terminal=True)))


async def test_a_stream_into_a_stage_of_another_kind_fails_the_start(start: Start) -> None:
    with pytest.raises(StartupError, match="must return a StreamStage"):
        await start(plan_of(stage("a", "stream_source", next="b", stream_to="b"), stage("b", "tag", terminal=True)))


async def test_an_end_whose_caller_is_cancelled_goes_on(own_run_folder: Path) -> None:
    ready = asyncio.Event()

    async def serve() -> None:
        async with Pipeline(plan_of(stage("a", "tag", next="b"), stage("b", "tag", terminal=True))):
            ready.set()

    before = children()
    serving = asyncio.ensure_future(serve())
    await ready.wait()
    await asyncio.sleep(0)
    assert children() > before and not serving.done()
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert children() <= before and not list(own_run_folder.glob("sgl-omni/run-*"))


async def test_a_start_that_takes_too_long_names_who_is_late(start: Start) -> None:
    with pytest.raises(StartupError, match=r"not ready within 1\.5 s:\n  'b'"):
        await start(
            plan_of(stage("a", "tag", next="b"), stage("b", "slow_factory", terminal=True)), startup_timeout=1.5
        )


@pytest.mark.parametrize("victim", ["a", "b", "c"])
async def test_a_killed_child_fails_its_requests_by_name_and_stops_the_pipeline(start: Start, victim: str) -> None:
    pipeline = await start(
        plan_of(stage("a", "tag", next="b"), stage("b", "tag", next="c"), stage("c", "obey", terminal=True))
    )
    handles = [pipeline.submit({"do": "sleep", "seconds": 30}) for _ in range(20)]
    await asyncio.sleep(0.1)
    pid = next(i["pid"] for i in pipeline.health()["instances"] if i["name"] == victim)
    begin = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    for handle in handles:
        with pytest.raises(ProcessExited) as info:
            await handle.result()
        assert f"instance '{victim}' (stage '{victim}') was killed by SIGKILL (exit status -9)" in str(info.value)
    assert time.monotonic() - begin < 1.0
    assert f"instance '{victim}'" in await asyncio.wait_for(pipeline.failed(), 1)
    assert pipeline.status == "failed"
    with pytest.raises(Overloaded, match="stopping"):
        pipeline.submit({})


async def test_with_restart_the_other_replica_serves_and_the_killed_one_comes_back(start: Start) -> None:
    pipeline = await start(
        plan_of(
            stage("a", "tag", next="b"),
            stage("b", "obey", next="c"),
            stage("c", "tag", terminal=True),
            replicas={"b": 2},
            on_process_exit="restart",
        )
    )
    handles = [pipeline.submit({"do": "sleep", "seconds": 1.0}) for _ in range(10)]
    await asyncio.sleep(0.2)
    instances = {i["name"]: i for i in pipeline.health()["instances"]}
    os.kill(instances["b@r1"]["pid"], signal.SIGKILL)
    await eventually(lambda: pipeline.status == "degraded", 1)
    for _ in range(6):
        assert (await pipeline.submit({}).result())["c"]["trail"] == ["tag", "tag"]
    outcomes = await asyncio.gather(*(h.result() for h in handles), return_exceptions=True)
    assert sum(isinstance(o, ProcessExited) and o.instance == "b@r1" for o in outcomes) == 5
    assert sum(isinstance(o, dict) for o in outcomes) == 5
    await eventually(lambda: pipeline.status == "ready")
    for _ in range(6):
        assert (await pipeline.submit({}).result())["c"]["trail"] == ["tag", "tag"]
    after = {i["name"]: i for i in pipeline.health()["instances"]}
    assert after["b@r1"]["restarts"] == 1 and after["b@r1"]["pid"] != instances["b@r1"]["pid"]
    assert after["b@r0"]["pid"] == instances["b@r0"]["pid"]


async def test_without_a_replica_left_requests_are_refused_until_it_is_back(start: Start) -> None:
    pipeline = await start(
        plan_of(stage("a", "tag", next="b"), stage("b", "obey", terminal=True), on_process_exit="restart")
    )
    with pytest.raises(ProcessExited, match="exited with status 7"):
        await pipeline.submit({"do": "exit", "status": 7}).result()
    with pytest.raises(Overloaded, match="process 'b' is down"):
        pipeline.submit({})
    await eventually(lambda: pipeline.status == "ready")
    assert await pipeline.submit({}).result()


async def test_an_engine_that_fails_outside_a_step_ends_its_process_by_name(start: Start) -> None:
    pipeline = await start(plan_of(stage("e", "engine", terminal=True)))
    other, culprit = pipeline.submit({"n": 900}), pipeline.submit({"n": 666})
    await asyncio.sleep(0.1)
    culprit.abort()
    with pytest.raises(ProcessExited, match=r"instance 'e' .*exited with status 70"):
        await other.result()
    assert "the engine cannot abort this" in await asyncio.wait_for(pipeline.failed(), 1)


async def test_stop_drains_what_finishes_and_aborts_what_does_not(start: Start) -> None:
    pipeline = await start(plan_of(stage("a", "obey", terminal=True)))
    quick, slow = (pipeline.submit({"do": "sleep", "seconds": s}) for s in (0.3, 30))
    stopping = asyncio.create_task(pipeline.stop(drain_timeout=1.0))
    await asyncio.sleep(0.05)
    with pytest.raises(Overloaded, match="shutting down"):
        pipeline.submit({})
    assert await quick.result()
    with pytest.raises(RequestAborted, match="shutting down"):
        await slow.result()
    begin = time.monotonic()
    await stopping
    assert time.monotonic() - begin < 2.0


async def test_an_idle_stop_takes_less_than_two_seconds_and_a_stuck_thread_cannot_delay_it(start: Start) -> None:
    pipeline = await start(plan_of(stage("a", "sleepy_thread", terminal=True)))
    pipeline.submit({"seconds": 60})
    await asyncio.sleep(0.1)
    begin = time.monotonic()
    await pipeline.stop(drain_timeout=0)
    assert time.monotonic() - begin < 2.0


async def test_what_a_stage_started_itself_ends_with_it(start: Start) -> None:
    pipeline = await start(plan_of(stage("a", "with_grandchild", terminal=True)))
    pid = (await pipeline.submit({}).result())["a"]["grandchild"]
    await pipeline.stop(drain_timeout=0)
    await eventually(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


SERVER = f"""
import asyncio, sys
sys.path.insert(0, {HERE!r})
from plans import plan_of, stage
from sgl_omni.runtime.pipeline import Pipeline

async def main():
    plan = plan_of(stage("a", "with_grandchild", next="b"), stage("b", "obey", terminal=True))
    async with Pipeline(plan) as pipeline:
        pipeline.submit({{"do": "sleep", "seconds": 60}})
        print(*(i["pid"] for i in pipeline.health()["instances"]), flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_a_killed_server_takes_its_children_along_and_the_next_start_cleans_up(own_run_folder: Path) -> None:
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    pids = [int(p) for p in server.stdout.readline().split()]
    grandchildren = [c.pid for p in pids for c in psutil.Process(p).children()]
    assert len(pids) == 2 and len(grandchildren) == 1
    server.kill()
    server.wait()
    await eventually(lambda: not any(psutil.pid_exists(p) for p in pids), 2)
    left = list((own_run_folder / "sgl-omni").glob("run-*"))
    assert len(left) == 1, "the dead server cannot remove its own folder"
    folder = RunDir()
    assert list((own_run_folder / "sgl-omni").glob("run-*")) == [folder.path]
    folder.close()


def test_a_run_folder_of_another_or_too_long_a_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="too long a path"):
        RunDir(tmp_path / ("x" * 100))
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StartupError, match="run folder"):
        RunDir(tmp_path / "file")


async def test_a_run_folder_that_someone_removed_does_not_hide_a_death(start: Start, own_run_folder: Path) -> None:
    pipeline = await start(plan_of(stage("a", "obey", terminal=True)))
    handle = pipeline.submit({"do": "sleep", "seconds": 30})
    shutil.rmtree(own_run_folder / "sgl-omni")
    os.kill(pipeline.health()["instances"][0]["pid"], signal.SIGKILL)
    with pytest.raises(ProcessExited):
        await asyncio.wait_for(handle.result(), 2)
    assert "SIGKILL" in await asyncio.wait_for(pipeline.failed(), 2)


async def test_a_living_server_is_not_stale_whatever_files_are_missing(start: Start, own_run_folder: Path) -> None:
    pipeline = await start(plan_of(stage("a", "tag", terminal=True)))
    for path in (own_run_folder / "sgl-omni").glob("run-*/*"):
        if path.is_file():
            path.unlink()
    other = RunDir()
    assert (await pipeline.submit({}).result())["a"]["trail"] == ["tag"]
    other.close()


async def test_a_process_that_dies_while_others_still_start_ends_the_start(start: Start) -> None:
    begin = time.monotonic()
    with pytest.raises(StartupError, match="instance 'a'"):
        await start(
            plan_of(stage("a", "dying_later", next="b"), stage("b", "slow_factory", terminal=True)), startup_timeout=30
        )
    assert time.monotonic() - begin < 10


async def test_with_restart_a_ready_process_that_dies_while_others_still_start_comes_back(
    start: Start, tmp_path: Path
) -> None:
    first = stage("a", "dying_once", factory_args={"mark": str(tmp_path / "mark")}, next="b")
    last = stage("b", "slow_factory", factory_args={"seconds": 4.0}, terminal=True)
    pipeline = await start(plan_of(first, last, on_process_exit="restart"), startup_timeout=30)
    await eventually(lambda: pipeline.status == "ready")
    assert [(i["name"], i["restarts"]) for i in pipeline.health()["instances"]] == [("a", 1), ("b", 0)]
    assert (await pipeline.submit({}).result())["b"]["trail"] == ["tag", "tag"]


async def test_two_servers_never_touch_each_other(start: Start, own_run_folder: Path) -> None:
    plan = plan_of(stage("a", "tag", next="b"), stage("b", "tag", terminal=True))
    first = await start(plan)
    second = await start(plan)
    pids = [set((await p.submit({}).result())["b"]["pids"]) for p in (first, second)]
    assert not pids[0] & pids[1]
    await first.stop(drain_timeout=0)
    assert len(list((own_run_folder / "sgl-omni").glob("run-*"))) == 1
    assert set((await second.submit({}).result())["b"]["pids"]) == pids[1]


async def test_a_pipeline_works_again_after_another_one_of_the_same_plan(start: Start) -> None:
    plan = plan_of(stage("a", "tag", terminal=True))
    for _ in range(2):
        async with Pipeline(plan) as pipeline:
            assert await pipeline.submit({}).result()
