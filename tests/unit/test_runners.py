"""Runners alone, in this process: how the work of a request ends whose caller has gone."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from sgl_omni.runtime import stream_runner
from sgl_omni.runtime.messages import Header
from sgl_omni.runtime.requests import StageRequest
from sgl_omni.runtime.runners import AsyncFunctionRunner, BatchRunner, Runner, ThreadFunctionRunner
from sgl_omni.runtime.stage import BatchStage, FunctionStage, Payload, Request, StreamStage
from sgl_omni.runtime.stream_runner import StreamRunner


class Host:
    """Implements ``requests.Host`` for a stage without edges. ``ended`` is set when the request is forgotten."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    def stream_targets(self, request: StageRequest) -> list[str]:
        return []

    def has_room(self, request: StageRequest, chunk: Payload, wake: Callable[[], None]) -> bool:
        return True

    def release_room(self, request: StageRequest) -> None: ...

    def send_chunk(self, request: StageRequest, target: str, chunk: Payload) -> None: ...

    def send_ack(self, request: StageRequest, source: str, count: int) -> None: ...

    def open_streams(self, request: StageRequest) -> set[str]:
        return set()

    def expects_payload(self, request: StageRequest) -> bool:
        return True

    def finish(self, request: StageRequest, payload: Payload) -> None:
        self.ended.set()

    def fail(self, request: StageRequest, error: Exception) -> None:
        self.ended.set()

    def discard(self, request: StageRequest) -> None:
        self.ended.set()


class Work:
    """What a stage's author wrote: it begins, goes on until it may fail, and fails."""

    def __init__(self) -> None:
        self.begun, self.may_fail = threading.Event(), threading.Event()

    def in_thread(self, *given: Any) -> Payload:
        self.begun.set()
        self.may_fail.wait(20)
        raise ValueError("the work fails")

    async def as_coroutine(self, payload: Payload, request: Request) -> Payload:
        self.begun.set()
        try:
            await asyncio.sleep(20)
        finally:
            raise ValueError("the work fails")


class Stream(StreamStage[None]):
    def __init__(self, work: Work) -> None:
        self._work = work

    def open(self, request: Request) -> None: ...

    def feed(self, state: None, chunk: Payload) -> Iterable[Payload]:
        return ()

    def flush(self, state: None) -> Iterable[Payload]:
        return ()

    def result(self, state: None, payload: Payload) -> Payload:
        return self._work.in_thread()


RUNNERS = {
    "thread": lambda work: ThreadFunctionRunner(FunctionStage(work.in_thread), "x"),
    "coroutine": lambda work: AsyncFunctionRunner(FunctionStage(work.as_coroutine)),
    "batch": lambda work: BatchRunner(BatchStage(work.in_thread, 1, 0.0), "x"),
    "stream": lambda work: StreamRunner(Stream(work), "x"),
}


@pytest.mark.parametrize("kind", RUNNERS)
async def test_work_that_fails_once_its_caller_has_gone_is_no_lost_exception(kind: str) -> None:
    lost: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: lost.append(context["message"]))
    host, work = Host(), Work()
    runner: Runner = RUNNERS[kind](work)
    request = StageRequest(host, Header("r", {}, ()), "a")
    runner.submit(request, {})
    await asyncio.to_thread(work.begun.wait, 20)
    request.mark_aborted()
    runner.abort(request)
    work.may_fail.set()
    await asyncio.wait_for(host.ended.wait(), 20)
    runner.close()
    await asyncio.sleep(0)
    gc.collect()
    assert lost == []


class Listening(Host):
    """Keeps what is sent, and says that a stream is open until it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[int] = []
        self.acknowledged = 0
        self.failure: Exception | None = None

    def stream_targets(self, request: StageRequest) -> list[str]:
        return ["next"]

    def send_chunk(self, request: StageRequest, target: str, chunk: Payload) -> None:
        self.sent.append(chunk["n"])

    def send_ack(self, request: StageRequest, source: str, count: int) -> None:
        assert source == "source"
        self.acknowledged += count

    def fail(self, request: StageRequest, error: Exception) -> None:
        self.failure = error
        super().fail(request, error)


class Counting(StreamStage[list[int]]):
    """Makes ``times`` chunks of each, as a list or one by one, and notes how often it changes its thread's work."""

    def __init__(self, *, as_list: bool, times: int) -> None:
        self._as_list, self._times = as_list, times
        self.fail_at = -1

    def open(self, request: Request) -> list[int]:
        return []

    def feed(self, state: list[int], chunk: Payload) -> Iterable[Payload]:
        if chunk["n"] == self.fail_at:
            raise ValueError("the work fails")
        state.append(chunk["n"])
        made = [{"n": chunk["n"]}] * self._times
        return made if self._as_list else (each for each in made)

    def flush(self, state: list[int]) -> Iterable[Payload]:
        return [{"n": -1}] if self._as_list else iter([{"n": -1}])

    def result(self, state: list[int], payload: Payload) -> Payload:
        return {"fed": state}


@pytest.mark.parametrize("as_list", [True, False])
@pytest.mark.parametrize("times", [0, 1])
async def test_what_has_come_of_a_request_is_fed_in_order_with_few_changes_of_thread(
    as_list: bool, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_runner, "TURN_SECONDS", 20.0)
    host = Listening()
    runner = StreamRunner(Counting(as_list=as_list, times=times), "x")
    assert runner._pool is not None
    submit, calls = runner._pool.submit, []
    monkeypatch.setattr(runner._pool, "submit", lambda *given: calls.append(1) or submit(*given))  # type: ignore[func-returns-value]
    request = StageRequest(host, Header("r", {}, ()), "a")
    for n in range(24):
        runner.chunk(request, "source", {"n": n})
    runner.submit(request, {})  # the streams have ended
    await asyncio.wait_for(host.ended.wait(), 20)
    runner.close()
    assert host.sent == [n for n in range(24) for _ in range(times)] + [-1]
    assert host.acknowledged == 24
    # The state's beginning and end and the result, then what is fed and flushed: once for each list, and once more for
    # what may go on.
    most = {(True, 0): 1 + 1, (False, 0): 1 + 2, (True, 1): 24 + 1, (False, 1): 25 + 2}[as_list, times]
    assert len(calls) == 3 + most


@pytest.mark.parametrize("where", ["feed", "flush"])
async def test_a_stage_that_forgets_to_return_fails_its_request(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counting, where, lambda self, *given: None)
    host = Listening()
    runner = StreamRunner(Counting(as_list=True, times=0), "x")
    request = StageRequest(host, Header("r", {}, ()), "a")
    runner.chunk(request, "source", {"n": 0})
    runner.submit(request, {})
    await asyncio.wait_for(host.ended.wait(), 20)
    runner.close()
    assert "'NoneType' object is not iterable" in str(host.failure)


async def test_a_request_that_is_fed_slowly_lets_others_have_their_turn() -> None:
    """One thread, and a stage that makes nothing of many chunks: another request does not wait for all of them."""
    fed: list[str] = []

    class Slow(Counting):
        def feed(self, state: list[int], chunk: Payload) -> Iterable[Payload]:
            fed.append(chunk["of"])
            time.sleep(0.02)
            return ()

    runner = StreamRunner(Slow(as_list=True, times=0), "x")
    hosts = {name: Listening() for name in ("long", "short")}
    requests = {name: StageRequest(host, Header(name, {}, ()), "a") for name, host in hosts.items()}
    for _ in range(20):
        runner.chunk(requests["long"], "source", {"of": "long"})
    runner.chunk(requests["short"], "source", {"of": "short"})
    for request in requests.values():
        runner.submit(request, {})
    for host in hosts.values():
        await asyncio.wait_for(host.ended.wait(), 20)
    runner.close()
    assert fed.index("short") <= 3 and fed.count("long") == 20


async def test_a_chunk_that_fails_is_the_last_that_is_fed() -> None:
    host, stage = Listening(), Counting(as_list=True, times=1)
    stage.fail_at = 9
    runner = StreamRunner(stage, "x")
    request = StageRequest(host, Header("r", {}, ()), "a")
    for n in range(24):
        runner.chunk(request, "source", {"n": n})
    await asyncio.wait_for(host.ended.wait(), 20)
    runner.close()
    assert host.sent == [*range(9)] and str(host.failure) == "the work fails"
