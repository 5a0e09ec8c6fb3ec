"""Which GPU each instance lands on (rules 3, 4, 5 and the host's devices)."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_omni.config.scalars import core_numbers
from sgl_omni.config.violations import KeyPath
from sgl_omni.topology.findings import Findings, gpus, listed, quoted
from sgl_omni.topology.processes import ProcessGroup


@dataclass(frozen=True, slots=True)
class Placed:
    """One OS process on its device (None: on the host)."""

    group: ProcessGroup
    replica: int
    rank: int
    device: int | None
    name: str
    cores: tuple[int, ...] = ()
    threads: int = 0


def place(found: Findings, groups: tuple[ProcessGroup, ...]) -> tuple[Placed, ...]:
    """All OS processes, replicas and ranks in order, Processes in theirs."""
    placed: list[Placed] = []
    for group in groups:
        devices = _devices(found, group)
        cores = _cores(found, group)
        for replica in range(group.num_replicas):
            for rank in range(group.tp_size):
                device = devices[replica * group.tp_size + rank] if devices else None
                name = group.instance(replica, rank)
                placed.append(Placed(group, replica, rank, device, name, cores[replica] if cores else ()))
    return tuple(placed)


def _devices(found: Findings, group: ProcessGroup) -> tuple[int, ...] | None:
    """One device per instance, or None for a Process without GPU stage and for a placement that is refused."""
    _check_stage_devices(found, group)
    at: KeyPath = ("processes", group.name, "replica_devices")
    if group.replica_devices is not None:
        return _replica_devices(found, group, group.replica_devices, at)
    if not group.gpu_stages:
        return None
    if group.num_replicas > 1:
        count = group.num_replicas * group.tp_size
        message = f"Process '{group.name}' has {group.num_replicas} replicas on GPUs but no replica_devices"
        hint = f"processes.{group.name}.replica_devices: {list(range(count))}, {count} GPU ids (an id may repeat)"
        found.refuse("PLAN-005", message, ("processes", group.name), hint=hint, about=group.stages)
        return None
    return _own_devices(found, group)


def _check_stage_devices(found: Findings, group: ProcessGroup) -> None:
    for name in group.stages:
        stage = found.stages[name]
        at: KeyPath = ("stages", name, "gpu")
        if stage.gpu is None:
            if stage.tp_size > 1 and group.replica_devices is None:
                message = f"TP stage '{name}' has tp_size {stage.tp_size} but no GPU"
                found.refuse("PLAN-004", message, ("stages", name), hint=f"gpu: {list(range(stage.tp_size))}")
            continue
        if len(stage.gpu) != stage.tp_size:
            message = f"stage '{name}' has tp_size {stage.tp_size} but gpu is {list(stage.gpu)}"
            hint = f"{stage.tp_size} GPU {'id' if stage.tp_size == 1 else 'ids'}, or tp_size: {len(stage.gpu) or 1}"
            shipped = found.resolved.origin(*at).kind == "class"
            found.refuse("PLAN-004", message, ("stages", name, "tp_size") if shipped else at, hint=hint)
        elif len({found.host.card(d) for d in stage.gpu}) < len(stage.gpu):
            message = f"the ranks of TP stage '{name}' need distinct GPUs, not {gpus(stage.gpu)}"
            found.refuse("PLAN-004", message, at, hint=f"{stage.tp_size} different GPU ids")
        if group.replica_devices is None:
            for device in dict.fromkeys(stage.gpu):
                _check_exists(found, device, f"stage '{name}'", at)


def _check_exists(found: Findings, device: int, what: str, at: KeyPath) -> None:
    host = found.host
    if host.has(device) or host.devices is None:
        return
    count = len(host.devices)
    message = f"{what} is on GPU {device}, but this host has {count} GPU{'' if count == 1 else 's'}"
    hint = f"a GPU id from 0 to {count - 1}" if count else "gpu: null, or another host"
    found.refuse("PLAN-013", message, at, hint=hint)


def _replica_devices(
    found: Findings, group: ProcessGroup, devices: tuple[int, ...], at: KeyPath
) -> tuple[int, ...] | None:
    if not group.gpu_stages and not (group.tp_size > 1):
        message = f"Process '{group.name}' has no GPU stage, so it takes no replica_devices"
        found.refuse("PLAN-005", message, at, hint="nothing: its replicas stay on the host", about=group.stages)
        return None
    expected = group.num_replicas * group.tp_size
    if len(devices) != expected:
        shape = f"{group.num_replicas} x {group.tp_size}" if group.tp_size > 1 else str(expected)
        message = f"Process '{group.name}' needs {shape} replica_devices, one per replica and rank, not {len(devices)}"
        example = (devices * expected)[:expected] or tuple(range(expected))
        found.refuse("PLAN-005", message, at, hint=f"e.g. {list(example)}", about=group.stages)
        return None
    for replica in range(group.num_replicas):
        ids = devices[replica * group.tp_size : (replica + 1) * group.tp_size]
        if len({found.host.card(d) for d in ids}) < len(ids):
            message = f"the ranks of TP replica {replica} of Process '{group.name}' need distinct GPUs, not {gpus(ids)}"
            found.refuse("PLAN-005", message, at, hint=f"{group.tp_size} different ids", about=group.stages)
            return None
    for device in dict.fromkeys(devices):
        if not found.host.has(device):
            _check_exists(found, device, _placed_there(group, devices, device), at)
    return devices


def _placed_there(group: ProcessGroup, devices: tuple[int, ...], device: int) -> str:
    replicas = [r for r in range(group.num_replicas) if device in devices[r * group.tp_size : (r + 1) * group.tp_size]]
    labels = [group.stage_label(stage, replica) for stage in group.gpu_stages for replica in replicas]
    return f"replica_devices of Process '{group.name}': stage {quoted(labels)}"


def _own_devices(found: Findings, group: ProcessGroup) -> tuple[int, ...] | None:
    if group.tp_size > 1:
        owner = next(s for s in group.stages if found.stages[s].tp_size > 1)
        own = found.stages[owner].gpu or ()
        return own if len({found.host.card(d) for d in own}) == len(own) == group.tp_size else None
    devices = sorted({d for s in group.gpu_stages for d in found.stages[s].gpu or ()})
    if len(devices) > 1:
        parts = [f"'{s}' on {gpus(found.stages[s].gpu or ())}" for s in group.gpu_stages]
        cpu = [s for s in group.stages if s not in group.gpu_stages]
        beside = f" (beside CPU stages {quoted(cpu)})" if cpu else ""
        message = (
            f"Process '{group.name}' spans {gpus(devices)}: {listed(parts)}{beside}; a Process uses one GPU at most"
        )
        hint = f"stages.{group.gpu_stages[-1]}.process: {group.gpu_stages[-1]}, or one GPU for all"
        found.refuse("PLAN-003", message, ("stages", group.gpu_stages[-1], "gpu"), hint=hint, about=group.stages)
        return None
    return tuple(devices) or None


def _cores(found: Findings, group: ProcessGroup) -> list[tuple[int, ...]] | None:
    """The cores of each replica; sets may not overlap, since their point is to keep replicas apart."""
    if group.cpu_cores is None:
        return None
    at: KeyPath = ("processes", group.name, "cpu_cores")
    if len(group.cpu_cores) != group.num_replicas:
        message = f"Process '{group.name}' has {group.num_replicas} replicas but {len(group.cpu_cores)} core sets"
        found.refuse("PLAN-018", message, at, hint=f"{group.num_replicas} sets", about=group.stages)
        return None
    sets = [core_numbers(text) for text in group.cpu_cores]
    used: dict[int, str] = {}
    for text, cores in zip(group.cpu_cores, sets, strict=True):
        if not cores:
            found.refuse("PLAN-018", f"core set '{text}' of Process '{group.name}' is empty", at, about=group.stages)
        if found.host.cpu_count is not None and cores and cores[-1] >= found.host.cpu_count:
            message = f"core {cores[-1]} of Process '{group.name}' does not exist; the host has {found.host.cpu_count}"
            found.refuse("PLAN-018", message, at, about=group.stages)
        clash = next((c for c in cores if c in used), None)
        if clash is not None:
            message = f"core sets '{used[clash]}' and '{text}' of Process '{group.name}' share core {clash}"
            found.refuse("PLAN-018", message, at, hint="sets without a common core", about=group.stages)
        used.update(dict.fromkeys(cores, text))
    return sets
