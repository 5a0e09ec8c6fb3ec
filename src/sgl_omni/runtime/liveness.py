"""Notices processes that live and do not answer: stopped, or stuck in a call that never returns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from sgl_omni.runtime.instance import Instance
from sgl_omni.runtime.messages import StatsQuery

PROBES = 4
"""How often an instance is asked within the time that it may be silent."""

LONGEST_INTERVAL = 5.0

STEP_GAUGE = "step_seconds"
"""Engines report under this name how long the step in progress has lasted."""


class Liveness:
    """Asks every ready instance for its gauges and gives up on one that says nothing for `timeout` seconds.

    Any message counts as an answer. An engine whose step lasts longer than `step_timeout` is given up too: every
    request in it is over by then. What this process itself missed, because it was stopped say, is held against nobody.
    """

    def __init__(
        self,
        instances: Iterable[Instance],
        give_up: Callable[[Instance, str], None],
        *,
        timeout: float,
        step_timeout: float | None,
    ) -> None:
        self._instances = tuple(instances)
        self._give_up = give_up
        self._timeout = timeout
        self._step_timeout = step_timeout
        self._interval = min(timeout / PROBES, LONGEST_INTERVAL)

    async def watch(self) -> None:
        """Runs until it is cancelled."""
        before = time.monotonic()
        for instance in self._instances:
            instance.heard = before
        while True:
            await asyncio.sleep(self._interval)
            now = time.monotonic()
            missed, before = now - before - self._interval, now
            for instance in self._instances:
                if instance.state == "ready" and instance.channel is not None:
                    instance.heard += missed
                    self._look_at(instance)
                    instance.channel.send(StatsQuery())

    def _look_at(self, instance: Instance) -> None:
        silent = time.monotonic() - instance.heard
        if silent > self._timeout:
            self._give_up(instance, f" because it did not answer for {silent:.0f} s")
            return
        steps = {name: value for name, value in instance.gauges.items() if name.endswith(f".{STEP_GAUGE}")}
        for name, seconds in steps.items():
            if self._step_timeout is not None and seconds > self._step_timeout:
                stage = name.removesuffix(f".{STEP_GAUGE}")
                self._give_up(instance, f" because a step of '{stage}' did not end within {seconds:.0f} s")
                return
