"""`build_plan`: every rule, then the frozen Plan."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from sgl_omni.config.resolved import ResolvedConfig
from sgl_omni.config.schema import EngineConfig, StageConfig
from sgl_omni.config.violations import PlanError, Violation
from sgl_omni.topology.budget import Claim, check_budgets, claims_by_gpu, enforced_budget
from sgl_omni.topology.cores import derive_cores, thread_count
from sgl_omni.topology.factories import check_factories
from sgl_omni.topology.findings import Findings
from sgl_omni.topology.graph import check_graph
from sgl_omni.topology.host import Host
from sgl_omni.topology.mps import Eligibility, choose, eligibility
from sgl_omni.topology.placement import Placed, place
from sgl_omni.topology.plan import (
    TRANSPORT_BYTES,
    EdgeKind,
    EdgePlan,
    InstancePlan,
    Plan,
    ProcessPlan,
    SharingGroup,
    StagePlan,
    Transport,
)
from sgl_omni.topology.processes import ProcessGroup, fuse, group_stages
from sgl_omni.topology.sharing import sharing_groups, weight_roles


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan with what its views show beside it."""

    plan: Plan
    host: Host
    claims: dict[int, list[Claim]]
    eligible: Eligibility


def build_plan(resolved: ResolvedConfig, host: Host, environ: Mapping[str, str] | None = None) -> Plan:
    """Decides everything that can be decided before a process exists.

    Args:
        environ: the environment of the server (its own where None); some variables forbid some plans.

    Raises:
        PlanError: with every violation, those of reading the configuration included.
    """
    return plan_config(resolved, host, environ).plan


def plan_config(resolved: ResolvedConfig, host: Host, environ: Mapping[str, str] | None = None) -> Planned:
    """`build_plan` with the facts that layouts draw: budgets per GPU and MPS eligibility."""
    found = Findings(resolved, host, dict(resolved.config.stages), os.environ if environ is None else environ)
    fuse(found)
    entry = check_graph(found)
    groups = group_stages(found)
    check_factories(found, groups)
    placed = derive_cores(found, place(found, groups))
    check_budgets(found, placed)
    sharing = sharing_groups(found, placed)
    eligible = eligibility(found, placed)
    mps = choose(found, placed, eligible)
    _raise_if_refused(found)
    assert entry is not None, "a graph without entry is refused"
    plan = _plan(found, entry, groups, placed, sharing, mps)
    return Planned(plan, host, claims_by_gpu(found.stages, placed), eligible)


_GPU_RULES = frozenset(f"PLAN-{n:03}" for n in (3, 4, 5, 6, 7, 8, 10, 11, 12, 13))
_FOLLOWS: dict[str, frozenset[str]] = {
    "gpu": _GPU_RULES,
    "tp_size": _GPU_RULES | {"PLAN-001"},
    "process": _GPU_RULES | {"PLAN-001", "PLAN-009"},
    "gpu_memory_fraction": frozenset({"PLAN-007", "PLAN-008"}),
    "total_reserve_bytes": frozenset({"PLAN-007", "PLAN-008"}),
    "enforce_total_reserve": frozenset(),
    "engine": frozenset({"PLAN-008", "PLAN-010"}),
    "env": frozenset({"PLAN-011", "PLAN-015"}),
    "factory": frozenset({"PLAN-011", "PLAN-016"}),
    "factory_path": frozenset({"PLAN-001", "PLAN-006", "PLAN-016"}),
    "num_replicas": _GPU_RULES | {"PLAN-018"},
    "replica_devices": _GPU_RULES,
    "cpu_cores": frozenset({"PLAN-018"}),
    "derive_cpu_cores": frozenset(),
    "mps_thread_percentage": frozenset({"PLAN-011"}),
    "replica_policy": frozenset(),
}
"""Rules that may fail only because the value of a key could not be read. Other keys: the wiring."""


def _model_name(model_path: str | None) -> str | None:
    """``demo-voice`` of ``demo-voice``, ``org/demo-voice`` or a folder of that name."""
    return PurePath(model_path).name if model_path else None


def _raise_if_refused(found: Findings) -> None:
    """Violations that only follow from a value that could not be read are left out."""
    violations = [*found.resolved.violations, *(v for v in found.violations if not _follows(found, v))]
    if violations:
        raise PlanError(sorted(violations, key=lambda v: v.code))


def _follows(found: Findings, violation: Violation) -> bool:
    for path in found.resolved.unread:
        if len(path) < 2:
            continue
        name = str(path[1])
        names = {name, found.stages[name].process} if name in found.stages else {name}
        codes = _FOLLOWS.get(str(path[2])) if len(path) > 2 else None
        if names & violation.about and (violation.code in codes if codes is not None else True):
            return True
    return False


def _plan(
    found: Findings,
    entry: str,
    groups: tuple[ProcessGroup, ...],
    placed: tuple[Placed, ...],
    sharing: tuple[SharingGroup, ...],
    mps: dict[int, tuple[str, ...]],
) -> Plan:
    resolved = found.resolved
    borrows = resolved.config.weights_from is not None
    followers = set[str]() if borrows else {name for group in sharing for name in group.followers}
    return Plan(
        name=resolved.config.name or _model_name(resolved.config.model_path) or resolved.class_name or "pipeline",
        model_path=resolved.model_path,
        platform=found.host.platform,
        entry=entry,
        stages=_stages(found, groups, placed),
        processes=tuple(
            ProcessPlan(name=g.name, stages=g.stages, num_replicas=g.num_replicas, tp_size=g.tp_size, policy=g.policy)
            for g in groups
        ),
        instances=_instances(found, placed, sharing, mps),
        edges=_edges(found),
        spawn_waves=_waves(placed, followers),
        shutdown_order=tuple(reversed(_waves(placed, followers))),
        sharing_groups=sharing,
        lends_weights=bool(sharing) and resolved.config.weight_share == "servers",
        weights_from=resolved.config.weights_from,
        mps=mps,
        mps_mode=resolved.config.mps,
        on_process_exit=resolved.config.on_process_exit,
        warnings=tuple(found.warnings),
    )


def _stages(found: Findings, groups: tuple[ProcessGroup, ...], placed: tuple[Placed, ...]) -> tuple[StagePlan, ...]:
    devices: dict[str, set[int]] = {}
    edges = _edges(found)
    for p in placed:
        if p.device is not None:
            devices.setdefault(p.group.name, set()).add(p.device)
    process_of = {s: g.name for g in groups for s in g.stages}
    engines = set(found.resolved.engine_stages)
    return tuple(
        StagePlan(
            name=name,
            process=process_of[name],
            factory_path=stage.factory_path or "",
            factory_args=dict(stage.factory),
            engine=_engine_settings(stage.engine) if name in engines else None,
            next=stage.next,
            stream_to=stage.stream_to,
            wait_for=stage.wait_for,
            terminal=stage.terminal,
            route_fn=stage.route_fn,
            merge_fn=stage.merge_fn,
            gpu=bool(stage.gpu),
            budget_bytes=(budget := _budget_bytes(found, stage, devices.get(process_of[name], set()))),
            budget_fraction=stage.gpu_memory_fraction,
            enforce_budget=stage.enforce_total_reserve,
            transport_bytes=_transport_bytes(edges, name, budget),
        )
        for name, stage in found.stages.items()
    )


def _engine_settings(engine: EngineConfig | None) -> dict[str, Any]:
    settings = engine or EngineConfig()
    return {key: value for key, value in settings.model_dump().items() if value is not None}


def _budget_bytes(found: Findings, stage: StageConfig, devices: set[int]) -> int | None:
    """Bytes as declared, or the fraction of the GPUs' memory where all have the same, known one."""
    if stage.total_reserve_bytes is not None or stage.gpu_memory_fraction is None:
        return stage.total_reserve_bytes
    sizes = {found.host.memory(d) for d in devices}
    size = sizes.pop() if len(sizes) == 1 else None
    return int(size * stage.gpu_memory_fraction) if size is not None else None


def _instances(
    found: Findings,
    placed: tuple[Placed, ...],
    sharing: tuple[SharingGroup, ...],
    mps: dict[int, tuple[str, ...]],
) -> tuple[InstancePlan, ...]:
    roles = weight_roles(sharing, borrowed=found.resolved.config.weights_from is not None)
    clients = {name for names in mps.values() for name in names}
    groups = {p.group.name: p.group for p in placed}
    environment = {name: _environment(found, group) for name, group in groups.items()}
    return tuple(
        InstancePlan(
            name=p.name,
            process=p.group.name,
            stages=p.group.stages,
            replica=p.replica,
            rank=p.rank,
            device=p.device,
            env=environment[p.group.name],
            cpu_cores=p.cores,
            threads=p.threads or thread_count(p.cores, found.host),
            weight_role=roles.get(p.name, ("own", None))[0],
            weight_leader=roles.get(p.name, ("own", None))[1],
            mps=p.name in clients,
            mps_thread_percentage=p.group.mps_thread_percentage if p.name in clients else None,
            mps_memory_limit=enforced_budget(found, p) if p.name in clients else None,
        )
        for p in placed
    )


def _environment(found: Findings, group: ProcessGroup) -> dict[str, str]:
    merged: dict[str, str] = {}
    for stage in group.stages:
        merged.update(found.stages[stage].env)
    return merged


def _edges(found: Findings) -> tuple[EdgePlan, ...]:
    """Every hand-off. Its ends' Processes and GPUs decide, and whether the receiver takes tensors of a GPU."""
    process_of = {name: stage.process or name for name, stage in found.stages.items()}
    edges: list[EdgePlan] = []
    for source, stage in found.stages.items():
        kinds: tuple[tuple[EdgeKind, tuple[str, ...]], ...] = (("payload", stage.next), ("stream", stage.stream_to))
        for kind, targets in kinds:
            for target in targets:
                transport: Transport = "cuda_ipc" if _by_device(found, stage, found.stages[target]) else "shm"
                if process_of[source] == process_of[target]:
                    transport = "local"
                edges.append(EdgePlan(source=source, target=target, kind=kind, transport=transport))
    return tuple(edges)


def _by_device(found: Findings, source: StageConfig, target: StageConfig) -> bool:
    return found.host.platform == "cuda" and bool(source.gpu) and bool(target.gpu) and target.device_input


def _transport_bytes(edges: tuple[EdgePlan, ...], name: str, budget: int | None) -> int:
    if not any(edge.source == name and edge.transport == "cuda_ipc" for edge in edges):
        return 0
    return TRANSPORT_BYTES if budget is None else min(TRANSPORT_BYTES, budget // 4)


def _waves(placed: tuple[Placed, ...], followers: set[str]) -> tuple[tuple[str, ...], ...]:
    """In the order of their start. Followers, in a wave of their own, start too and wait for their leaders' weights; TP
    ranks come last in a wave."""
    ordered = sorted(placed, key=lambda p: p.group.tp_size > 1)
    first = tuple(p.name for p in ordered if p.name not in followers)
    second = tuple(p.name for p in ordered if p.name in followers)
    return (first, second) if second else (first,)
