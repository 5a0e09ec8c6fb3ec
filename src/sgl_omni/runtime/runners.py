"""Runs stages inside a worker: queues, threads and order, the same for every model. Functions and batches here.

A runner gets `submit` with a request's payload (for a stream stage also `chunk` and `end`), and ends every request
with exactly one call of `finish` or `fail` on its `StageRequest`, or with `discard` once it noticed an abort.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from sgl_omni.errors import OmniError, StartupError
from sgl_omni.runtime.requests import StageRequest
from sgl_omni.runtime.stage import BatchStage, FunctionStage, Payload, Rehearsal

T = TypeVar("T")


def call_author(call: Callable[..., T], *args: Any) -> T:
    """Calls an author's code in a thread. What a future cannot carry (StopIteration) or takes for its own
    (CancelledError) becomes an ordinary error, so that nobody waits for ever."""
    try:
        return call(*args)
    except (StopIteration, GeneratorExit, asyncio.CancelledError) as error:
        raise RuntimeError(f"the stage's code raised {type(error).__name__}") from error


class Runner(ABC):
    """Drives one stage of this process."""

    _pool: ThreadPoolExecutor | None = None
    """The threads of the stage's code, where it runs in threads."""

    _rehearsal: Rehearsal | None = None

    def rehearse(self) -> None:
        """Before the first request: the stage's rehearsal, if it has one, in a thread that is there for requests then.

        Raises what it raises, an error of ``errors.py`` as ``StartupError``.
        """
        if self._rehearsal is None:
            return
        try:
            if self._pool is None:
                call_author(self._rehearsal)
            else:
                self._pool.submit(call_author, self._rehearsal).result()
        except OmniError as error:
            raise StartupError(f"its rehearsal failed: {error}") from error

    @abstractmethod
    def submit(self, request: StageRequest, payload: Payload) -> None:
        """Takes the request's payload."""

    def chunk(self, request: StageRequest, source: str, chunk: Payload) -> None:
        """Takes one chunk of an incoming stream. Only a stream stage has any."""
        raise TypeError(f"stage '{request.stage}' is no StreamStage and cannot take the stream of '{source}'")

    def end(self, request: StageRequest) -> None:  # noqa: B027 - only a stream stage has anything to do
        """Every incoming stream of the request has ended."""

    @abstractmethod
    def abort(self, request: StageRequest) -> None:
        """`request.aborted` is set: stop its work, then call `request.discard()`."""

    def gauges(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """The process ends."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


class FunctionRunner(Runner):
    """At most `concurrency` calls in progress; the rest wait in order."""

    def __init__(self, stage: FunctionStage) -> None:
        self._stage = stage
        self._rehearsal = stage.rehearsal
        self._waiting: deque[tuple[StageRequest, Payload]] = deque()
        self._running: dict[StageRequest, asyncio.Task[Payload]] = {}

    def submit(self, request: StageRequest, payload: Payload) -> None:
        self._waiting.append((request, payload))
        self._start()

    def gauges(self) -> dict[str, float]:
        return {"running": len(self._running), "queued": len(self._waiting)}

    def _start(self) -> None:
        while self._waiting and len(self._running) < self._stage.concurrency:
            request, payload = self._waiting.popleft()
            if request.aborted:
                continue  # discarded when it was aborted
            task = asyncio.create_task(self._call(payload, request))
            self._running[request] = task
            task.add_done_callback(functools.partial(self._ended, request))

    def _ended(self, request: StageRequest, task: asyncio.Task[Payload]) -> None:
        """A callback and no `finally`: a task that is cancelled before its first step runs none of its code."""
        del self._running[request]
        error = None if task.cancelled() else task.exception()  # asked for in any case, or asyncio reports it as lost
        if request.aborted:
            request.discard()
        elif task.cancelled():
            request.fail(RuntimeError("the stage's function was cancelled from within"))
        elif isinstance(error, Exception):
            request.fail(error)
        elif isinstance(error, GeneratorExit):
            request.fail(RuntimeError("the stage's function raised GeneratorExit"))
        else:
            request.finish(task.result())
        self._start()

    @abstractmethod
    async def _call(self, payload: Payload, request: StageRequest) -> Payload: ...

    def abort(self, request: StageRequest) -> None:
        task = self._running.get(request)
        if task is None:
            self._waiting = deque(item for item in self._waiting if item[0] is not request)
            request.discard()
            return
        self._stop(task)

    def _stop(self, task: asyncio.Task[Payload]) -> None:
        """A call in progress on a thread cannot be stopped: its result is dropped when it returns."""


class AsyncFunctionRunner(FunctionRunner):
    """Coroutine functions, on the event loop; an abort cancels the call."""

    async def _call(self, payload: Payload, request: StageRequest) -> Payload:
        result: Payload = await self._stage.fn(payload, request)  # type: ignore[misc]
        return result

    def _stop(self, task: asyncio.Task[Payload]) -> None:
        task.cancel()


class ThreadFunctionRunner(FunctionRunner):
    """Plain functions, each call in a thread."""

    def __init__(self, stage: FunctionStage, name: str) -> None:
        super().__init__(stage)
        self._pool = ThreadPoolExecutor(stage.concurrency, thread_name_prefix=name)

    async def _call(self, payload: Payload, request: StageRequest) -> Payload:
        loop = asyncio.get_running_loop()
        result: Any = await loop.run_in_executor(self._pool, call_author, self._stage.fn, payload, request)
        if inspect.isawaitable(result):  # a partial or a callable object around a coroutine function
            result = await result
        return result  # type: ignore[no-any-return]


class BatchRunner(Runner):
    """Collects payloads and calls once for many; one call at a time, the next batch fills meanwhile."""

    def __init__(self, stage: BatchStage, name: str) -> None:
        self._stage = stage
        self._rehearsal = stage.rehearsal
        self._waiting: deque[tuple[StageRequest, Payload]] = deque()
        self._oldest = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._running: list[StageRequest] = []
        self._task: asyncio.Task[None] | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)

    def submit(self, request: StageRequest, payload: Payload) -> None:
        if not self._waiting:
            self._oldest = time.monotonic()
        self._waiting.append((request, payload))
        self._start()

    def gauges(self) -> dict[str, float]:
        return {"running": len(self._running), "queued": len(self._waiting)}

    def abort(self, request: StageRequest) -> None:
        if request not in self._running:
            self._waiting = deque(item for item in self._waiting if item[0] is not request)
            request.discard()

    def _start(self) -> None:
        if self._running or not self._waiting:
            return
        patience = self._oldest + self._stage.max_wait_ms / 1000 - time.monotonic()
        if len(self._waiting) < self._stage.max_size and patience > 0:
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(patience, self._expire)
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._stage.max_size))]
        self._oldest = time.monotonic()
        self._running = [request for request, _ in batch]
        self._task = asyncio.create_task(self._run(batch))

    def _expire(self) -> None:
        self._timer = None
        self._start()

    async def _run(self, batch: list[tuple[StageRequest, Payload]]) -> None:
        payloads = [payload for _, payload in batch]
        results: list[Any]
        try:
            if inspect.iscoroutinefunction(self._stage.fn):
                outcome: Any = await self._stage.fn(payloads)
            else:
                loop = asyncio.get_running_loop()
                outcome = await loop.run_in_executor(self._pool, call_author, self._stage.fn, payloads)
            results = list(outcome)
            if len(results) != len(batch):
                raise ValueError(f"a batch of {len(batch)} payloads came back as {len(results)}")
        except Exception as error:  # noqa: BLE001 - the author's code failed for every request of the batch
            results = [error] * len(batch)
        except (asyncio.CancelledError, GeneratorExit) as error:
            results = [RuntimeError(f"the batch's function raised {type(error).__name__}")] * len(batch)
        for (request, _), result in zip(batch, results, strict=True):
            if isinstance(result, Exception):
                request.fail(result)
            else:
                request.finish(result)
        self._running = []
        self._start()
