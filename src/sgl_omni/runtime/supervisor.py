"""Turns a Plan into running processes and keeps the promise that none outlives the server."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable

from sgl_omni.errors import StartupError, WeightShareError
from sgl_omni.gpu.devices import GpuFacts, gpu_facts
from sgl_omni.gpu.mps import MpsError
from sgl_omni.run_folder import base_folder
from sgl_omni.runtime.capacity import unequal_capacity
from sgl_omni.runtime.channel import Channel
from sgl_omni.runtime.child import describe_exit, kill_group, start_child
from sgl_omni.runtime.coordinator import Coordinator
from sgl_omni.runtime.instance import FIRST_BACKOFF, GroupSockets, Instance, RankGroup, rank_groups, those_late
from sgl_omni.runtime.liveness import Liveness
from sgl_omni.runtime.logs import LogTap
from sgl_omni.runtime.messages import GroupLink, Message, Ready, Spawn, StartFailed, Stats, StatsQuery, Stop
from sgl_omni.runtime.mps_guard import MpsGuard
from sgl_omni.runtime.routes import Probe, Routes
from sgl_omni.runtime.rundir import RunDir
from sgl_omni.runtime.segments import Allowance, machine_share
from sgl_omni.runtime.start_times import in_words, start_times
from sgl_omni.runtime.visibility import Sight, sight
from sgl_omni.runtime.weight_keeper import WeightKeeper
from sgl_omni.runtime.weight_loans import WeightLoans
from sgl_omni.topology.mps import VISIBILITY
from sgl_omni.topology.plan import InstancePlan, Plan

log = logging.getLogger("sgl_omni.supervisor")

STOP_SECONDS = 1.0
"""What a worker gets to end by itself before it is killed."""

STATS_SECONDS = 1.0

DEFAULT_LIVENESS = 60.0

MAX_BACKOFF = 30.0
STEADY_SECONDS = 60.0
"""A process that lived this long starts its next restart without back-off from earlier ones."""


class Supervisor:
    """Spawns, watches, restarts and ends the instances of one plan.

    `failure` completes with the reason when the pipeline must stop: a process died under `on_process_exit: stop`.
    """

    def __init__(
        self,
        plan: Plan,
        coordinator: Coordinator,
        run_dir: RunDir,
        facts: Callable[[int], GpuFacts] = gpu_facts,
        *,
        liveness_timeout: float | None = DEFAULT_LIVENESS,
        step_timeout: float | None = None,
        probe: Probe | None = None,
    ) -> None:
        """`liveness_timeout`: seconds that a ready instance may be silent when asked; none for as long as it likes.
        `step_timeout`: seconds that a step of an engine may take. See `Liveness`. `probe`: tries a way between two
        devices; by default with real processes."""
        self._loop = asyncio.get_running_loop()
        self._allowance = Allowance(machine_share())
        self._plan = plan
        self._coordinator = coordinator
        self._run_dir = run_dir
        self._stopping = False
        self._restarts: set[asyncio.Task[None]] = set()
        self._mps = MpsGuard(plan, base_folder() / "mps", run_dir.path, facts, self._mps_server_died)
        self._weights = WeightKeeper(run_dir.path, self._instance_of, self._is_ready)
        self.loans = WeightLoans(plan, self._weights, facts)
        self.routes = Routes(plan, probe)
        self.instances = {i.name: Instance(i) for i in plan.instances}
        self.groups = rank_groups(self.instances.values())
        self._group_of = {member.name: group for group in self.groups for member in group.members}
        self.failure: asyncio.Future[str] = self._loop.create_future()
        self._liveness: Liveness | None = None
        if liveness_timeout is not None:
            self._liveness = Liveness(
                self.instances.values(), self._stuck, timeout=liveness_timeout, step_timeout=step_timeout
            )
        self._watching: asyncio.Task[None] | None = None

    # Start --------------------------------------------------------------------------------------------------------

    async def start(self, within: float) -> None:
        """Spawns all instances, in the order of their waves; returns when every one is ready.

        Those of a later wave build their stages too, and wait where they need what another instance makes: a follower
        for its leader's weights. ``within``: seconds that an instance may take; for a follower they count from the
        moment at which its leader is ready.

        Raises:
            StartupError: a factory raised, a process died or the time was up; names the stage and shows the child's
                error, with its traceback where nobody raised it on purpose, or its last lines. Whatever runs is left
                for `stop` or `kill`.
            MpsError: MPS cannot be used, or a process did not attach to it.
        """
        await self._mps.acquire()
        await self.routes.find(lambda plan: Sight(self._sight(plan).device, self._environment(plan, {})))
        if self._plan.sharing_groups:
            self._weights.listen()
            await self.loans.begin()
        groups = list(dict.fromkeys(self._group_of[name] for wave in self._plan.spawn_waves for name in wave))
        begun = time.monotonic()
        waiting = {group: self._spawn_group(group) for group in groups}
        late = await those_late(waiting, lambda group: self._begin_of(group, begun) + within, self.failure)
        if late:
            report = "".join(f"\n  '{i.name}' (pid {i.pid}){i.last_lines()}" for i in late)
            raise StartupError(f"not ready within {within:g} s:{report}")
        unequal = self._unequal_capacity()
        if unequal is not None:
            raise StartupError(unequal)
        await self._verify_mps()
        if self._liveness is not None:
            self._watching = self._loop.create_task(self._liveness.watch(), name="liveness")

    def _unequal_capacity(self) -> str | None:
        return unequal_capacity(self._plan, {i.name: i.facts for i in self.instances.values() if i.state == "ready"})

    def _is_ready(self, name: str) -> bool:
        return self.instances[name].state == "ready"

    def _instance_of(self, pid: int) -> InstancePlan | None:
        return next((i.plan for i in self.instances.values() if i.pid == pid), None)

    def _begin_of(self, group: RankGroup, begun: float) -> float:
        """When a group's time began to count; for one whose leader is not ready, it has not yet."""
        plan = group.first.plan
        if plan.weight_role != "follower" or plan.weight_leader is None:
            return begun
        leader = self._group_of[plan.weight_leader]
        return leader.ready_since if leader.is_ready else math.inf

    async def _verify_mps(self) -> None:
        ready = {i.name: i.process.pid for i in self.instances.values() if i.process and i.state == "ready"}
        await self._mps.verify(ready)

    def _mps_server_died(self, server: int, clients: set[str]) -> None:
        """Its clients can compute no more, so each ends now and is treated as any process that died. Weights that
        they shared were memory of that server's clients, and are loaded again, or borrowed where another server has
        loaded them."""
        for name in clients:
            instance = self.instances[name]
            self._weights.forget(name)
            instance.doom = f" because its MPS server (pid {server}) died"
            self._kill_if_alive(instance, instance.process)

    def _stuck(self, instance: Instance, why: str) -> None:
        instance.doom = why
        self._kill_if_alive(instance, instance.process)

    def _spawn_group(self, group: RankGroup) -> asyncio.Future[None]:
        """Starts all ranks of a group; the future completes when all are ready, or one cannot be."""
        group.fallen = False
        ready = group.ready = self._loop.create_future()
        if len(group.members) == 1:
            self._spawn(group.first, None, {})
            return ready
        sockets = GroupSockets(len(group.members))
        try:
            for rank, instance in enumerate(group.members):
                self._spawn(instance, sockets.link(rank), sockets.environment)
        except StartupError:
            group.fallen = True
            self._end_all(group, " because its group could not be started")
            raise
        finally:
            sockets.close()
        return ready

    def _spawn(self, instance: Instance, link: GroupLink | None, environment: dict[str, str]) -> None:
        child = start_child(instance.name, self._environment(instance.plan, environment), link)
        instance.process = child.process
        instance.state = "starting"
        instance.spawned = time.monotonic()
        instance.failed_start = None
        instance.gone.clear()
        instance.tap = LogTap(instance.name, child.output)
        instance.pidfd = os.pidfd_open(instance.process.pid)
        self._loop.add_reader(instance.pidfd, self._exited, instance)
        self._run_dir.record(instance.process.pid)
        instance.channel = Channel(
            child.channel,
            lambda channel, message: self._receive(instance, channel, message),
            lambda channel, reason: self._broken(instance, reason),
            name=instance.name,
            allowance=self._allowance,
        )
        instance.channel.send(
            Spawn(
                self._plan,
                instance.name,
                str(self._run_dir.path),
                list(sys.path),
                link,
                device=self._sight(instance.plan).device,
                by_host=self.routes.by_host_from(instance.plan),
            )
        )

    def _environment(self, plan: InstancePlan, group: dict[str, str]) -> dict[str, str]:
        """The parent's, a fair share of the threads, what the ranks of a group have in common, which GPU comes first,
        and what the plan says, which wins."""
        threads = plan.threads or max(1, len(os.sched_getaffinity(0)) // len(self.instances))
        own = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(threads), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        return os.environ | own | group | self._sight(plan).environment | plan.env | self._mps.environment(plan)

    def _sight(self, plan: InstancePlan) -> Sight:
        return sight(self._plan, plan, os.environ.get(VISIBILITY))

    # Messages and ends --------------------------------------------------------------------------------------------

    def _receive(self, instance: Instance, channel: Channel, message: Message) -> None:
        instance.heard = time.monotonic()
        if isinstance(message, Ready):
            instance.state = "ready"
            instance.facts = message.facts
            instance.start = start_times(time.monotonic() - instance.spawned, message.facts)
            log.info("'%s' is ready: %s", instance.name, in_words(instance.start))
            self._weights.leader_ready(instance.name)
            self._admit_if_ready(self._group_of[instance.name])
        elif isinstance(message, StartFailed):
            instance.failed_start = message
        elif isinstance(message, Stats):
            instance.gauges = message.gauges
            if instance.asked is not None and not instance.asked.done():
                instance.asked.set_result(None)
        else:
            self._coordinator.receive(channel, message)

    def _admit_if_ready(self, group: RankGroup) -> None:
        if not group.is_ready or group.first.channel is None:
            return
        group.ready_since = time.monotonic()
        group.up.set()
        self._coordinator.attach(group.first.name, group.first.channel)
        if group.ready is not None and not group.ready.done():
            group.ready.set_result(None)

    def _broken(self, instance: Instance, reason: str) -> None:
        """The channel ended. Normally the process did too; one that lives on without it is of no use."""
        if reason:
            log.error("the connection to '%s' broke: %s", instance.name, reason)
        if instance.state not in ("stopping", "exited"):
            self._loop.call_later(STOP_SECONDS, self._kill_if_alive, instance, instance.process)

    def _kill_if_alive(self, instance: Instance, process: subprocess.Popen[bytes] | None) -> None:
        if process is not None and instance.process is process and instance.state != "exited":
            kill_group(process.pid)

    def _exited(self, instance: Instance) -> None:
        process = instance.process
        assert process is not None
        self._loop.remove_reader(instance.pidfd)
        os.close(instance.pidfd)
        kill_group(process.pid)  # what the process itself has started; its own entry still holds the group's number
        status = process.wait()
        self._run_dir.forget(process.pid)
        instance.state = "exited"
        if instance.tap is not None:
            instance.tap.finish()
        how = describe_exit(status) + instance.doom
        instance.doom = ""
        group = self._group_of[instance.name]
        group.up.clear()
        self._coordinator.detach(group.first.name, group.blame(instance, how))
        if instance.channel is not None:
            instance.channel.flush()
            instance.channel.close()
        instance.gone.set()
        if not self._stopping and not group.fallen:
            self._fall(group, instance, how)

    def _fall(self, group: RankGroup, culprit: Instance, how: str) -> None:
        """One of a group has ended: the others are of no use without it, and some may wait for it for ever."""
        group.fallen = True
        self._end_all(group, f" because its rank '{culprit.name}' {how}")
        assert culprit.process is not None
        if group.ready is not None and not group.ready.done():
            group.ready.set_exception(StartupError(self._start_report(culprit, how)))
            return
        report = f"instance '{culprit.name}' (pid {culprit.process.pid}) {how}{culprit.last_lines()}"
        log.error("%s", report)
        if self._plan.on_process_exit == "restart":
            self._end_weights_of(culprit)
            self._schedule_restart(group)
        else:
            self._fail(report)

    def _fail(self, report: str) -> None:
        """The pipeline must stop; the first reason counts."""
        if not self.failure.done():
            self.failure.set_result(report)

    def _end_all(self, group: RankGroup, why: str) -> None:
        for instance in group.members:
            if instance.state in ("starting", "ready"):
                instance.doom = why
                self._kill_if_alive(instance, instance.process)

    def _end_weights_of(self, leader: Instance) -> None:
        """Where a dead leader's weights went with it, its followers compute on nothing: they end too."""
        if not self._weights.ends_with_leader(leader.name):
            return
        self._weights.forget(leader.name)
        for instance in self.instances.values():
            if instance.plan.weight_leader == leader.name and instance.state in ("starting", "ready"):
                instance.doom = f" because '{leader.name}', whose weights it shared, ended"
                self._kill_if_alive(instance, instance.process)

    def _start_report(self, instance: Instance, how: str) -> str:
        failed = instance.failed_start
        if failed is None:
            return f"instance '{instance.name}' {how} before it was ready{instance.last_lines()}"
        report = f"stage '{failed.stage}' ({instance.name}) could not be built: {failed.message}"
        return "\n    ".join([report, *failed.traceback.splitlines()])

    async def refresh_gauges(self) -> None:
        """Asks every ready instance for its gauges; one that does not answer within a second keeps its last ones."""
        waiting: list[asyncio.Future[None]] = []
        for instance in self.instances.values():
            if instance.state == "ready" and instance.channel is not None:
                instance.channel.send(StatsQuery())
                if instance.asked is None or instance.asked.done():
                    instance.asked = self._loop.create_future()
                waiting.append(instance.asked)
        if waiting:
            await asyncio.wait(waiting, timeout=STATS_SECONDS)

    # Restart ------------------------------------------------------------------------------------------------------

    def _schedule_restart(self, group: RankGroup) -> None:
        if time.monotonic() - group.ready_since > STEADY_SECONDS:
            group.backoff = FIRST_BACKOFF
        task = self._loop.create_task(self._restart(group))
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)

    async def _restart(self, group: RankGroup) -> None:
        """Tries until the group is ready, waiting twice as long after each failure."""
        while not self._stopping:
            await group.ended()
            for instance in group.members:
                instance.state = "restarting"
            await asyncio.sleep(group.backoff)
            try:
                await self._wait_for_weights(group.first.plan)
            except WeightShareError as error:
                self._fail(str(error))
                return
            group.backoff = min(2 * group.backoff, MAX_BACKOFF)
            for instance in group.members:
                instance.restarts += 1
            try:
                await self._spawn_group(group)
            except StartupError as error:
                log.error("restart of %s failed, next try in %g s: %s", group.label, group.backoff, error)
                continue
            log.info("%s is back (pid %s)", group.label, ", ".join(str(i.pid) for i in group.members))
            unequal = self._unequal_capacity()
            if unequal is not None:
                log.error("%s", unequal)
                group.first.doom = " because it came back with another KV capacity"
                self._kill_if_alive(group.first, group.first.process)
                return
            await self._verify_mps_again(group.first)
            return

    async def _wait_for_weights(self, plan: InstancePlan) -> None:
        """Returns when a borrower has weights to attach to. Followers wait for them as at the first start.

        Raises:
            WeightShareError: there will be none.
        """
        if plan.weight_role != "borrower":
            return
        leader = plan.weight_leader or plan.name
        if not self._weights.holds(leader):
            await self.loans.renew(leader)

    async def _verify_mps_again(self, instance: Instance) -> None:
        """An instance that came back without MPS would slow its neighbours: it is ended, and so tried again."""
        try:
            await self._verify_mps()
        except MpsError as error:
            log.error("%s", error)
            instance.doom = f" because it came back without MPS ({error})"
            self._kill_if_alive(instance, instance.process)

    # Stop ---------------------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Ends the instances in shutdown order, by message, then by signal."""
        self._begin_stop()
        for group in self._plan.shutdown_order:
            await asyncio.gather(*(self._stop_one(self.instances[name]) for name in group))
        self._weights.close()
        await self._mps.release()

    def kill(self) -> None:
        """Ends everything now."""
        self._begin_stop()
        for instance in self.instances.values():
            if instance.process is not None and instance.state not in ("exited", "waiting", "restarting"):
                kill_group(instance.process.pid)

    def _begin_stop(self) -> None:
        self._stopping = True
        self._mps.stop_watching()
        if self._watching is not None:
            self._watching.cancel()
        for task in list(self._restarts):
            task.cancel()

    async def _stop_one(self, instance: Instance) -> None:
        if instance.process is None or instance.process.returncode is not None:
            return
        ready = instance.state == "ready"
        instance.state = "stopping"
        if instance.channel is not None and ready:
            instance.channel.send(Stop())
            try:
                await asyncio.wait_for(instance.gone.wait(), STOP_SECONDS)
            except TimeoutError:
                log.warning("instance '%s' did not end by itself and is killed", instance.name)
        if not instance.gone.is_set():
            kill_group(instance.process.pid)
            await instance.gone.wait()
