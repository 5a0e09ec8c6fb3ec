"""A running pipeline: the coordinator and the supervisor behind the few calls that a server needs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import Any

from sgl_omni.gpu.devices import GpuFacts, gpu_facts
from sgl_omni.runtime.capacity import kv_capacity
from sgl_omni.runtime.coordinator import DEFAULT_MAX_IN_FLIGHT, DEFAULT_TIMEOUT, Coordinator, RequestHandle
from sgl_omni.runtime.routes import Probe
from sgl_omni.runtime.rundir import RunDir
from sgl_omni.runtime.stage import Payload
from sgl_omni.runtime.supervisor import DEFAULT_LIVENESS, Supervisor
from sgl_omni.topology.plan import Plan

log = logging.getLogger("sgl_omni.pipeline")

DEFAULT_STARTUP_TIMEOUT = 600.0
DEFAULT_DRAIN_TIMEOUT = 30.0


class Pipeline:
    """Executes one plan. Use it as ``async with Pipeline(plan) as pipeline`` or call `start` and `stop`."""

    def __init__(
        self,
        plan: Plan,
        *,
        max_in_flight: int = DEFAULT_MAX_IN_FLIGHT,
        request_timeout: float | None = DEFAULT_TIMEOUT,
        startup_timeout: float = DEFAULT_STARTUP_TIMEOUT,
        liveness_timeout: float | None = DEFAULT_LIVENESS,
        facts: Callable[[int], GpuFacts] = gpu_facts,
        probe: Probe | None = None,
    ) -> None:
        """`liveness_timeout`: seconds after which a process that does not answer is killed; none for never. `facts`
        asks the driver about a GPU; only a plan that uses MPS needs it. `probe` is `Supervisor`'s."""
        self.plan = plan
        self.coordinator = Coordinator(plan, max_in_flight=max_in_flight, timeout=request_timeout)
        self._startup_timeout = startup_timeout
        self._run_dir = RunDir()
        self.supervisor = Supervisor(
            plan,
            self.coordinator,
            self._run_dir,
            facts,
            liveness_timeout=liveness_timeout,
            step_timeout=request_timeout,
            probe=probe,
        )
        self._status = "starting"

    async def __aenter__(self) -> Pipeline:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    async def start(self) -> None:
        """Returns when requests may be sent.

        Raises:
            StartupError, MpsError: see `Supervisor.start`; everything started has been ended again.
        """
        try:
            await self.supervisor.start(self._startup_timeout)
        except BaseException:
            self.supervisor.kill()
            await self._end()
            raise
        self._status = "ready"
        self.coordinator.admit(None)

    async def failed(self) -> str:
        """Returns, with the reason, when the pipeline can no longer serve."""
        reason = await asyncio.shield(self.supervisor.failure)
        self._status = "failed"
        self.coordinator.admit(f"the pipeline is stopping: {reason.splitlines()[0]}")
        self.coordinator.abort_all(f"the pipeline is stopping: {reason.splitlines()[0]}")
        return reason

    def begin_drain(self) -> None:
        """Refuses new requests; those in flight go on."""
        if self._status != "failed":
            self._status = "draining"
        self.coordinator.admit("the server is shutting down")

    async def stop(self, drain_timeout: float = DEFAULT_DRAIN_TIMEOUT) -> None:
        """Drains for `drain_timeout` seconds at most, aborts what is left, then ends every process."""
        self.begin_drain()
        try:
            await asyncio.wait_for(self.coordinator.drained(), drain_timeout)
        except TimeoutError:
            if self.coordinator.pending:
                log.info("%d requests were still in flight and are aborted", self.coordinator.pending)
            self.coordinator.abort_all("the server is shutting down")
        await self.supervisor.stop()
        self._run_dir.close()

    async def _end(self) -> None:
        """Stops at once, and to the end even where whoever waits for that is cancelled meanwhile."""
        ending = asyncio.ensure_future(self.stop(drain_timeout=0))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await ending
            raise

    def kill(self) -> None:
        """Ends every process now; `stop` still has to be awaited."""
        self.coordinator.abort_all("the server was told to stop at once")
        self.supervisor.kill()

    # What the HTTP server asks ------------------------------------------------------------------------------------

    def submit(
        self,
        payload: Payload,
        *,
        outputs: Collection[str] | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
    ) -> RequestHandle:
        """See `Coordinator.submit`."""
        return self.coordinator.submit(payload, outputs=outputs, request_id=request_id, timeout=timeout)

    @property
    def status(self) -> str:
        """`starting`, `ready`, `degraded` (an instance is down), `unavailable` (all of a Process are), `draining` or
        `failed`."""
        if self._status != "ready":
            return self._status
        groups = self.supervisor.groups
        if all(group.is_ready for group in groups):
            return "ready"
        serving = {group.first.plan.process for group in groups if group.is_ready}
        return "degraded" if serving >= {group.first.plan.process for group in groups} else "unavailable"

    def health(self) -> dict[str, Any]:
        """The state of every instance; KV capacities by stage, what it shares, and where the time went
        (``start``: see `start_times`) are those of its last start.
        ``routes``: which way tensors take between GPUs, where the plan lets them stay on a device. ``weights``: where
        other servers may borrow this one's weights, and where it has them from."""
        return {
            "status": self.status,
            "model": self.plan.name,
            "in_flight": self.coordinator.pending,
            "routes": [route.describe() for route in self.supervisor.routes.all],
            "weights": self.supervisor.loans.describe(),
            "instances": [
                {
                    "name": i.name,
                    "process": i.plan.process,
                    "replica": i.plan.replica,
                    "rank": i.plan.rank,
                    "stages": list(i.plan.stages),
                    "device": i.plan.device,
                    "state": i.state,
                    "pid": i.pid,
                    "in_flight": self.coordinator.in_flight[i.name],
                    "restarts": i.restarts,
                    "kv_capacity_tokens": kv_capacity(i.facts),
                    "weights": i.facts.get("weights"),
                    "start": i.start,
                }
                for i in self.supervisor.instances.values()
            ],
        }

    async def refresh(self) -> None:
        """Asks every instance for its gauges, so that `stats` tells how things are now."""
        await self.supervisor.refresh_gauges()

    def stats(self) -> dict[str, Any]:
        """Counters, and the gauges that every instance gave when last asked."""
        return {
            "requests_total": {k: self.coordinator.outcomes[k] for k in ("ok", "error", "aborted", "rejected")},
            "in_flight": self.coordinator.pending,
            "late_messages": self.coordinator.late_messages,
            "instances": {
                i.name: {
                    **i.gauges,
                    "in_flight": self.coordinator.in_flight[i.name],
                    "up": float(i.state == "ready"),
                    "restarts": i.restarts,
                }
                for i in self.supervisor.instances.values()
            },
        }
