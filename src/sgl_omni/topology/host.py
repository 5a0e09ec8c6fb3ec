"""The machine that a plan is made for: real, pretended or virtual. Plain data; nothing here touches a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sgl_omni.topology.plan import PlatformName

GIB = 2**30
DEFAULT_VIRTUAL_MEMORY = 4 * GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU ordinal. Ordinals with one ``physical`` are the same card."""

    memory_bytes: int | None = None
    name: str = ""
    physical: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What is known of a machine.

    ``devices`` is None where the count is unknown (any id is taken); ``memory_bytes`` then holds for each.
    ``mps`` is None where nobody looked: planning assumes that it can, startup checks.
    """

    platform: PlatformName = "cuda"
    devices: tuple[Device, ...] | None = None
    memory_bytes: int | None = None
    mps: bool | None = None
    cpu_count: int | None = None

    def has(self, device: int) -> bool:
        return self.devices is None or device < len(self.devices)

    def memory(self, device: int) -> int | None:
        """Total memory of a GPU, where it is known."""
        if self.devices is not None and device < len(self.devices):
            own = self.devices[device].memory_bytes
            return self.memory_bytes if own is None else own
        return self.memory_bytes

    def card(self, device: int) -> int:
        """The lowest ordinal of the physical GPU behind an ordinal."""
        if self.devices is None or device >= len(self.devices):
            return device
        physical = self.devices[device].physical
        if physical is None:
            return device
        return next(i for i, d in enumerate(self.devices) if d.physical == physical)

    def describe(self) -> str:
        if self.platform == "cpu":
            return "CPU platform: virtual GPUs" + (f" of {self.memory_bytes / GIB:g} GiB" if self.memory_bytes else "")
        if self.devices is None:
            size = f" of {self.memory_bytes / GIB:g} GiB" if self.memory_bytes else ", memory unknown"
            return f"CUDA platform: GPU count unknown{size}"
        sizes = {self.memory(i) for i in range(len(self.devices))}
        only = sizes.pop() if len(sizes) == 1 else None
        return f"CUDA platform: {len(self.devices)} GPUs" + (f" of {only / GIB:.0f} GiB" if only else "")


def virtual_host(memory_bytes: int = DEFAULT_VIRTUAL_MEMORY, cpu_count: int | None = None) -> Host:
    """The CPU platform: ``gpu: N`` is a virtual device, as many as the configuration names."""
    return Host(platform="cpu", memory_bytes=memory_bytes, mps=False, cpu_count=cpu_count)


def cuda_host(
    count: int | None,
    memory_bytes: int | None = None,
    *,
    mps: bool | None = None,
    same_physical: Iterable[Iterable[int]] = (),
    cpu_count: int | None = None,
) -> Host:
    """A pretended machine of ``count`` equal GPUs (None: as many as are asked for)."""
    groups = [sorted(set(group)) for group in same_physical]
    if count is None:
        if not groups:
            return Host(memory_bytes=memory_bytes, mps=mps, cpu_count=cpu_count)
        count = 64
    card = {ordinal: group[0] for group in groups for ordinal in group}
    devices = tuple(Device(memory_bytes=memory_bytes, physical=card.get(i, i)) for i in range(count))
    return Host(devices=devices, memory_bytes=memory_bytes, mps=mps, cpu_count=cpu_count)
