"""Which replicas share one set of weights (rule 10)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from sgl_omni.config.violations import KeyPath
from sgl_omni.topology.findings import Findings, listed, quoted
from sgl_omni.topology.placement import Placed
from sgl_omni.topology.plan import SharingGroup, WeightRole
from sgl_omni.topology.processes import ProcessGroup

ROLE_VARIABLES = ("SGL_OMNI_WEIGHT_SHARE", "SGLANG_OMNI_WEIGHT_SHARE")


def sharing_groups(found: Findings, placed: tuple[Placed, ...]) -> tuple[SharingGroup, ...]:
    """One group per Process and GPU that holds two or more of its replicas, in plan order; under `servers`, where the
    others may be those of other servers, one that holds any."""
    mode = found.resolved.config.weight_share
    if mode != "servers" and found.resolved.config.weights_from is not None:
        message = f"weights_from names another server, but with weight_share: {mode} nothing is had from there"
        found.refuse("PLAN-010", message, ("weights_from",), hint="weight_share: servers, or no weights_from")
    if mode == "off":
        return ()
    _check_environment(found, mode)
    least = 1 if mode == "servers" else 2
    groups: list[SharingGroup] = []
    asked = False
    for group, devices in _on_gpus(placed, least).items():
        engines = [s for s in group.stages if s in found.resolved.engine_stages]
        if not engines:
            whose = "its replicas are" if mode == "on" else "it is"
            found.warn(f"weight_share: Process '{group.name}' has no engine stage, so {whose} not shared")
            continue
        asked = True
        _check_group(found, group, engines)
        groups += [
            SharingGroup(process=group.name, device=gpu, leader=names[0], followers=tuple(names[1:]))
            for gpu, names in devices.items()
            if len(names) >= least
        ]
    if not asked:
        _refuse_nothing(found, mode)
    elif groups:
        _check_architecture(found)
    return tuple(groups)


def weight_roles(groups: Sequence[SharingGroup], *, borrowed: bool) -> dict[str, tuple[WeightRole, str | None]]:
    """Role and leader of each instance in a group. ``borrowed``: the weights come from another server."""
    roles: dict[str, tuple[WeightRole, str | None]] = {}
    for group in groups:
        follower: WeightRole = "borrower" if borrowed else "follower"
        roles[group.leader] = ("borrower", group.leader) if borrowed else ("leader", None)
        roles |= dict.fromkeys(group.followers, (follower, group.leader))
    return roles


def _check_environment(found: Findings, mode: str) -> None:
    for variable in ROLE_VARIABLES:
        if found.environ.get(variable):
            message = f"{variable} is set in the environment, but weight_share: {mode} assigns the roles itself"
            found.refuse("PLAN-010", message, ("weight_share",), hint=f"unset {variable}")
        for stage in (name for name, settings in found.stages.items() if variable in settings.env):
            message = f"stage '{stage}' sets {variable}, but weight_share: {mode} assigns the roles itself"
            found.refuse("PLAN-010", message, ("stages", stage, "env", variable), hint=f"no {variable}")


def _refuse_nothing(found: Findings, mode: str) -> None:
    message = "weight_share: on, but no Process with an engine has two replicas on one GPU"
    hint = "processes.<engine's Process>: {num_replicas: 2, replica_devices: [0, 0]}, or weight_share: off"
    if mode == "servers":
        message = "weight_share: servers, but no Process with an engine is on a GPU"
        hint = "stages.<engine stage>.gpu: 0, or weight_share: off"
    found.refuse("PLAN-010", message, ("weight_share",), hint=hint)


def _on_gpus(placed: tuple[Placed, ...], least: int) -> dict[ProcessGroup, dict[int, list[str]]]:
    """Processes of which so many replicas are on one GPU, with the instances per GPU."""
    by_group: dict[ProcessGroup, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for p in placed:
        if p.device is not None and p.group.num_replicas >= least:
            by_group[p.group][p.device].append(p.name)
    return {group: devices for group, devices in by_group.items() if any(len(n) >= least for n in devices.values())}


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
