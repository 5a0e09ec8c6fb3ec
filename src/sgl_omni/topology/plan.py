"""The frozen Plan: all that can be decided before a process exists.

``sgl-omni config resolve --show plan`` prints it and ``serve`` executes it; nothing downstream
decides any of it again. It is plain data: it converts to JSON and back without loss.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

PlatformName = Literal["cpu", "cuda"]
Transport = Literal["local", "shm", "cuda_ipc"]
EdgeKind = Literal["payload", "stream"]
ReplicaPolicy = Literal["round_robin", "least_inflight"]
WeightRole = Literal["own", "leader", "follower", "borrower"]
ExitPolicy = Literal["stop", "restart"]
MpsMode = Literal["off", "auto", "on"]

TRANSPORT_BYTES = 128 * 2**20
"""GPU memory for tensors on their way that a stage may take, at most a quarter of its budget."""

COORDINATOR = "coordinator"
"""Reserved instance name of the API process, the receiver of every terminal stage's output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One logical stage: what to build and where its output goes.

    ``transport_bytes``: what of its budget the buffers take in which its tensors go to other processes on GPUs.
    """

    name: str
    process: str
    factory_path: str
    factory_args: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] | None = None
    next: tuple[str, ...] = ()
    stream_to: tuple[str, ...] = ()
    wait_for: tuple[str, ...] = ()
    terminal: bool = False
    route_fn: str | None = None
    merge_fn: str | None = None
    gpu: bool = False
    budget_bytes: int | None = None
    budget_fraction: float | None = None
    enforce_budget: bool = False
    transport_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """One logical Process and how its replicas are chosen."""

    name: str
    stages: tuple[str, ...]
    num_replicas: int = 1
    tp_size: int = 1
    policy: ReplicaPolicy = "round_robin"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstancePlan:
    """One OS process: a replica of a Process, or one rank of a tensor-parallel replica.

    ``threads``: compute threads, as many as ``cpu_cores`` has physical cores; 0 where it is pinned to none, and shares
    the machine with the others. ``mps_memory_limit``: bytes of the GPU that MPS lets this client take at most.
    """

    name: str
    process: str
    stages: tuple[str, ...]
    replica: int = 0
    rank: int = 0
    device: int | None = None
    env: dict[str, str] = field(default_factory=dict)
    cpu_cores: tuple[int, ...] = ()
    threads: int = 0
    weight_role: WeightRole = "own"
    weight_leader: str | None = None
    mps: bool = False
    mps_thread_percentage: int | None = None
    mps_memory_limit: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgePlan:
    """One hand-off between two stages and the transport that its locality gives it."""

    source: str
    target: str
    kind: EdgeKind
    transport: Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingGroup:
    """Replicas of one Process on one GPU that hold one set of weights.

    ``leader`` loads them. Where the plan has them from another server, it attaches as its followers do, and the group
    only bears its name.
    """

    process: str
    device: int
    leader: str
    followers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that `serve` executes.

    ``spawn_waves``: the order of starting. All are spawned at once; those of a later wave wait, inside, for what an
    earlier one makes: followers for their leader's weights. ``shutdown_order``: who has ended before the next does.
    ``lends_weights``: other servers on a GPU may attach to the weights of its sharing groups. ``weights_from``: the
    socket of the server from which this one has them, instead of the checkpoint.
    """

    name: str
    model_path: str | None
    platform: PlatformName
    entry: str
    stages: tuple[StagePlan, ...]
    processes: tuple[ProcessPlan, ...]
    instances: tuple[InstancePlan, ...]
    edges: tuple[EdgePlan, ...]
    spawn_waves: tuple[tuple[str, ...], ...]
    shutdown_order: tuple[tuple[str, ...], ...]
    sharing_groups: tuple[SharingGroup, ...] = ()
    lends_weights: bool = False
    weights_from: str | None = None
    mps: dict[int, tuple[str, ...]] = field(default_factory=dict)
    mps_mode: MpsMode = "off"
    on_process_exit: ExitPolicy = "stop"
    warnings: tuple[str, ...] = ()

    def stage(self, name: str) -> StagePlan:
        return next(s for s in self.stages if s.name == name)

    def process(self, name: str) -> ProcessPlan:
        return next(p for p in self.processes if p.name == name)

    def instance(self, name: str) -> InstancePlan:
        return next(i for i in self.instances if i.name == name)

    def instances_of(self, process: str) -> tuple[InstancePlan, ...]:
        """The instances of one Process, in replica then rank order."""
        return tuple(i for i in self.instances if i.process == process)


def instance_name(process: str, replica: int, num_replicas: int, rank: int = 0, tp_size: int = 1) -> str:
    """``<process>[@r<i>][_tp<k>]``: the name of one OS process in logs, errors and metrics."""
    name = process if num_replicas == 1 else f"{process}@r{replica}"
    return name if tp_size == 1 else f"{name}_tp{rank}"
