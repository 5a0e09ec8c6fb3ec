"""Which replicas share one set of weights (rule 10)."""

from __future__ import annotations

from collections import defaultdict

from sgl_omni.config.violations import KeyPath
from sgl_omni.topology.findings import Findings, listed, quoted
from sgl_omni.topology.placement import Placed
from sgl_omni.topology.plan import SharingGroup
from sgl_omni.topology.processes import ProcessGroup

ROLE_VARIABLES = ("SGL_OMNI_WEIGHT_SHARE", "SGLANG_OMNI_WEIGHT_SHARE")


def sharing_groups(found: Findings, placed: tuple[Placed, ...]) -> tuple[SharingGroup, ...]:
    """One group per Process and GPU that holds two or more of its replicas, in plan order."""
    if found.resolved.config.weight_share == "off":
        return ()
    at: KeyPath = ("weight_share",)
    for variable in ROLE_VARIABLES:
        if found.environ.get(variable):
            message = f"{variable} is set in the environment, but weight_share: on assigns the roles itself"
            found.refuse("PLAN-010", message, at, hint=f"unset {variable}")
        for stage in (name for name, settings in found.stages.items() if variable in settings.env):
            message = f"stage '{stage}' sets {variable}, but weight_share: on assigns the roles itself"
            found.refuse("PLAN-010", message, ("stages", stage, "env", variable), hint=f"no {variable}")
    groups: list[SharingGroup] = []
    asked = False
    for group, devices in _repeated(placed).items():
        engines = [s for s in group.stages if s in found.resolved.engine_stages]
        if not engines:
            found.warn(f"weight_share: Process '{group.name}' has no engine stage, so its replicas are not shared")
            continue
        asked = True
        _check_group(found, group, engines)
        groups += [
            SharingGroup(process=group.name, device=gpu, leader=names[0], followers=tuple(names[1:]))
            for gpu, names in devices.items()
            if len(names) > 1
        ]
    if not asked:
        message = "weight_share: on, but no Process with an engine has two replicas on one GPU"
        hint = "processes.<engine's Process>: {num_replicas: 2, replica_devices: [0, 0]}, or weight_share: off"
        found.refuse("PLAN-010", message, at, hint=hint)
    elif groups:
        _check_architecture(found)
    return tuple(groups)


def _repeated(placed: tuple[Placed, ...]) -> dict[ProcessGroup, dict[int, list[str]]]:
    """Processes of which two replicas are on one GPU, with the instances per GPU."""
    by_group: dict[ProcessGroup, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for p in placed:
        if p.device is not None and p.group.num_replicas > 1:
            by_group[p.group][p.device].append(p.name)
    return {group: devices for group, devices in by_group.items() if any(len(n) > 1 for n in devices.values())}


def _check_group(found: Findings, group: ProcessGroup, engines: list[str]) -> None:
    at: KeyPath = ("processes", group.name)
    if len(engines) > 1:
        message = f"weight_share: Process '{group.name}' has {len(engines)} engine stages, {quoted(engines)}"
        found.refuse("PLAN-010", message, at, hint="one engine stage per sharing Process", about=engines)
    if group.tp_size > 1:
        message = f"weight_share: Process '{group.name}' is tensor-parallel; only tp_size 1 can share"
        found.refuse("PLAN-010", message, at, hint="tp_size: 1, or weight_share: off", about=engines)
    for stage in engines:
        engine = found.stages[stage].engine
        if engine is None or (engine.max_total_tokens is None and engine.kv_cache_bytes is None):
            message = (
                f"weight_share: engine stage '{stage}' of Process '{group.name}' pins no KV capacity, and a follower "
                "cannot measure one"
            )
            hint = f"stages.{stage}.engine.max_total_tokens or .kv_cache_bytes"
            found.refuse("PLAN-010", message, ("stages", stage), hint=hint)


def _check_architecture(found: Findings) -> None:
    """An architecture that writes into its weights would corrupt its neighbours, so it must have been audited."""
    cls = found.resolved.cls
    unknown = [a for a in cls.architectures if a not in cls.shareable_architectures]
    if cls.architectures and len(unknown) == len(cls.architectures):
        message = f"weight_share: architecture {listed(unknown, 'or')} is not on the share-policy list"
        found.refuse("PLAN-010", message, ("weight_share",), hint="weight_share: off, or audit the architecture first")
