"""Runners alone, in this process: how the work of a request ends whose caller has gone."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest

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
