"""Which way tensors take between GPUs: tried at the start, once for each pair of places that the plan connects.

The plan says which edges may hand tensors on by device (``cuda_ipc``). Whether this machine lets it is found out here,
before any process of the pipeline exists, and told: in the log, to each process with its spawn record, in ``/health``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from sgl_omni.runtime.visibility import Sight
from sgl_omni.topology.plan import InstancePlan, Plan

log = logging.getLogger("sgl_omni.routes")

PROBE_SECONDS = 30.0
AT_A_TIME = 4
"""Pairs that are tried at once; each takes two contexts on GPUs."""

Look = Callable[[InstancePlan], Sight]
"""What the process of an instance will see, its whole environment included."""
Probe = Callable[[Plan, InstancePlan, InstancePlan, Look], Awaitable[str]]
"""Whether memory of the first instance's device reaches the second's: "" or why not."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an instance computes; under MPS it sees that GPU alone, through a server."""

    device: int
    mps: bool

    def describe(self) -> str:
        return f"GPU {self.device}" + (" under MPS" if self.mps else "")


@dataclass(frozen=True, slots=True)
class Route:
    """From the processes of one place to those of another. `refusal`: why tensors go through host memory, or ""."""

    source: Place
    target: Place
    refusal: str

    def describe(self) -> dict[str, Any]:
        """As ``/health`` shows it."""
        by = "host" if self.refusal else "device"
        ends = {"from": self.source.describe(), "to": self.target.describe()}
        return {**ends, "by": by, "reason": self.refusal}


class Routes:
    """The routes of one plan; none until ``find``."""

    def __init__(self, plan: Plan, probe: Probe | None = None) -> None:
        self._plan = plan
        self._probe = probe or probe_route
        self.all: tuple[Route, ...] = ()

    async def find(self, look: Look) -> None:
        """Tries each pair of places that an edge with ``cuda_ipc`` connects."""
        limit = asyncio.Semaphore(AT_A_TIME)

        async def try_one(ends: tuple[InstancePlan, InstancePlan]) -> Route:
            async with limit:
                refusal = await self._probe(self._plan, *ends, look)
            return Route(_place(ends[0]), _place(ends[1]), refusal)

        self.all = tuple(await asyncio.gather(*(try_one(ends) for ends in _pairs(self._plan))))
        for route in self.all:
            ends = f"{route.source.describe()} to {route.target.describe()}"
            if route.refusal:
                log.warning("tensors from %s go through host memory: %s", ends, route.refusal)
            else:
                log.info("tensors from %s go by device memory", ends)

    def by_host_from(self, instance: InstancePlan) -> list[str]:
        """The instances to which this one's tensors have to go through host memory."""
        if instance.device is None:
            return []
        here = _place(instance)
        refused = {route.target for route in self.all if route.source == here and route.refusal}
        return [i.name for i in self._plan.instances if i.device is not None and _place(i) in refused]


def _place(instance: InstancePlan) -> Place:
    assert instance.device is not None
    return Place(instance.device, instance.mps)


def _pairs(plan: Plan) -> Iterable[tuple[InstancePlan, InstancePlan]]:
    """For each pair of places one pair of instances that an edge connects."""
    found: dict[tuple[Place, Place], tuple[InstancePlan, InstancePlan]] = {}
    for edge in plan.edges:
        if edge.transport != "cuda_ipc":
            continue
        for source in plan.instances_of(plan.stage(edge.source).process):
            for target in plan.instances_of(plan.stage(edge.target).process):
                if source.rank == target.rank == 0 and source.device is not None and target.device is not None:
                    found.setdefault((_place(source), _place(target)), (source, target))
    return found.values()


async def probe_route(plan: Plan, source: InstancePlan, target: InstancePlan, look: Look) -> str:
    """Runs the two ends of ``gpu/peer_probe.py`` with the environments of these instances."""
    ours, theirs = socket.socketpair()
    try:
        maker = await _start("make", ours, plan, look(source))
        try:
            opener = await _start("open", theirs, plan, look(target))
        except BaseException:
            _kill(maker)
            raise
    finally:
        ours.close()
        theirs.close()
    try:
        (made, made_log), (opened, opened_log) = await asyncio.wait_for(
            asyncio.gather(maker.communicate(), opener.communicate()), PROBE_SECONDS
        )
    except TimeoutError:
        return f"the trial did not end within {PROBE_SECONDS:g} s"
    finally:
        for process in (maker, opener):
            _kill(process)
            await process.wait()
    return _verdict(made, made_log, maker) or _verdict(opened, opened_log, opener)


async def _start(end: str, sock: socket.socket, plan: Plan, seen: Sight) -> Process:
    command = [sys.executable, "-m", "sgl_omni.gpu.peer_probe", "--end", end]
    command += ["--fd", str(sock.fileno()), "--parent", str(os.getpid())]
    if plan.platform == "cuda":
        command += ["--ordinal", str(seen.device)]
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=PIPE,
        env=seen.environment,
        pass_fds=(sock.fileno(),),
        start_new_session=True,
    )


def _verdict(printed: bytes, logged: bytes, process: Process) -> str:
    if process.returncode or not printed:
        last = logged.decode(errors="replace").strip().splitlines()[-1:]
        return f"the trial ended with status {process.returncode}" + (f": {last[0]}" if last else "")
    refusal: str = json.loads(printed)["refusal"]
    return refusal


def _kill(process: Process) -> None:
    if process.returncode is None:
        process.kill()
