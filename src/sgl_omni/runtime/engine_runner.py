"""Runs an engine stage: the engine in a thread of its own, its outputs on the event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import deque

from sgl_omni.engine.interface import EngineOutput
from sgl_omni.runtime.requests import StageRequest
from sgl_omni.runtime.runners import Runner
from sgl_omni.runtime.stage import EngineStage, Payload

log = logging.getLogger("sgl_omni.engine")

EXIT_ENGINE_FAILED = 70
"""Exit status of a process whose engine raised where it must not: in `abort`, `stats` or `has_work`."""


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
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one chunk belongs to its request
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
