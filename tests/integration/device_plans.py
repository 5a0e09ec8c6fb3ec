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
    instance_name,
)

MIB = 2**20


def device_plan(
    platform: PlatformName = "cpu",
    devices: tuple[int, ...] = (0, 0),
    *,
    transport: Transport = "cuda_ipc",
    limit: int = 64 * MIB,
    on_process_exit: ExitPolicy = "stop",
    stream: bool = False,
) -> Plan:
    """`make` on the first device and a replica of `check` on each of the others, all in processes of their own.

    With `stream` the first pours a stream and the others catch it.
    """
    maker_does, checker_does = ("pour", "catch") if stream else ("make", "check")
    stages = (
        StagePlan(
            name="make",
            process="make",
            factory_path=f"device_stages.{maker_does}",
            next=("check",),
            stream_to=("check",) if stream else (),
            gpu=True,
            transport_bytes=limit,
        ),
        StagePlan(name="check", process="check", factory_path=f"device_stages.{checker_does}", terminal=True, gpu=True),
    )
    copies = len(devices) - 1
    maker = InstancePlan(name="make", process="make", stages=("make",), device=devices[0])
    checkers = tuple(
        InstancePlan(
            name=instance_name("check", i, copies), process="check", stages=("check",), replica=i, device=device
        )
        for i, device in enumerate(devices[1:])
    )
    order = ("make", *(c.name for c in checkers))
    return Plan(
        name="device-tensors",
        model_path=None,
        platform=platform,
        entry="make",
        stages=stages,
        processes=(
            ProcessPlan(name="make", stages=("make",)),
            ProcessPlan(name="check", stages=("check",), num_replicas=copies),
        ),
        instances=(maker, *checkers),
        edges=tuple(
            EdgePlan(source="make", target="check", kind=kind, transport=transport)
            for kind in (("payload", "stream") if stream else ("payload",))
        ),
        spawn_waves=(order,),
        shutdown_order=(order,),
        on_process_exit=on_process_exit,
    )
