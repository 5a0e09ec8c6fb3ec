"""Runs a stream stage: per-request state that is fed by chunks."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from sgl_omni.runtime.requests import StageRequest
from sgl_omni.runtime.runners import Runner, call_author
from sgl_omni.runtime.stage import Payload, StreamStage

T = TypeVar("T")
_END: Payload = {}

TURN_SECONDS = 0.005
"""How long a request with nothing to send on keeps its thread, which others wait for."""


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


class _Made(ABC):
    """What a stage makes, a part at a time: a thread's work, with as few changes of thread as it can be.

    ``taken``: the sources of the chunks that were consumed and not acknowledged yet.
    """

    def __init__(self) -> None:
        self.taken: list[str] = []
        self._source = ""
        self._iterator: Iterator[Payload] | None = None

    def advance(self) -> tuple[Sequence[Payload], bool]:
        """The next chunks, and whether a further call may bring more at once.

        Runs until there is one, no input is left, or the request has had its turn.

        What the stage gives as a list is all that it makes of its input; anything else may go on after each chunk.
        """
        end = time.monotonic() + TURN_SECONDS
        while time.monotonic() < end:
            if self._iterator is None:
                if not self._has_next():
                    return (), False
                made = self._next()
                if isinstance(made, list | tuple):
                    self._end()
                    if made:
                        return made, False
                    continue
                self._iterator = iter(made)
            item = next(self._iterator, _END)
            if item is not _END:
                return (item,), True
            self._iterator = None
            self._end()
        return (), True

    def _end(self) -> None:
        if self._source:
            self.taken.append(self._source)

    @abstractmethod
    def _has_next(self) -> bool: ...

    @abstractmethod
    def _next(self) -> Iterable[Payload]: ...


class _Fed(_Made):
    """Of the chunks that have come of a request, as long as there are any."""

    def __init__(self, stage: StreamStage[Any], request: StageRequest, work: _StreamWork) -> None:
        super().__init__()
        self._stage = stage
        self._request = request
        self._work = work

    def _has_next(self) -> bool:
        events = self._work.events
        return not self._request.aborted and bool(events) and events[0][1] is not None

    def _next(self) -> Iterable[Payload]:
        self._source, chunk = self._work.events.popleft()
        assert chunk is not None
        return self._stage.feed(self._work.state, chunk)


class _Flushed(_Made):
    """Of the end of the streams."""

    def __init__(self, stage: StreamStage[Any], state: Any) -> None:
        super().__init__()
        self._stage = stage
        self._state = state
        self._is_flushed = False

    def _has_next(self) -> bool:
        return not self._is_flushed

    def _next(self) -> Iterable[Payload]:
        self._is_flushed = True
        return self._stage.flush(self._state)


class StreamRunner(Runner):
    """Feeds chunks to per-request state, in order for one request and in parallel for several."""

    def __init__(self, stage: StreamStage[Any], name: str) -> None:
        self._stage = stage
        self._rehearsal = stage.rehearsal
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
                if not work.opened:
                    work.state = await self._in_thread(self._stage.open, request)
                    work.opened = True
                if work.events[0][1] is not None:
                    await self._emit_all(request, _Fed(self._stage, request, work))
                    continue
                work.events.popleft()
                await self._emit_all(request, _Flushed(self._stage, work.state))
                result = await self._in_thread(self._stage.result, work.state, work.payload or {})
                if result is None:
                    raise TypeError("the stage's `result` returned None where a payload (dict) was expected")
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

    async def _emit_all(self, request: StageRequest, work: _Made) -> None:
        """Sends each chunk as soon as the stage yields it."""
        more = True
        while more and not request.aborted:
            items, more = await self._in_thread(work.advance)
            for source in work.taken:
                request.acknowledge(source)
            work.taken.clear()
            for item in items:
                await request.emit(item)

    async def _in_thread(self, call: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call_author, call, *args)
