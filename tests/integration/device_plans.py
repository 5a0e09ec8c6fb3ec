"""A plan whose tensors may stay on their device between two processes, for any platform."""

from __future__ import annotations

from sgl_omni.topology.plan import (
    EdgePlan,
    ExitPolicy,
    InstancePlan,
    Plan,
    PlatformName,
    ProcessPlan,
    StagePlan,
    Transport,
)

MIB = 2**20


def device_plan(
    platform: PlatformName = "cpu",
    devices: tuple[int, int] = (0, 0),
    *,
    transport: Transport = "cuda_ipc",
    limit: int = 64 * MIB,
    on_process_exit: ExitPolicy = "stop",
) -> Plan:
    """`make` on the first device, `check` on the second, each in a process of its own."""
    stages = (
        StagePlan(
            name="make",
            process="make",
            factory_path="device_stages.make",
            next=("check",),
            gpu=True,
            transport_bytes=limit,
        ),
        StagePlan(name="check", process="check", factory_path="device_stages.check", terminal=True, gpu=True),
    )
    instances = tuple(
        InstancePlan(name=s.name, process=s.name, stages=(s.name,), device=device)
        for s, device in zip(stages, devices, strict=True)
    )
    order = ("make", "check")
    return Plan(
        name="device-tensors",
        model_path=None,
        platform=platform,
        entry="make",
        stages=stages,
        processes=tuple(ProcessPlan(name=name, stages=(name,)) for name in order),
        instances=instances,
        edges=(EdgePlan(source="make", target="check", kind="payload", transport=transport),),
        spawn_waves=(order,),
        shutdown_order=(order,),
        on_process_exit=on_process_exit,
    )
