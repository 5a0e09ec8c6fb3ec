"""Looks after workers: asks each for its health, and for its load where the policy looks at that."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass

from sgl_omni.router.fetch import FetchError, fetch
from sgl_omni.router.health import State
from sgl_omni.router.load import parse_load
from sgl_omni.router.workers import Worker

log = logging.getLogger("sgl_omni.router")


@dataclass(frozen=True, slots=True)
class Probing:
    """Seconds between two looks at a worker, and how long it may take to answer."""

    path: str = "/health"
    interval: float = 2.0
    timeout: float = 2.0
    load_interval: float = 0.5


class Probe:
    """The tasks of one worker, from its registration to its removal."""

    def __init__(self, worker: Worker, probing: Probing, *, reads_load: bool) -> None:
        self._worker = worker
        self._probing = probing
        self._tasks = [asyncio.ensure_future(self._watch_health())]
        if reads_load:
            self._tasks.append(asyncio.ensure_future(self._watch_load()))

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _watch_health(self) -> None:
        worker = self._worker
        while True:
            worker.probe_now.clear()
            before = worker.health.state
            await self._look()
            after = worker.health.state
            if after is not before or (before is State.STARTING and after is State.UP):
                log.info(
                    "worker %s is %s%s", worker.address.url, after, f": {r}" if (r := worker.health.reason) else ""
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._probing.interval):
                    await worker.probe_now.wait()

    async def _look(self) -> None:
        """503 means that the worker is not ready, by its own word; any other answer that it lives."""
        worker, probing = self._worker, self._probing
        place = (worker.address.host, worker.address.port)
        try:
            found = await fetch(place, "GET", probing.path, seconds=probing.timeout)
        except FetchError as error:
            if error.refused:
                worker.health.refused(str(error))
            else:
                worker.health.failed(str(error))
            return
        if found.status == 503:
            worker.health.failed(f"its {probing.path} says that it is not ready (503)")
        else:
            worker.health.probe_succeeded()

    async def _watch_load(self) -> None:
        worker, probing = self._worker, self._probing
        place = (worker.address.host, worker.address.port)
        while True:
            try:
                found = await fetch(place, "GET", "/metrics", seconds=probing.timeout)
            except FetchError:
                worker.load = None  # what it said before is no longer true; its health is the other task's matter
            else:
                worker.load = parse_load(found.body, worker.in_flight) if found.status == 200 else None
            await asyncio.sleep(probing.load_interval)
