"""How the process of an instance numbers the GPUs: its own comes first, so that no thread takes another by default.

CUDA's current device is 0 in every thread that does not say otherwise, and a kernel launched there cannot use tensors
of another. The other GPUs of the plan stay visible, as what comes from them is copied by peer access.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sgl_omni.topology.mps import VISIBILITY, named_ordinals
from sgl_omni.topology.plan import InstancePlan, Plan


@dataclass(frozen=True, slots=True)
class Sight:
    """What a process sees. `device`: its own GPU, as it numbers it; `environment`: what brings that about."""

    device: int | None
    environment: dict[str, str] = field(default_factory=dict[str, str])


def sight(plan: Plan, instance: InstancePlan, inherited: str | None) -> Sight:
    """`inherited`: the server's own `CUDA_VISIBLE_DEVICES`, in whose order the plan numbers GPUs.

    Under MPS a process sees its own GPU alone. One whose stages say themselves what it sees, or name a ``cuda:N`` in
    their arguments, numbers GPUs as the plan does.
    """
    device = instance.device
    if device is None or plan.platform != "cuda":
        return Sight(device)
    if instance.mps:
        return Sight(0)
    if VISIBILITY in instance.env or _names_one(plan, instance):
        return Sight(device)
    entries = _entries(plan, inherited)
    if device >= len(entries):
        return Sight(device)
    own = entries.pop(device)
    return Sight(0, {VISIBILITY: ",".join([own, *entries])})


def _names_one(plan: Plan, instance: InstancePlan) -> bool:
    return any(True for name in instance.stages for _ in named_ordinals(plan.stage(name).factory_args))


def _entries(plan: Plan, inherited: str | None) -> list[str]:
    if inherited is not None:
        return [entry.strip() for entry in inherited.split(",")]
    return [str(i) for i in range(1 + max(i.device for i in plan.instances if i.device is not None))]
