"""Processes that live and do not answer are noticed, named and ended, with their requests."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from plans import plan_of, stage
from running import Start, eventually
from sgl_omni.errors import PipelineError

pytestmark = pytest.mark.alone


async def test_a_stopped_process_fails_its_requests_by_name(start: Start) -> None:
    pipeline = await start(
        plan_of(stage("a", "tag", next="b"), stage("b", "obey", terminal=True)), liveness_timeout=1.0
    )
    assert (await pipeline.submit({}).result())["b"]["trail"] == ["tag"]
    os.kill(pipeline.supervisor.instances["b"].pid or 0, signal.SIGSTOP)
    caught = pipeline.submit({})
    with pytest.raises(PipelineError, match="did not answer for"):
        await asyncio.wait_for(caught.result(), 10)
    reason = await asyncio.wait_for(pipeline.failed(), 1)
    assert "instance 'b'" in reason and "did not answer for" in reason


async def test_a_stuck_event_loop_is_restarted_while_the_other_replica_serves(start: Start) -> None:
    plan = plan_of(
        stage("a", "tag", next="b"),
        stage("b", "stuck", terminal=True),
        replicas={"b": 2},
        on_process_exit="restart",
    )
    pipeline = await start(plan, liveness_timeout=1.0)
    stuck = pipeline.submit({"do": "block"})
    with pytest.raises(PipelineError, match="did not answer for"):
        await asyncio.wait_for(stuck.result(), 10)
    assert (await asyncio.wait_for(pipeline.submit({}).result(), 5))["b"]["trail"] == ["tag"]
    await eventually(lambda: pipeline.status == "ready", 60)
    assert sorted(i["restarts"] for i in pipeline.health()["instances"]) == [0, 0, 1]


async def test_an_engine_that_never_ends_a_step_is_given_up(start: Start) -> None:
    plan = plan_of(stage("a", "tag", next="b"), stage("b", "stuck_engine", terminal=True))
    pipeline = await start(plan, liveness_timeout=0.4, request_timeout=1.0)
    with pytest.raises(PipelineError):
        await asyncio.wait_for(pipeline.submit({"n": 1}).result(), 10)
    reason = await asyncio.wait_for(pipeline.failed(), 10)
    assert "a step of 'b' did not end within" in reason


async def test_who_answers_is_left_alone_and_who_need_not_answer_too(start: Start) -> None:
    plan = plan_of(stage("a", "tag", next="b"), stage("b", "obey", terminal=True))
    patient = await start(plan, liveness_timeout=0.3)
    await asyncio.sleep(1.5)
    assert (await patient.submit({"do": "sleep", "seconds": 1.0}).result())["b"]["trail"] == ["tag"]
    careless = await start(plan, liveness_timeout=None)
    pid = careless.supervisor.instances["b"].pid or 0
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(1.5)
    os.kill(pid, signal.SIGCONT)
    assert (await careless.submit({}).result())["b"]["trail"] == ["tag"]
    assert patient.status == careless.status == "ready"


async def test_time_that_the_server_itself_missed_is_held_against_nobody(start: Start) -> None:
    pipeline = await start(plan_of(stage("a", "tag", terminal=True)), liveness_timeout=0.8)
    helper = await asyncio.create_subprocess_exec(
        "sh", "-c", f"kill -STOP {os.getpid()}; sleep 2; kill -CONT {os.getpid()}"
    )
    await helper.wait()
    await asyncio.sleep(1.0)
    assert pipeline.status == "ready"
    assert (await pipeline.submit({}).result())["a"]["trail"] == ["tag"]
