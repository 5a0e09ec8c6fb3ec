"""The machine that a plan is made for: real, pretended or virtual. Plain data; nothing here touches a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sgl_omni.topology.plan import PlatformName

GIB = 2**30
DEFAULT_VIRTUAL_MEMORY = 4 * GIB


@dataclass(frozen=True, slots=True)
class Cores:
    """The CPUs that may be used.

    ``nodes``: NUMA node -> its online CPUs. ``siblings``: CPU -> the CPUs of its physical core, itself among them.
    ``allowed``: what this process may run on.
    """

    nodes: dict[int, frozenset[int]]
    siblings: dict[int, frozenset[int]]
    allowed: frozenset[int]

    def of_node(self, node: int | None) -> frozenset[int]:
        """The CPUs of a node that this process may run on; those of all nodes for None."""
        everywhere = frozenset[int]().union(*self.nodes.values())
        return self.allowed & (everywhere if node is None else self.nodes.get(node, frozenset()))

    def physical(self, node: int | None) -> tuple[int, ...]:
        """One CPU for each physical core of a node, the lowest that may be used, in order."""
        usable = self.of_node(node)
        return tuple(sorted({min(self.siblings[cpu] & usable) for cpu in usable}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU ordinal. Ordinals with one ``physical`` are the same card.

    ``numa_node``: None where the machine does not say. ``node_part``: (i, n), the GPU is number i of the n on its node.
    """

    memory_bytes: int | None = None
    name: str = ""
    physical: int | None = None
    numa_node: int | None = None
    node_part: tuple[int, int] | None = None


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
    cores: Cores | None = None

    def has(self, device: int) -> bool:
        return self.devices is None or device < len(self.devices)

    def memory(self, device: int) -> int | None:
        """Total memory of a GPU, where it is known."""
        if self.devices is not None and device < len(self.devices):
            own = self.devices[device].memory_bytes
            return self.memory_bytes if own is None else own
        return self.memory_bytes

    def node(self, device: int) -> int | None:
        """The NUMA node of a GPU, where it is known."""
        return self.devices[device].numa_node if self.devices is not None and device < len(self.devices) else None

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


def virtual_host(
    memory_bytes: int = DEFAULT_VIRTUAL_MEMORY, cpu_count: int | None = None, cores: Cores | None = None
) -> Host:
    """The CPU platform: ``gpu: N`` is a virtual device, as many as the configuration names."""
    return Host(platform="cpu", memory_bytes=memory_bytes, mps=False, cpu_count=cpu_count, cores=cores)


def node_parts(nodes: Sequence[int | None]) -> list[tuple[int, int] | None]:
    """For the NUMA node of each GPU of a machine, the GPU's number among those of its node, and how many these are."""
    return [None if n is None else (nodes[:i].count(n), nodes.count(n)) for i, n in enumerate(nodes)]


def cuda_host(
    count: int | None,
    memory_bytes: int | None = None,
    *,
    mps: bool | None = None,
    same_physical: Iterable[Iterable[int]] = (),
    cpu_count: int | None = None,
    cores: Cores | None = None,
    gpu_nodes: Sequence[int | None] = (),
) -> Host:
    """A pretended machine of ``count`` equal GPUs (None: as many as are asked for), on the NUMA nodes ``gpu_nodes``."""
    groups = [sorted(set(group)) for group in same_physical]
    if count is None:
        if not groups:
            return Host(memory_bytes=memory_bytes, mps=mps, cpu_count=cpu_count, cores=cores)
        count = 64
    card = {ordinal: group[0] for group in groups for ordinal in group}
    nodes = [*gpu_nodes, *[None] * count][:count]
    parts = node_parts(nodes)
    devices = tuple(
        Device(memory_bytes=memory_bytes, physical=card.get(i, i), numa_node=nodes[i], node_part=parts[i])
        for i in range(count)
    )
    return Host(devices=devices, memory_bytes=memory_bytes, mps=mps, cpu_count=cpu_count, cores=cores)
