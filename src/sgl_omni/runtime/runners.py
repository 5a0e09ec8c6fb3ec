"""Runs the four kinds of stage inside a worker: queues, threads and order, the same for every model.

A runner gets `submit` with a request's payload (for a stream stage also `chunk` and `end`), and ends every request
with exactly one call of `finish` or `fail` on its `StageRequest`, or with `discard` once it noticed an abort.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from sgl_omni.engine.interface import EngineOutput
from sgl_omni.errors import PayloadError
from sgl_omni.runtime.requests import StageRequest
from sgl_omni.runtime.stage import BatchStage, EngineStage, FunctionStage, Payload, Stage, StreamStage

log = logging.getLogger("sgl_omni.stage")
T = TypeVar("T")
_END: Payload = {}

EXIT_ENGINE_FAILED = 70
"""Exit status of a process whose engine raised where it must not: in `abort`, `stats` or `has_work`."""


class Runner(ABC):
    """Drives one stage of this process."""

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

    def close(self) -> None:  # noqa: B027 - not every kind holds threads
        """The process ends."""


def runner_for(stage: Stage, name: str) -> Runner:
    """Raises TypeError when a factory returned something that is no stage."""
    if isinstance(stage, FunctionStage):
        asynchronous = inspect.iscoroutinefunction(stage.fn)
        return AsyncFunctionRunner(stage) if asynchronous else ThreadFunctionRunner(stage, name)
    if isinstance(stage, BatchStage):
        return BatchRunner(stage, name)
    if isinstance(stage, StreamStage):
        return StreamRunner(stage, name)
    if isinstance(stage, EngineStage):
        return EngineRunner(stage, name)
    raise TypeError(
        f"the factory of stage '{name}' returned a {type(stage).__name__}; "
        "return a FunctionStage, BatchStage, StreamStage or EngineStage"
    )


class FunctionRunner(Runner):
    """At most `concurrency` calls in progress; the rest wait in order."""

    def __init__(self, stage: FunctionStage) -> None:
        self._stage = stage
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
        if request.aborted:
            request.discard()
        elif task.cancelled():
            request.fail(RuntimeError("the stage's function was cancelled from within"))
        elif isinstance(error := task.exception(), Exception):
            request.fail(error)
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
        result: Any = await loop.run_in_executor(self._pool, self._stage.fn, payload, request)
        if inspect.isawaitable(result):  # a partial or a callable object around a coroutine function
            result = await result
        return result  # type: ignore[no-any-return]

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class BatchRunner(Runner):
    """Collects payloads and calls once for many; one call at a time, the next batch fills meanwhile."""

    def __init__(self, stage: BatchStage, name: str) -> None:
        self._stage = stage
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

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

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
                outcome = await asyncio.get_running_loop().run_in_executor(self._pool, self._stage.fn, payloads)
            results = list(outcome)
            if len(results) != len(batch):
                raise ValueError(f"a batch of {len(batch)} payloads came back as {len(results)}")
        except Exception as error:  # noqa: BLE001 - the author's code failed for every request of the batch
            results = [error] * len(batch)
        for (request, _), result in zip(batch, results, strict=True):
            if isinstance(result, Exception):
                request.fail(result)
            else:
                request.finish(result)
        self._running = []
        self._start()


class _StreamWork:
    """What a stream stage holds for one request."""

    __slots__ = ("ended", "events", "opened", "payload", "state", "task")

    def __init__(self) -> None:
        self.events: deque[tuple[str, Payload | None]] = deque()
        self.opened = False
        self.ended = False  # closing: what still arrives is dropped
        self.state: Any = None
        self.payload: Payload | None = None
        self.task: asyncio.Task[None] | None = None


class StreamRunner(Runner):
    """Feeds chunks to per-request state, in order for one request and in parallel for several."""

    def __init__(self, stage: StreamStage[Any], name: str) -> None:
        self._stage = stage
        self._pool = ThreadPoolExecutor(stage.concurrency, thread_name_prefix=name)
        self._work: dict[StageRequest, _StreamWork] = {}

    def submit(self, request: StageRequest, payload: Payload) -> None:
        work = self._of(request)
        work.payload = payload
        if not request.open_streams():
            self._event(request, "end", None)

    def chunk(self, request: StageRequest, source: str, chunk: Payload) -> None:
        self._event(request, source, chunk)

    def end(self, request: StageRequest) -> None:
        if self._of(request).payload is not None or not request.expects_payload():
            self._event(request, "end", None)

    def gauges(self) -> dict[str, float]:
        return {"running": len(self._work), "queued": sum(len(w.events) for w in self._work.values())}

    def abort(self, request: StageRequest) -> None:
        work = self._work.get(request)
        if work is None:
            request.discard()
        elif work.task is None and not work.ended:
            work.task = asyncio.create_task(self._drive(request, work))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _of(self, request: StageRequest) -> _StreamWork:
        return self._work.setdefault(request, _StreamWork())

    def _event(self, request: StageRequest, source: str, chunk: Payload | None) -> None:
        work = self._of(request)
        if work.ended:
            return
        work.events.append((source, chunk))
        if work.task is None:
            work.task = asyncio.create_task(self._drive(request, work))

    async def _drive(self, request: StageRequest, work: _StreamWork) -> None:
        """Works off the events that are there; ends the request at "end", at an error or at an abort."""
        result: Payload | None = None
        failure: Exception | None = None
        try:
            while work.events and not request.aborted:
                source, chunk = work.events.popleft()
                if not work.opened:
                    work.state = await self._in_thread(self._stage.open, request)
                    work.opened = True
                if chunk is not None:
                    await self._emit_all(request, lambda c=chunk: self._stage.feed(work.state, c))  # type: ignore[misc]
                    request.acknowledge(source)
                    continue
                await self._emit_all(request, lambda: self._stage.flush(work.state))
                result = await self._in_thread(self._stage.result, work.state, work.payload or {})
        except Exception as error:  # noqa: BLE001 - whatever an author's code raises belongs to this request alone
            failure = error
        work.task = None
        if result is None and failure is None and not request.aborted:
            return
        work.ended = True
        work.events.clear()
        if work.opened:
            try:
                await self._in_thread(self._stage.close, work.state)
            except Exception as error:  # noqa: BLE001 - as above
                failure = failure or error
        del self._work[request]
        if failure is not None:
            request.fail(failure)
        elif result is not None:
            request.finish(result)
        else:
            request.discard()

    async def _emit_all(self, request: StageRequest, produce: Callable[[], Iterable[Payload]]) -> None:
        """Sends each chunk as soon as the stage yields it."""
        iterator: Iterator[Payload] | None = None

        def advance() -> Payload:
            nonlocal iterator
            if iterator is None:
                iterator = iter(produce())
            return next(iterator, _END)

        while not request.aborted and (item := await self._in_thread(advance)) is not _END:
            await request.emit(item)

    async def _in_thread(self, call: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call, *args)


class EngineRunner(Runner):
    """Owns the thread in which the engine lives; hands its outputs over in bulk, once a step."""

    STATS_INTERVAL = 1.0

    def __init__(self, stage: EngineStage, name: str) -> None:
        self._engine = stage.engine
        self._loop = asyncio.get_running_loop()
        self._requests: dict[str, StageRequest] = {}
        self._outbox: dict[str, deque[Payload | EngineOutput]] = {}
        self._pumps: dict[str, asyncio.Task[None]] = {}
        self._gauges: dict[str, float] = dict(stage.engine.stats())
        self._commands: deque[tuple[str, Payload | None]] = deque()
        self._inside: set[str] = set()  # ids that the engine holds; the engine thread's own
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run_or_die, name=f"{name}-engine", daemon=True)
        self._thread.start()

    def submit(self, request: StageRequest, payload: Payload) -> None:
        self._requests[request.id] = request
        self._command(request.id, payload)

    def abort(self, request: StageRequest) -> None:
        if self._requests.pop(request.id, None) is not None:
            self._command(request.id, None)
        self._forget(request.id)
        request.discard()

    def gauges(self) -> dict[str, float]:
        return self._gauges

    def close(self) -> None:
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def _command(self, request_id: str, payload: Payload | None) -> None:
        with self._wake:
            self._commands.append((request_id, payload))
            self._wake.notify()

    def _run_or_die(self) -> None:
        """Without this thread the process would look alive and answer nothing, so it ends with it, by name."""
        try:
            self._run()
        except BaseException:
            log.exception("the engine's thread failed, and this process ends with it")
            os._exit(EXIT_ENGINE_FAILED)

    def _run(self) -> None:
        """The engine thread: commands, then one step, for as long as there is work; else it sleeps."""
        reported = 0.0
        while True:
            with self._wake:
                while not self._commands and not self._engine.has_work and not self._stopping:
                    self._wake.wait()
                if self._stopping:
                    return
                commands = list(self._commands)
                self._commands.clear()
            outputs = self._obey(commands)
            if self._engine.has_work:
                outputs += self._step()
            now = time.monotonic()
            if now - reported >= self.STATS_INTERVAL or not self._engine.has_work:
                reported = now
                self._gauges = dict(self._engine.stats())
            if outputs:
                self._loop.call_soon_threadsafe(self._publish, outputs)

    def _obey(self, commands: list[tuple[str, Payload | None]]) -> list[EngineOutput]:
        outputs: list[EngineOutput] = []
        for request_id, payload in commands:
            if payload is None:
                self._engine.abort(request_id)
                self._inside.discard(request_id)
                continue
            try:
                self._engine.add(request_id, payload)
                self._inside.add(request_id)
            except Exception as error:  # noqa: BLE001 - a request that the engine refuses fails alone
                outputs.append(EngineOutput(request_id, error=error))
        return outputs

    def _step(self) -> list[EngineOutput]:
        try:
            outputs = list(self._engine.step())
        except Exception as error:
            log.exception("the engine's step failed; the requests in it fail, later ones go on")
            for request_id in self._inside:
                self._engine.abort(request_id)
            outputs = [EngineOutput(request_id, error=error) for request_id in self._inside]
        self._inside.difference_update(o.request_id for o in outputs if o.result is not None or o.error is not None)
        return outputs

    def _publish(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            request = self._requests.get(output.request_id)
            if request is None:
                continue  # aborted meanwhile
            items: list[Payload | EngineOutput] = list(output.chunks)
            if output.result is not None or output.error is not None:
                items.append(output)
            self._deliver(request, items)

    def _deliver(self, request: StageRequest, items: list[Payload | EngineOutput]) -> None:
        """At once while the receivers keep up, else through a task that waits for them."""
        waiting = self._outbox.get(request.id)
        if waiting is not None:
            waiting.extend(items)
            return
        for index, item in enumerate(items):
            if isinstance(item, EngineOutput):
                self._close_request(request, item)
            elif request.can_emit():
                if not self._emit_now(request, item):
                    return
            else:
                self._outbox[request.id] = deque(items[index:])
                self._pumps[request.id] = asyncio.create_task(self._pump(request))
                return

    async def _pump(self, request: StageRequest) -> None:
        waiting = self._outbox[request.id]
        while waiting:
            item = waiting.popleft()
            if isinstance(item, EngineOutput):
                self._close_request(request, item)
                return
            await request.wait_to_emit()
            if not self._emit_now(request, item):
                return
        self._forget(request.id, cancel=False)

    def _emit_now(self, request: StageRequest, chunk: Payload) -> bool:
        """False: the chunk cannot travel or its receiver is gone, and the request has failed for it."""
        try:
            request.emit_now(chunk)
        except (PayloadError, OSError) as error:
            self._command(request.id, None)
            self._close_request(request, EngineOutput(request.id, error=error))
            return False
        return True

    def _close_request(self, request: StageRequest, output: EngineOutput) -> None:
        self._requests.pop(request.id, None)
        self._forget(request.id, cancel=False)
        if output.error is not None:
            request.fail(output.error)
        elif output.result is not None:
            request.finish(output.result)

    def _forget(self, request_id: str, *, cancel: bool = True) -> None:
        self._outbox.pop(request_id, None)
        pump = self._pumps.pop(request_id, None)
        if pump is not None and cancel:
            pump.cancel()
