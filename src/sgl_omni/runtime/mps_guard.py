"""Keeps a running pipeline on CUDA MPS: daemons before its processes, proof that they attached, and a watch on them."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

from sgl_omni.gpu.devices import GpuFacts
from sgl_omni.gpu.mps import MpsDaemon, MpsError, clean
from sgl_omni.topology.plan import InstancePlan, Plan

log = logging.getLogger("sgl_omni.mps")

ATTACH_FILE = "mps_attach.json"

OnServerDeath = Callable[[int, set[str]], None]
P = ParamSpec("P")
T = TypeVar("T")


def client_limits(instance: InstancePlan) -> dict[str, str]:
    """What the plan limits a client to, as the driver reads it; its only GPU is device 0."""
    limits = {}
    if instance.mps_thread_percentage is not None:
        limits["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(instance.mps_thread_percentage)
    if instance.mps_memory_limit is not None:
        limits["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={max(1, instance.mps_memory_limit // 2**20)}M"
    return limits


class MpsGuard:
    """The daemons of one plan's GPUs.

    Blocking calls to the control program run one after another in a thread of their own: whoever waits for one may be
    cancelled, and the release still comes after it.
    """

    def __init__(
        self,
        plan: Plan,
        root: Path,
        run_dir: Path,
        facts: Callable[[int], GpuFacts],
        on_server_death: OnServerDeath,
    ) -> None:
        """`facts(ordinal)` asks the driver; `on_server_death(pid, instances)` is called when a server is gone."""
        self._plan = plan
        self._root = root
        self._run_dir = run_dir
        self._facts = facts
        self._on_server_death = on_server_death
        self._daemons: dict[int, MpsDaemon] = {}
        self._gpu_of = {name: gpu for gpu, names in plan.mps.items() for name in names}
        self._attached: dict[int, dict[int, dict[int, str]]] = {}
        self._watched: dict[int, int] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mps")
        self._ending = threading.Event()

    async def acquire(self) -> None:
        """Joins or starts the daemon of each GPU; a failure gives back those already had.

        Raises:
            MpsError, StartupError: why MPS cannot be used on a GPU.
        """
        await self._in_thread(self._tidy)
        for gpu in self._plan.mps:
            try:
                await self._in_thread(self._acquire_one, gpu)
            except BaseException:
                await self.release()
                raise

    def _tidy(self) -> None:
        """Ends what servers that were killed have left, also where this plan uses no MPS."""
        if not self._root.is_dir():
            return
        try:
            for uuid, outcome in clean(self._root):
                log.info("MPS daemon of GPU %s: %s", uuid, outcome)
        except MpsError as error:
            log.warning("MPS: %s", error)

    def _acquire_one(self, gpu: int) -> None:
        facts = self._facts(gpu)
        daemon = MpsDaemon(self._root, facts.uuid, self._run_dir.name)
        daemon.acquire(list(facts.compute_pids))
        self._daemons[gpu] = daemon

    def environment(self, instance: InstancePlan) -> dict[str, str]:
        """What a client's process needs: the daemon's folders, its GPU as the only one, and what limits it."""
        gpu = self._gpu_of.get(instance.name)
        if gpu is None:
            return {}
        daemon = self._daemons[gpu]
        return daemon.control.environment | {"CUDA_VISIBLE_DEVICES": daemon.uuid} | client_limits(instance)

    async def verify(self, pids: dict[str, int]) -> None:
        """Proves that every client among `pids` ({instance: pid}) is attached, records it and watches the servers.

        Raises:
            MpsError: names the processes that are not attached.
        """
        for gpu, daemon in self._daemons.items():
            expected = {pids[name]: name for name in self._plan.mps[gpu] if name in pids}
            self._attached[gpu] = await self._in_thread(daemon.verify, expected, self._ending.is_set)
            for server in self._attached[gpu]:
                self._watch(gpu, server)
        record = {self._daemons[gpu].uuid: servers for gpu, servers in self._attached.items()}
        (self._run_dir / ATTACH_FILE).write_text(json.dumps(record, indent=1))

    def _watch(self, gpu: int, server: int) -> None:
        if server in self._watched:
            return
        try:
            pidfd = os.pidfd_open(server)
        except ProcessLookupError:
            self._server_died(gpu, server)
            return
        self._watched[server] = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._server_died, gpu, server)

    def _server_died(self, gpu: int, server: int) -> None:
        self._unwatch(server)
        clients = self._attached.get(gpu, {}).pop(server, {})
        log.error("the MPS server %d of GPU %s died with its clients %s", server, gpu, sorted(clients.values()))
        self._on_server_death(server, set(clients.values()))

    def _unwatch(self, server: int) -> None:
        pidfd = self._watched.pop(server, None)
        if pidfd is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)

    def stop_watching(self) -> None:
        """The pipeline ends on purpose: what its daemons do from here is no failure."""
        self._ending.set()
        for server in list(self._watched):
            self._unwatch(server)

    async def release(self) -> None:
        """Gives every daemon back, after the clients are gone; what had to be left running is told in the log."""
        self.stop_watching()
        await self._in_thread(self._release_all)

    def _release_all(self) -> None:
        while self._daemons:
            _, daemon = self._daemons.popitem()
            left = daemon.release()
            if left is not None:
                log.warning("MPS: %s", left)

    async def _in_thread(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(call, *args, **kwargs))
