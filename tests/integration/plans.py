"""Builds plans for runtime tests directly, so that these tests stand on the Plan alone."""

from __future__ import annotations

from collections.abc import Mapping

from sgl_omni.topology.plan import ExitPolicy, InstancePlan, Plan, ProcessPlan, ReplicaPolicy, StagePlan, instance_name


def stage(name: str, factory: str, **fields: object) -> StagePlan:
    """A stage whose factory is named within `stages.py` beside this file; its process defaults to its name."""
    fields = {"process": name, **fields}
    for key in ("next", "stream_to", "wait_for"):
        value = fields.get(key, ())
        fields[key] = (value,) if isinstance(value, str) else tuple(value)  # type: ignore[arg-type]
    for key in ("route_fn", "merge_fn"):
        if key in fields:
            fields[key] = f"stages.{fields[key]}"
    return StagePlan(name=name, factory_path=f"stages.{factory}", **fields)  # type: ignore[arg-type]


def plan_of(
    *stages: StagePlan,
    replicas: Mapping[str, int] | None = None,
    policy: ReplicaPolicy = "round_robin",
    on_process_exit: ExitPolicy = "stop",
) -> Plan:
    """The first stage is the entry."""
    replicas = replicas or {}
    members: dict[str, tuple[str, ...]] = {}
    for s in stages:
        members[s.process] = (*members.get(s.process, ()), s.name)
    processes = tuple(
        ProcessPlan(name=name, stages=names, num_replicas=replicas.get(name, 1), policy=policy)
        for name, names in members.items()
    )
    instances = tuple(
        InstancePlan(name=instance_name(p.name, r, p.num_replicas), process=p.name, stages=p.stages, replica=r)
        for p in processes
        for r in range(p.num_replicas)
    )
    order = tuple(i.name for i in instances)
    return Plan(
        name="test",
        model_path=None,
        platform="cpu",
        entry=stages[0].name,
        stages=stages,
        processes=processes,
        instances=instances,
        edges=(),
        spawn_waves=(order,),
        shutdown_order=(order,),
        on_process_exit=on_process_exit,
    )
