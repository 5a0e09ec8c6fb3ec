"""Runs an engine stage: the engine in a thread of its own, its outputs on the event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Literal, NamedTuple

from sgl_omni.engine.interface import EngineOutput, FedEngine
from sgl_omni.runtime.liveness import STEP_GAUGE
from sgl_omni.runtime.requests import StageRequest
from sgl_omni.runtime.runners import Runner
from sgl_omni.runtime.stage import EngineStage, Payload

log = logging.getLogger("sgl_omni.engine")

_OPEN = "input_open"
"""Marks the payload of a request whose input goes on arriving."""

EXIT_ENGINE_FAILED = 70
"""Exit status of a process whose engine raised where it must not: in `abort`, `stats` or `has_work`."""


class _Command(NamedTuple):
    """What the engine thread is told. ``source``: the stage whose chunk this is, to be acknowledged when taken."""

    kind: Literal["add", "extend", "finish", "abort"]
    request: StageRequest
    payload: Payload
    source: str | None = None


@dataclass(slots=True)
class _Input:
    """What has come of a request's input: its payload, and the engine's result where that was sooner than the rest."""

    has_payload: bool
    result: EngineOutput | None = None


class EngineRunner(Runner):
    """Owns the thread in which the engine lives; hands its outputs over in bulk, once a step.

    Where streams lead to the stage, a request begins with the first that arrives, chunk or payload, marked
    ``input_open`` while more is to come; what follows extends its input, and the end of all of it closes it.
    """

    STATS_INTERVAL = 0.25

    def __init__(self, stage: EngineStage, name: str) -> None:
        self._engine = stage.engine
        self._loop = asyncio.get_running_loop()
        self._requests: dict[str, StageRequest] = {}
        self._outbox: dict[str, deque[Payload | EngineOutput]] = {}
        self._pumps: dict[str, asyncio.Task[None]] = {}
        self._gauges: dict[str, float] = dict(stage.engine.stats())
        self._commands: deque[_Command] = deque()
        self._inputs: dict[str, _Input] = {}
        self._step_began: float | None = None
        self._inside: set[str] = set()  # ids that the engine holds; the engine thread's own
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run_or_die, name=f"{name}-engine", daemon=True)
        self._thread.start()

    @property
    def takes_streams(self) -> bool:
        return isinstance(self._engine, FedEngine)

    def submit(self, request: StageRequest, payload: Payload) -> None:
        found = self._inputs.get(request.id)
        if found is None:
            self._begin(request, payload, _Input(has_payload=True))
            return
        found.has_payload = True
        if found.result is None:
            self._command(_Command("extend", request, payload))
        self._end_of_input(request, found)

    def chunk(self, request: StageRequest, source: str, chunk: Payload) -> None:
        found = self._inputs.get(request.id)
        if found is None:
            self._begin(request, chunk, _Input(has_payload=False), source)
        elif found.result is None:
            self._command(_Command("extend", request, chunk, source))
        else:
            request.acknowledge(source)  # the engine needed no more of it

    def end(self, request: StageRequest) -> None:
        found = self._inputs.get(request.id)
        if found is not None:
            self._end_of_input(request, found)
        elif not request.expects_payload():
            self._begin(request, {}, _Input(has_payload=False))

    def abort(self, request: StageRequest) -> None:
        self._inputs.pop(request.id, None)
        if self._requests.pop(request.id, None) is not None:
            self._command(_Command("abort", request, {}))
        self._forget(request.id)
        request.discard()

    def gauges(self) -> dict[str, float]:
        began = self._step_began
        return {**self._gauges, STEP_GAUGE: 0.0 if began is None else time.monotonic() - began}

    def close(self) -> None:
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def _begin(self, request: StageRequest, payload: Payload, found: _Input, source: str | None = None) -> None:
        self._requests[request.id] = request
        self._inputs[request.id] = found
        more = not _is_complete(request, found)
        self._command(_Command("add", request, {**payload, _OPEN: True} if more else payload, source))

    def _end_of_input(self, request: StageRequest, found: _Input) -> None:
        if not _is_complete(request, found):
            return
        if found.result is None:
            self._command(_Command("finish", request, {}))
        else:
            self._close_request(request, found.result)

    def _command(self, command: _Command) -> None:
        with self._wake:
            self._commands.append(command)
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

    def _obey(self, commands: list[_Command]) -> list[EngineOutput]:
        outputs: list[EngineOutput] = []
        for command in commands:
            if command.kind == "abort":
                self._engine.abort(command.request.id)
                self._inside.discard(command.request.id)
                continue
            try:
                self._take(command)
            except Exception as error:  # noqa: BLE001 - a request that the engine refuses fails alone
                self._engine.abort(command.request.id)  # whatever it had taken of it before
                self._inside.discard(command.request.id)
                outputs.append(EngineOutput(command.request.id, error=error))
        taken = [(c.request, c.source) for c in commands if c.source is not None]
        if taken:
            self._loop.call_soon_threadsafe(self._acknowledge, taken)
        return outputs

    def _take(self, command: _Command) -> None:
        request_id, payload = command.request.id, command.payload
        if command.kind == "add":
            self._engine.add(request_id, payload)
            self._inside.add(request_id)
        elif request_id in self._inside and isinstance(self._engine, FedEngine):
            if command.kind == "extend":
                self._engine.extend(request_id, payload)
            else:
                self._engine.finish_input(request_id)

    def _acknowledge(self, taken: list[tuple[StageRequest, str]]) -> None:
        for request, source in taken:
            if not request.aborted and request.id in self._requests:
                request.acknowledge(source)

    def _step(self) -> list[EngineOutput]:
        self._step_began = time.monotonic()
        try:
            outputs = list(self._engine.step())
        except Exception as error:
            log.exception("the engine's step failed; the requests in it fail, later ones go on")
            for request_id in self._inside:
                self._engine.abort(request_id)
            outputs = [EngineOutput(request_id, error=error) for request_id in self._inside]
        finally:
            self._step_began = None
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
            elif request.can_emit(item):
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
            await request.wait_to_emit(item)
            if not self._emit_now(request, item):
                return
        self._forget(request.id, cancel=False)

    def _emit_now(self, request: StageRequest, chunk: Payload) -> bool:
        """False: the chunk cannot travel or its receiver is gone, and the request has failed for it."""
        try:
            request.emit_now(chunk)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one chunk belongs to its request
            self._command(_Command("abort", request, {}))
            self._close_request(request, EngineOutput(request.id, error=error))
            return False
        return True

    def _close_request(self, request: StageRequest, output: EngineOutput) -> None:
        found = self._inputs.get(request.id)
        if output.error is None and found is not None and not _is_complete(request, found):
            found.result = output  # what still arrives belongs to this request, and has to be taken
            self._forget(request.id, cancel=False)
            return
        self._requests.pop(request.id, None)
        self._inputs.pop(request.id, None)
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


def _is_complete(request: StageRequest, found: _Input) -> bool:
    """Whether no more of the request's input is to come."""
    return not request.open_streams() and (found.has_payload or not request.expects_payload())
