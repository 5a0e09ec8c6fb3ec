"""Requests through real processes: order, fan-in, routing, streams, binding, errors."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from typing import Any

import numpy as np
import pytest

from plans import plan_of, stage
from running import Start, eventually
from sgl_omni.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    PayloadError,
    RequestAborted,
    StageFailed,
    StartupError,
)
from sgl_omni.runtime.coordinator import RequestHandle
from sgl_omni.runtime.pipeline import Pipeline
from sgl_omni.runtime.worker import TOMBSTONE_SECONDS

pytestmark = pytest.mark.alone


def chain(first: str = "tag", **fields: Any) -> Any:
    return plan_of(
        stage("a", first, next="b", factory_args={}),
        stage("b", "tag", next="c", factory_args={"name": "b"}),
        stage("c", "tag", terminal=True, factory_args={"name": "c"}),
        **fields,
    )


async def collect(handle: RequestHandle) -> list[dict[str, Any]]:
    return [chunk.payload async for chunk in handle]


async def tables(pipeline: Pipeline) -> dict[str, float]:
    """The per-request tables of all instances, added up."""
    total: Counter[str] = Counter()
    await pipeline.refresh()
    for gauges in pipeline.stats()["instances"].values():
        for key, value in gauges.items():
            if key in ("requests", "in_flight", "shm_segments_out", "shm_segments_in"):
                total[key] += value
            elif key.endswith((".running", ".queued")):
                total["work"] += value
    return dict(total)


async def assert_empty(pipeline: Pipeline) -> None:
    for _ in range(300):
        found = await tables(pipeline)
        if not any(found.values()):
            break
        await asyncio.sleep(0.02)
    assert not any(found.values()), found
    assert {"requests", "work", "shm_segments_in"} <= found.keys()
    assert pipeline.coordinator.pending == 0


async def test_a_chain_visits_three_processes(start: Start) -> None:
    pipeline = await start(chain())
    result = await pipeline.submit({}).result()
    assert result["c"]["trail"] == ["tag", "b", "c"]
    assert len({*result["c"]["pids"], os.getpid()}) == 4
    assert {i["pid"] for i in pipeline.health()["instances"]} == set(result["c"]["pids"])
    assert pipeline.status == "ready"


async def test_stages_of_one_process_share_it_and_hand_over_the_object(start: Start) -> None:
    pipeline = await start(
        plan_of(stage("a", "plain", process="p", next="b"), stage("b", "plain", process="p", terminal=True))
    )
    result = await pipeline.submit({}).result()
    assert len(set(result["b"]["pids"])) == 1


@pytest.mark.parametrize("size", [10, 100_000, 5_000_000])
async def test_arrays_of_any_size_arrive_whole_and_writable(start: Start, size: int) -> None:
    pipeline = await start(plan_of(stage("a", "double", next="b"), stage("b", "double", terminal=True)))
    data = np.random.default_rng(size).standard_normal(size)
    for _ in range(3):
        result = await pipeline.submit({"data": data}).result()
        np.testing.assert_array_equal(result["b"]["data"], data * 4)
    del result
    await assert_empty(pipeline)


async def test_fan_in_waits_for_both_and_merges(start: Start) -> None:
    pipeline = await start(
        plan_of(
            stage("a", "tag", next=["b", "c"], factory_args={"name": "a"}),
            stage("b", "tag", next="d", factory_args={"name": "b"}),
            stage("c", "plain", next="d", factory_args={"name": "c"}),
            stage("d", "tag", wait_for=["b", "c"], merge_fn="merge_trails", terminal=True, factory_args={"name": "d"}),
        )
    )
    results = await asyncio.gather(*(pipeline.submit({}).result() for _ in range(50)))
    assert all(r["d"]["trail"] == ["a", "a", "b", "c", "d"] for r in results)
    assert all(r["d"]["sources"] == ["b", "c"] for r in results)
    await assert_empty(pipeline)


def routed() -> Any:
    return plan_of(
        stage("a", "tag", next=["b", "c"], route_fn="route_by_payload", factory_args={"name": "a"}),
        stage("b", "tag", next="d", factory_args={"name": "b"}),
        stage("c", "tag", next=["d", "e"], factory_args={"name": "c"}),
        stage("d", "tag", wait_for=["b", "c"], terminal=True, factory_args={"name": "d"}),
        stage("e", "tag", terminal=True, factory_args={"name": "e"}),
    )


async def test_routing_to_one_of_several_cuts_the_rest_for_fan_in_and_results(start: Start) -> None:
    pipeline = await start(routed())
    only_b = await pipeline.submit({"to": "b"}).result()
    assert {k: v["trail"] for k, v in only_b.items()} == {"d": ["a", "b", "d"]}
    only_c = await pipeline.submit({"to": "c"}).result()
    assert {k: v["trail"] for k, v in only_c.items()} == {"d": ["a", "c", "d"], "e": ["a", "c", "e"]}
    with pytest.raises(StageFailed, match=r"stage 'a'.*route_fn chose"):
        await pipeline.submit({"to": "nowhere"}).result()
    await assert_empty(pipeline)


async def test_a_stream_into_a_branch_that_is_not_taken_is_forgotten(start: Start) -> None:
    pipeline = await start(
        plan_of(
            stage("a", "stream_source", next=["b", "c"], stream_to=["b", "c"], route_fn="route_by_payload"),
            stage("b", "squares", terminal=True),
            stage("c", "squares", terminal=True),
        )
    )
    for _ in range(5):
        assert (await pipeline.submit({"to": "b", "count": 3}).result())["b"]["count_seen"] == 3
    await assert_empty(pipeline)


async def test_wanted_outputs_alone_are_visited(start: Start) -> None:
    pipeline = await start(
        plan_of(
            stage("a", "tag", next=["text", "speech"], factory_args={"name": "a"}),
            stage("text", "tag", terminal=True, factory_args={"name": "text"}),
            stage("speech", "tag", next="audio", factory_args={"name": "speech"}),
            stage("audio", "tag", terminal=True, factory_args={"name": "audio"}),
            replicas={"speech": 2},
        )
    )
    both = await pipeline.submit({}).result()
    assert set(both) == {"text", "audio"}
    for _ in range(3):
        assert set(await pipeline.submit({}, outputs=["text"]).result()) == {"text"}
    first = both["audio"]["pids"][1]
    second = (await pipeline.submit({}).result())["audio"]["pids"][1]
    assert first != second, "text-only requests must not advance the turn of the speech Process"
    with pytest.raises(InvalidRequest, match="unknown output"):
        pipeline.submit({}, outputs=["video"])


async def test_a_stream_arrives_in_order_and_before_the_end(start: Start) -> None:
    pipeline = await start(
        plan_of(stage("a", "stream_source", next="b", stream_to="b"), stage("b", "squares", terminal=True))
    )
    handle = pipeline.submit({"count": 200, "size": 50_000})
    assert [c["square"] for c in await collect(handle)] == [i**2 for i in range(200)] + [-1]


async def test_streams_end_with_the_payload_of_the_next_edge(start: Start) -> None:
    pipeline = await start(
        plan_of(stage("a", "stream_source", next="b", stream_to="b"), stage("b", "squares", terminal=True))
    )
    handle = pipeline.submit({"count": 10, "name": "x"})
    assert [c["square"] for c in await collect(handle)] == [i**2 for i in range(10)] + [-1]
    result = (await handle.result())["b"]
    assert (result["name"], result["count_seen"]) == ("x", 10)
    assert (await pipeline.submit({"count": 0}).result())["b"]["count_seen"] == 0
    await assert_empty(pipeline)


def fed_engine(payload_edge: bool = True, **factory: int) -> Any:
    """A stream leads from `a` to the engine `b`, and the payload either too or past it, to `c`."""
    return plan_of(
        stage("a", "stream_source", next="b" if payload_edge else "c", stream_to="b"),
        stage("b", "adding_engine", terminal=True, factory_args=factory),
        *([] if payload_edge else [stage("c", "tag", terminal=True)]),
    )


@pytest.mark.parametrize("payload_edge", [True, False])
async def test_a_stream_feeds_an_engine(start: Start, payload_edge: bool) -> None:
    pipeline = await start(fed_engine(payload_edge))
    handles = [pipeline.submit({"count": count, "size": 100}) for count in (100, 1, 0, 40)]
    for handle, count in zip(handles, (100, 1, 0, 40), strict=True):
        sums = [chunk["sum"] for chunk in await collect(handle) if "sum" in chunk]
        assert sums == [i * (i + 1) // 2 for i in range(count)]
        assert (await handle.result())["b"] == {"count": count}
    await assert_empty(pipeline)


@pytest.mark.parametrize("payload_edge", [True, False])
async def test_an_engine_that_has_enough_takes_the_rest_of_its_stream(start: Start, payload_edge: bool) -> None:
    pipeline = await start(fed_engine(payload_edge, enough=3))
    for _ in range(3):
        handle = pipeline.submit({"count": 200, "pause": 0.001})
        assert [chunk["sum"] for chunk in await collect(handle)] == [0, 1, 3]
        assert (await handle.result())["b"] == {"count": 3}
    await assert_empty(pipeline)


async def test_a_chunk_that_an_engine_refuses_fails_its_request_alone(start: Start) -> None:
    pipeline = await start(fed_engine(unlucky=7))
    good = pipeline.submit({"count": 5})
    bad = pipeline.submit({"count": 100, "pause": 0.001})
    with pytest.raises(InvalidRequest, match="an unlucky number"):
        await bad.result()
    assert (await good.result())["b"] == {"count": 5}
    gone = pipeline.submit({"count": 100, "pause": 0.05})
    await asyncio.sleep(0.2)
    gone.abort()
    await assert_empty(pipeline)


async def test_an_engine_that_breaks_over_a_chunk_keeps_nothing_of_its_request(start: Start) -> None:
    pipeline = await start(fed_engine(unlucky=-990))
    with pytest.raises(StageFailed, match="breaks this engine"):
        await pipeline.submit({"count": 50}).result()
    await assert_empty(pipeline)


async def test_an_engine_that_takes_no_stream_is_refused_at_start(start: Start) -> None:
    plan = plan_of(stage("a", "stream_source", next="b", stream_to="b"), stage("b", "engine", terminal=True))
    with pytest.raises(StartupError, match="an EngineStage whose engine has `extend` and `finish_input`"):
        await start(plan)


async def test_the_first_chunk_is_there_before_the_source_has_finished(start: Start) -> None:
    pipeline = await start(
        plan_of(stage("a", "stream_source", next="b", stream_to="b"), stage("b", "squares", terminal=True))
    )
    handle = pipeline.submit({"count": 10, "pause": 0.2})
    begin = asyncio.get_running_loop().time()
    async for _ in handle:
        assert asyncio.get_running_loop().time() - begin < 1.0
        break
    handle.abort()
    await assert_empty(pipeline)


async def test_a_reader_that_does_not_read_stops_its_own_stream_only(start: Start) -> None:
    pipeline = await start(plan_of(stage("a", "obey", terminal=True)))
    stuck = pipeline.submit({"do": "stream", "count": 500})
    iterator = aiter(stuck)
    assert (await anext(iterator)).payload == {"i": 0}
    assert [c["i"] for c in await collect(pipeline.submit({"do": "stream", "count": 500}))] == list(range(500))
    await asyncio.sleep(0.3)
    assert pipeline.coordinator.in_flight["a"] == 1, "the stuck request waits for its reader"
    assert [c.payload["i"] async for c in iterator] == list(range(1, 500))
    await assert_empty(pipeline)


async def test_awaiting_only_the_result_lets_the_stream_pass(start: Start) -> None:
    pipeline = await start(plan_of(stage("a", "obey", terminal=True)))
    assert (await pipeline.submit({"do": "stream", "count": 500}).result())["a"]["count"] == 500


async def test_batches_fill_up_and_do_not_wait_for_ever(start: Start) -> None:
    pipeline = await start(plan_of(stage("a", "batch", terminal=True, factory_args={"max_size": 4})))
    results = await asyncio.gather(*(pipeline.submit({}).result() for _ in range(12)))
    assert max(r["a"]["batch"] for r in results) == 4
    assert (await pipeline.submit({}).result())["a"]["batch"] == 1
    good, bad = await asyncio.gather(
        pipeline.submit({}).result(), pipeline.submit({"bad": True}).result(), return_exceptions=True
    )
    assert isinstance(bad, StageFailed) and "bad input" in str(bad)
    assert not isinstance(good, BaseException) and good["a"]["batch"] == 2
    with pytest.raises(StageFailed, match="whole batch"):
        await pipeline.submit({"all": True}).result()
    await assert_empty(pipeline)


async def test_an_engine_batches_requests_and_streams_each(start: Start) -> None:
    pipeline = await start(
        plan_of(
            stage("e", "engine", next="v", stream_to="v", factory_args={"rows": 4}),
            stage("v", "squares", terminal=True),
        )
    )
    handles = [pipeline.submit({"n": n}) for n in range(1, 13)]
    streams = await asyncio.gather(*(collect(h) for h in handles))
    for n, stream in zip(range(1, 13), streams, strict=True):
        assert [c["square"] for c in stream] == [i**2 for i in range(n)] + [-1]
    with pytest.raises(InvalidRequest, match="at most 1000"):
        await pipeline.submit({"n": 1001}).result()
    await assert_empty(pipeline)


async def test_a_failing_engine_step_fails_those_in_it_and_no_later_one(start: Start) -> None:
    pipeline = await start(plan_of(stage("e", "engine", terminal=True)))
    victim, culprit = pipeline.submit({"n": 900}), pipeline.submit({"n": 5, "poison": 2})
    for handle in (victim, culprit):
        with pytest.raises(StageFailed, match=r"stage 'e' .*poisoned step"):
            await handle.result()
    assert (await pipeline.submit({"n": 3}).result())["e"] == {"tokens": 3}
    await assert_empty(pipeline)


async def test_round_robin_binds_a_request_to_one_replica_throughout(start: Start) -> None:
    pipeline = await start(chain(replicas={"b": 2, "c": 3}))
    trails = [(await pipeline.submit({}).result())["c"]["pids"] for _ in range(12)]
    assert Counter(t[1] for t in trails).most_common()[0][1] == 6
    assert sorted(Counter(t[2] for t in trails).values()) == [4, 4, 4]


async def test_least_inflight_avoids_the_busy_replica(start: Start) -> None:
    pipeline = await start(plan_of(stage("a", "obey", terminal=True), replicas={"a": 2}, policy="least_inflight"))
    busy = pipeline.submit({"do": "sleep", "seconds": 30})
    taken = next(i["name"] for i in pipeline.health()["instances"] if i["in_flight"] == 1)
    for _ in range(5):
        handle = pipeline.submit({"do": "sleep", "seconds": 0.01})
        assert pipeline.coordinator.in_flight[taken] == 1
        await handle.result()
    busy.abort()


async def test_an_exception_names_the_stage_and_the_server_goes_on(start: Start) -> None:
    pipeline = await start(chain("obey"))
    with pytest.raises(
        StageFailed, match="stage 'a' \\(a\\) failed: RuntimeError: the stage was told to raise"
    ) as info:
        await pipeline.submit({"do": "raise"}).result()
    assert (info.value.stage, info.value.instance) == ("a", "a")
    with pytest.raises(InvalidRequest, match="refuses this input") as refused:
        await pipeline.submit({"do": "invalid"}).result()
    assert refused.value.param == "input"
    with pytest.raises(StageFailed, match=r"stage 'a'.*'bad.inner' holds a builtins.object"):
        await pipeline.submit({"do": "object"}).result()
    with pytest.raises(StageFailed, match=r"stage 'a'.*NoneType where a payload"):
        await pipeline.submit({"do": "none"}).result()
    assert (await pipeline.submit({"do": "nothing"}).result())["c"]["trail"] == ["b", "c"]
    await assert_empty(pipeline)


async def test_what_is_raised_on_purpose_is_logged_without_a_traceback(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    pipeline = await start(chain("obey"))
    for do, said in (("damaged", "the features are not all finite"), ("raise", "the stage was told to raise")):
        with pytest.raises(StageFailed, match=said):
            await pipeline.submit({"do": do}).result()
    logged = ""

    def is_told() -> bool:
        nonlocal logged
        logged += capfd.readouterr().err
        return "RuntimeError: the stage was told to raise" in logged

    await eventually(is_told, 10)
    first, _, rest = logged.partition("the features are not all finite")
    assert "Traceback" not in first and rest.count("Traceback") == 1


async def test_a_failing_chunk_fails_the_request_and_frees_the_source(start: Start) -> None:
    pipeline = await start(
        plan_of(stage("a", "stream_source", next="b", stream_to="b"), stage("b", "squares", terminal=True))
    )
    with pytest.raises(StageFailed, match=r"stage 'b'.*unlucky chunk"):
        await pipeline.submit({"count": 10_000}).result()
    await assert_empty(pipeline)
    assert (await pipeline.submit({"count": 3}).result())["b"]["still_open"] == 0


async def test_chunks_that_arrive_while_a_failed_request_is_closed_do_not_revive_it(start: Start) -> None:
    pipeline = await start(
        plan_of(
            stage("a", "stream_source", next="b", stream_to="b"),
            stage("b", "squares", terminal=True, factory_args={"unlucky": 17, "close_seconds": 0.1}),
        )
    )
    handles = [pipeline.submit({"count": 100, "pause": 0.005}) for _ in range(20)]
    for handle in handles:
        with pytest.raises(StageFailed, match="unlucky chunk"):
            await handle.result()
    await assert_empty(pipeline)
    assert (await pipeline.submit({"count": 1}).result())["b"]["still_open"] == 0


MISBEHAVIOUR = ["stop iteration", "cancelled", "generator exit", "surrogate", "unprintable", "number as param"]
MISBEHAVIOUR += ["large beside arrays", "surrogate text", "nothing"]


@pytest.mark.parametrize("kind", ["naughty_thread", "naughty_batch", "naughty_stream"])
async def test_whatever_an_author_does_fails_that_request_alone(start: Start, kind: str) -> None:
    pipeline = await start(plan_of(stage("a", kind, next="b"), stage("b", "tag", terminal=True)))
    for what in MISBEHAVIOUR:
        with pytest.raises((StageFailed, InvalidRequest)):
            await pipeline.submit({"what": what}, timeout=20).result()
        assert (await pipeline.submit({}, timeout=20).result())["b"]["trail"] == ["tag"]
    await assert_empty(pipeline)


async def test_a_payload_that_cannot_travel_is_refused_at_the_door(start: Start) -> None:
    pipeline = await start(chain())
    for bad in ({"x": object()}, {"x": {1: 2}}, {"x": 2**70}, {"x": np.array([object()])}, {"x": {1, 2}}, [1]):
        with pytest.raises(PayloadError, match="client"):
            pipeline.submit(bad)  # type: ignore[arg-type]
    assert pipeline.coordinator.pending == 0
    assert (await pipeline.submit({}).result())["c"]["trail"]


async def test_a_deadline_aborts_everywhere(start: Start) -> None:
    pipeline = await start(chain("obey"))
    with pytest.raises(DeadlineExceeded, match=r"within 0\.2 s"):
        await pipeline.submit({"do": "sleep", "seconds": 30}, timeout=0.2).result()
    await assert_empty(pipeline)


async def test_abort_is_idempotent_and_frees_threads_coroutines_and_queues(start: Start) -> None:
    pipeline = await start(
        plan_of(stage("a", "obey", next="b"), stage("b", "sleepy_thread", terminal=True), replicas={"b": 2})
    )
    handles = [pipeline.submit({"do": ("sleep", "pass on")[i % 2], "seconds": 20}) for i in range(20)]
    await asyncio.sleep(0.2)
    for handle in handles:
        handle.abort("no longer wanted")
        handle.abort("again")
        with pytest.raises(RequestAborted, match="no longer wanted"):
            await handle.result()
    await assert_empty(pipeline)
    await asyncio.sleep(TOMBSTONE_SECONDS + 0.5)
    await pipeline.refresh()
    assert not any(i["aborted_ids"] for i in pipeline.stats()["instances"].values())


@pytest.mark.parametrize("first", ["tag", "plain", "batch", "squares", "engine"])
async def test_an_abort_in_the_same_breath_as_the_request(start: Start, first: str) -> None:
    """The process reads both at once, so the work is ended before its first step."""
    pipeline = await start(plan_of(stage("a", first, terminal=True)))
    for _ in range(20):
        handles = [pipeline.submit({"n": 3}) for _ in range(10)]
        for handle in handles[1:]:
            handle.abort()
        assert await handles[0].result()
    await assert_empty(pipeline)


async def test_a_full_server_refuses_at_once_and_recovers(start: Start) -> None:
    pipeline = await start(chain("obey"), max_in_flight=4)
    held = [pipeline.submit({"do": "sleep", "seconds": 30}) for _ in range(4)]
    with pytest.raises(Overloaded, match="4 requests are in flight") as info:
        pipeline.submit({})
    assert info.value.retry_after > 0
    held[0].abort()
    assert (await pipeline.submit({}).result())["c"]["trail"] == ["b", "c"]
    for handle in held:
        handle.abort()


async def test_random_aborts_leave_no_state_and_no_memory(start: Start) -> None:
    """Streams with shared-memory chunks, aborted at random moments."""
    pipeline = await start(
        plan_of(
            stage("a", "stream_source", next="b", stream_to="b"),
            stage("b", "squares", terminal=True),
            replicas={"b": 2},
        ),
        max_in_flight=1000,
    )
    rng = np.random.default_rng(7)

    async def one(delay: float) -> str:
        handle = pipeline.submit({"count": 12, "size": 40_000, "pause": 0.001})
        try:
            async with asyncio.timeout(delay):
                await collect(handle)
        except TimeoutError:
            handle.abort()
            return "aborted"
        return "ok"

    outcomes: Counter[str] = Counter()
    for _ in range(6):
        outcomes.update(await asyncio.gather(*(one(d) for d in rng.uniform(0, 0.2, 50))))
    assert outcomes["aborted"] > 20
    await assert_empty(pipeline)
    assert len(await collect(pipeline.submit({"count": 12}))) == 13
