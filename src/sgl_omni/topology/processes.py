"""Which stages form a Process, and what its replicas and ranks are called (rules 1, 4, 12 and the names)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

from sgl_omni.config.schema import ProcessConfig, StageConfig
from sgl_omni.config.violations import nearest
from sgl_omni.topology.findings import Findings, gpus, listed, quoted
from sgl_omni.topology.plan import COORDINATOR, ReplicaPolicy, instance_name

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
MAX_NAME = 64
"""What logs, metrics labels and process lists show without cutting it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroup:
    """One logical Process before it is placed."""

    name: str
    stages: tuple[str, ...]
    gpu_stages: tuple[str, ...]
    tp_size: int = 1
    num_replicas: int = 1
    policy: ReplicaPolicy = "round_robin"
    replica_devices: tuple[int, ...] | None = None
    cpu_cores: tuple[str, ...] | None = None
    mps_thread_percentage: int | None = None

    def instance(self, replica: int, rank: int = 0) -> str:
        return instance_name(self.name, replica, self.num_replicas, rank, self.tp_size)

    def stage_label(self, stage: str, replica: int) -> str:
        """``tts_engine@r0``: a stage's copy in a replica, as messages and layouts name it."""
        return stage if self.num_replicas == 1 else f"{stage}@r{replica}"


def group_stages(found: Findings) -> tuple[ProcessGroup, ...]:
    """The Processes in the order in which the stages first name them. Reports rules 1 and 4."""
    _check_names(found)
    members: dict[str, list[str]] = {}
    for name, stage in found.stages.items():
        if stage.process is None and stage.tp_size == 1:
            message = f"stage '{name}' names no process"
            found.refuse("PLAN-001", message, ("stages", name), hint=f"stages.{name}.process: {name}")
            continue
        members.setdefault(stage.process or name, []).append(name)
    _check_process_keys(found, members)
    groups = tuple(_group(found, name, stages) for name, stages in members.items())
    _check_tensor_parallel(found, groups)
    _check_environment(found, groups)
    return groups


def _group(found: Findings, name: str, stages: list[str]) -> ProcessGroup:
    settings = found.resolved.config.processes.get(name) or ProcessConfig()
    return ProcessGroup(
        name=name,
        stages=tuple(stages),
        gpu_stages=tuple(s for s in stages if found.stages[s].gpu),
        tp_size=max(found.stages[s].tp_size for s in stages),
        num_replicas=settings.num_replicas,
        policy=settings.replica_policy,
        replica_devices=settings.replica_devices,
        cpu_cores=settings.cpu_cores,
        mps_thread_percentage=settings.mps_thread_percentage,
    )


def _check_names(found: Findings) -> None:
    if not found.stages:
        found.refuse("PLAN-001", "the pipeline has no stage", ("stages",), hint="at least one stage under 'stages'")
    for name, stage in found.stages.items():
        _check_name(found, "stage", name, ("stages", name))
        if stage.process is not None and stage.process != name:
            _check_name(found, "Process", stage.process, ("stages", name, "process"))


def _check_name(found: Findings, what: str, name: str, at: tuple[str, ...]) -> None:
    if len(name) > MAX_NAME:
        message = f"{what} name '{name[:20]}...' has {len(name)} characters; the limit is {MAX_NAME}"
        found.refuse("PLAN-014", message, at, hint="a shorter name", about=(name,))
    elif "@" in name:
        message = f"{what} name '{name}': '@' is reserved for the names of replicas"
        found.refuse("PLAN-014", message, at, hint=name.replace("@", "_"), about=(name,))
    elif not _NAME.fullmatch(name):
        message = f"{what} name '{name}' must consist of letters, digits, '_' and '-'"
        found.refuse("PLAN-014", message, at, hint=re.sub(r"[^A-Za-z0-9_-]+", "_", name) or "another name")
    elif name == COORDINATOR:
        found.refuse("PLAN-014", f"{what} name '{name}' is reserved for the API process", at, hint="another name")


def _check_process_keys(found: Findings, members: dict[str, list[str]]) -> None:
    for name in found.resolved.config.processes:
        if name in members:
            continue
        message = f"there is no Process '{name}'; the Processes are {listed(members)}"
        hint = nearest(name, members)
        stage = found.stages.get(name)
        if stage is not None and stage.process is not None:
            message += f"; stage '{name}' runs in Process '{stage.process}'"
            hint = f"processes.{stage.process}"
        found.refuse("PLAN-001", message, ("processes", name), hint=hint)


def _check_tensor_parallel(found: Findings, groups: tuple[ProcessGroup, ...]) -> None:
    names = {group.name for group in groups}
    for group in groups:
        parallel = [s for s in group.stages if found.stages[s].tp_size > 1]
        if not parallel:
            continue
        if len(group.stages) > 1:
            others = [s for s in group.stages if s != parallel[0]]
            message = (
                f"TP stage '{parallel[0]}' shares Process '{group.name}' with {quoted(others)}; "
                "a TP stage owns its Process"
            )
            hint = f"another name in stages.{others[0]}.process"
            found.refuse("PLAN-004", message, ("stages", others[0], "process"), hint=hint, about=group.stages)
        ranks = (group.instance(i, k) for i in range(group.num_replicas) for k in range(group.tp_size))
        for rank in names.intersection(ranks):
            message = f"Process '{rank}' is named like a rank of TP stage '{parallel[0]}'"
            owner = next(g for g in groups if g.name == rank).stages[0]
            about = (rank, owner, *group.stages)
            found.refuse("PLAN-004", message, ("stages", owner, "process"), hint="another name", about=about)


def _check_environment(found: Findings, groups: tuple[ProcessGroup, ...]) -> None:
    """Stages of one OS process must agree on its environment."""
    for group in groups:
        seen: dict[str, tuple[str, str]] = {}
        for stage in group.stages:
            for key, value in found.stages[stage].env.items():
                if not key or "=" in key or "\0" in key + value:
                    message = f"stage '{stage}': {key!r} cannot be an environment variable"
                    hint = "a name without '=', and no NUL in name or value"
                    found.refuse("PLAN-015", message, ("stages", stage, "env", key), hint=hint)
                first, earlier = seen.setdefault(key, (stage, value))
                if earlier != value:
                    message = (
                        f"Process '{group.name}' has one environment, but stage '{first}' sets {key}={earlier} "
                        f"and stage '{stage}' sets {key}={value}"
                    )
                    at = ("stages", stage, "env", key)
                    found.refuse("PLAN-015", message, at, hint="one value, or two Processes", about=group.stages)


def fuse(found: Findings) -> None:
    """Applies `fused_stages`: each group takes the Process of its first stage (rule 12)."""
    taken: set[str] = set()
    for i, group in enumerate(found.resolved.config.fused_stages):
        problem = _unfit(found, group, taken)
        taken.update(group)
        if problem is not None:
            hint = "adjacent, non-TP stages in the order of the pipeline, on at most one GPU"
            message = f"fused_stages [{', '.join(group)}]: {problem}"
            found.refuse("PLAN-012", message, ("fused_stages", i), hint=hint, about=group)
            continue
        process = found.stages[group[0]].process
        for name in group:
            found.stages[name] = found.stages[name].model_copy(update={"process": process})


def _unfit(found: Findings, group: tuple[str, ...], taken: set[str]) -> str | None:
    if len(group) < 2:
        return "a group needs two stages or more"
    for name in group:
        if name not in found.stages:
            return f"there is no stage '{name}'; {nearest(name, found.stages)}"
        if name in taken or group.count(name) > 1:
            return f"stage '{name}' is in more than one place"
        if found.stages[name].tp_size > 1:
            return f"stage '{name}' is tensor-parallel and owns its Process"
    if found.stages[group[0]].process is None:
        return f"stage '{group[0]}' names no process"
    devices = sorted({d for name in group for d in found.stages[name].gpu or ()})
    if len(devices) > 1:
        return f"its stages lie on {gpus(devices)}"
    for one, other in pairwise(group):
        problem = _not_linear(found.stages, one, other)
        if problem is not None:
            return problem
    return None


def _not_linear(stages: dict[str, StageConfig], one: str, other: str) -> str | None:
    if other not in stages[one].next:
        return f"'{other}' does not follow '{one}' in the pipeline"
    branches = [t for t in (*stages[one].next, *stages[one].stream_to) if t != other]
    if branches or stages[one].terminal:
        return f"'{one}' also leads to {listed(branches) if branches else 'the client'}, so the group is not linear"
    sources = [s for s, stage in stages.items() if other in (*stage.next, *stage.stream_to) and s != one]
    return f"'{other}' also receives from {listed(sources)}, so the group is not linear" if sources else None
