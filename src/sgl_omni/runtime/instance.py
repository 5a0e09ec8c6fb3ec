"""What the supervisor knows of the OS processes that it runs, and of those among them that live and die together."""

from __future__ import annotations

import asyncio
import secrets
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sgl_omni.errors import StartupError
from sgl_omni.runtime.channel import Channel
from sgl_omni.runtime.logs import LogTap
from sgl_omni.runtime.messages import GroupLink, StartFailed
from sgl_omni.topology.plan import InstancePlan

State = Literal["waiting", "starting", "ready", "restarting", "stopping", "exited"]

FIRST_BACKOFF = 0.5


@dataclass(eq=False)
class Instance:
    """One OS process of the plan: what it is, and how it is now."""

    plan: InstancePlan
    state: State = "waiting"
    process: subprocess.Popen[bytes] | None = None
    channel: Channel | None = None
    tap: LogTap | None = None
    pidfd: int = -1
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    spawned: float = 0.0
    start: dict[str, float] = field(default_factory=dict[str, float])
    """Where the seconds of its last start went; see `start_times`."""
    gauges: dict[str, float] = field(default_factory=dict[str, float])
    asked: asyncio.Future[None] | None = None
    heard: float = 0.0
    restarts: int = 0
    failed_start: StartFailed | None = None
    doom: str = ""

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None and self.state not in ("exited", "restarting") else None

    def last_lines(self) -> str:
        lines = self.tap.lines if self.tap is not None else ()
        return "".join(f"\n    {line}" for line in lines)


@dataclass(eq=False)
class RankGroup:
    """The ranks of one replica of a Process: they start together and end together. Most groups are one rank alone.

    `fallen`: one of them has ended, so the others do.
    """

    members: tuple[Instance, ...]
    ready: asyncio.Future[None] | None = None
    up: asyncio.Event = field(default_factory=asyncio.Event)
    backoff: float = FIRST_BACKOFF
    ready_since: float = 0.0
    fallen: bool = False

    @property
    def first(self) -> Instance:
        """Rank 0, the only one that requests and the coordinator know."""
        return self.members[0]

    @property
    def label(self) -> str:
        return ", ".join(f"'{member.name}'" for member in self.members)

    @property
    def is_ready(self) -> bool:
        return all(member.state == "ready" for member in self.members)

    def blame(self, culprit: Instance, how: str) -> str:
        """What became of rank 0's requests when `culprit` ended."""
        return how if culprit is self.first else f"ended because its rank '{culprit.name}' {how}"

    async def ended(self) -> None:
        """Returns when no process of the group is left."""
        await asyncio.gather(*(member.gone.wait() for member in self.members if member.process is not None))


def rank_groups(instances: Iterable[Instance]) -> tuple[RankGroup, ...]:
    """Those of one replica of a Process together, rank 0 first."""
    members: dict[tuple[str, int], list[Instance]] = {}
    for instance in instances:
        members.setdefault((instance.plan.process, instance.plan.replica), []).append(instance)
    return tuple(RankGroup(tuple(sorted(ranks, key=lambda i: i.plan.rank))) for ranks in members.values())


async def those_late(
    waiting: Mapping[RankGroup, asyncio.Future[None]],
    end_of: Callable[[RankGroup], float],
    failure: asyncio.Future[str],
) -> list[Instance]:
    """Empty when all that start are ready, else those that still start when their time is up.

    ``end_of``: when that is, by ``time.monotonic``; it may change while others become ready. One that cannot start ends
    this at once with its ``StartupError``, of several the one that was to start first, and so does ``failure``.
    """
    pending = dict(waiting)
    while pending:
        ends = {group: end_of(group) for group in pending}
        left = min(ends.values()) - time.monotonic()
        watched: set[asyncio.Future[Any]] = {*pending.values(), failure}
        done, _ = await asyncio.wait(watched, timeout=max(left, 0.0), return_when=asyncio.FIRST_COMPLETED)
        if failure.done():
            raise StartupError(failure.result())
        if not done:
            late = [group for group, end in ends.items() if end <= time.monotonic()]
            return [member for group in late for member in group.members if member.state == "starting"]
        for group, ready in list(pending.items()):
            if ready in done:
                ready.result()
                del pending[group]
    return []


class GroupSockets:
    """What the ranks of a group inherit to reach each other; closed here once each has its own.

    Bound and connected before any rank exists, so there is no address to agree on, and no port that another process
    could take in between.
    """

    def __init__(self, size: int) -> None:
        self._store = socket.create_server(("127.0.0.1", 0), backlog=size)
        self._pairs = [socket.socketpair() for _ in range(size - 1)]
        self._seed = secrets.randbits(31)

    def link(self, rank: int) -> GroupLink:
        port: int = self._store.getsockname()[1]
        if rank:
            return GroupLink(port, -1, [self._pairs[rank - 1][1].fileno()], self._seed)
        return GroupLink(port, self._store.fileno(), [ours.fileno() for ours, _ in self._pairs], self._seed)

    @property
    def environment(self) -> dict[str, str]:
        """Ranks hash alike, so that the order of a set is the same in each, and talk over the loopback interface."""
        return {"PYTHONHASHSEED": str(self._seed), "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}

    def close(self) -> None:
        self._store.close()
        for pair in self._pairs:
            for end in pair:
                end.close()
