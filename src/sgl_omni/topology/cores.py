"""Which CPU cores an instance that uses a GPU gets where `cpu_cores` says nothing: near its GPU, and no other's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from sgl_omni.topology.findings import Findings, listed
from sgl_omni.topology.host import Cores, Host
from sgl_omni.topology.placement import Placed

T = TypeVar("T")
LEAST = {"auto": 2, "on": 1}
"""Physical cores that an instance needs for its set to be worth having: an engine's thread and the event loop beside it
both run all the time, so with one core to itself an instance is better off where the kernel puts it."""


@dataclass(frozen=True, slots=True)
class _Core:
    """The CPUs of one physical core that may be used."""

    cpus: tuple[int, ...]


def split_cores(cores: Sequence[T], blocks: int) -> tuple[tuple[T, ...], ...]:
    """As many even blocks of neighbouring cores; what cannot be divided is left out.

    Raises:
        ValueError: there are fewer cores than blocks.
    """
    size = len(cores) // blocks
    if size == 0:
        raise ValueError(f"{blocks} blocks of cores are asked for, and there are {len(cores)} physical cores")
    return tuple(tuple(cores[i * size : (i + 1) * size]) for i in range(blocks))


def derive_cores(found: Findings, placed: tuple[Placed, ...]) -> tuple[Placed, ...]:
    """Gives every GPU instance without `cpu_cores` a set of whole physical cores of its GPU's NUMA node.

    The sets are disjoint. Nothing is derived for a single GPU instance, on the CPU platform unless `on` asks for it,
    and, with a note in the plan, where the cores are unknown or too few.
    """
    mode = found.resolved.config.placement.derive_cpu_cores
    wanted = [p for p in placed if p.device is not None and p.group.cpu_cores is None]
    several = sum(p.device is not None for p in placed) > 1
    if mode == "off" or not wanted or not several or (mode == "auto" and found.host.platform == "cpu"):
        return placed
    host = found.host
    if host.cores is None:
        if mode == "on":
            found.warn("derive_cpu_cores: on does nothing: the CPU cores of this machine are not known")
        return placed
    pools = _pools(host, host.cores, placed)
    members = _nodes(host, pools, wanted)
    sets: dict[str, tuple[_Core, ...]] = {}
    for node, instances in members.items():
        if len(pools[node]) < LEAST[mode] * len(instances):
            found.warn(_too_few(node, len(pools[node]), instances, LEAST[mode]))
            return placed
        blocks = split_cores(pools[node], len(instances))
        sets |= {p.name: block for p, block in zip(instances, blocks, strict=True)}
    return tuple(_with_cores(p, sets[p.name]) if p.name in sets else p for p in placed)


def thread_count(cpus: Iterable[int], host: Host) -> int:
    """How many physical cores some CPUs are, which is what they carry of compute threads."""
    numbers = set(cpus)
    if host.cores is None:
        return len(numbers)
    siblings = host.cores.siblings
    return len({min(siblings.get(cpu, {cpu})) for cpu in numbers})


def _with_cores(instance: Placed, cores: tuple[_Core, ...]) -> Placed:
    cpus = tuple(sorted(cpu for core in cores for cpu in core.cpus))
    return replace(instance, cores=cpus, threads=len(cores))


def _pools(host: Host, cores: Cores, placed: tuple[Placed, ...]) -> dict[int, list[_Core]]:
    """The physical cores of each node that this plan may divide, without those that `cpu_cores` names.

    Where this process may use a whole node, the GPUs of the node have equal parts of it, used or not, so that another
    server on another GPU derives other cores. A node that was restricted before has been divided by whoever did it.
    """
    taken = {sibling for p in placed for cpu in p.cores for sibling in cores.siblings.get(cpu, {cpu})}
    devices = {p.device for p in placed if p.device is not None}
    pools: dict[int, list[_Core]] = {}
    for node in sorted(cores.nodes):
        usable = cores.of_node(node)
        own = [_Core(tuple(sorted(cores.siblings[cpu] & usable))) for cpu in cores.physical(node)]
        if usable == cores.nodes[node]:
            own = _parts_of_gpus(own, host, devices, node)
        pools[node] = [core for core in own if not taken.intersection(core.cpus)]
    return pools


def _parts_of_gpus(cores: list[_Core], host: Host, devices: set[int], node: int) -> list[_Core]:
    """The parts of a node's cores that belong to the GPUs which this plan uses."""
    near = [host.devices[d] for d in sorted(devices) if host.devices is not None and d < len(host.devices)]
    parts = sorted({d.node_part for d in near if d.numa_node == node and d.node_part is not None})
    if not parts:
        return cores
    of = parts[0][1]
    if len(cores) < of:
        return cores
    blocks = split_cores(cores, of)
    return [core for index, _ in parts for core in blocks[index]]


def _nodes(host: Host, pools: dict[int, list[_Core]], wanted: list[Placed]) -> dict[int, list[Placed]]:
    """The instances by node. One whose GPU's node is unknown goes where most cores an instance are left."""
    members: dict[int, list[Placed]] = defaultdict(list)
    homeless = []
    for p in wanted:
        node = host.node(p.device) if p.device is not None else None
        if node is None or not pools.get(node):
            homeless.append(p)
        else:
            members[node].append(p)
    for p in homeless:
        members[max(pools, key=lambda n: (len(pools[n]) / (len(members[n]) + 1), -n))].append(p)
    return {node: instances for node, instances in sorted(members.items()) if instances}


def _too_few(node: int, cores: int, instances: list[Placed], least: int) -> str:
    names = listed(p.name for p in instances)
    each = "a physical core" if least == 1 else f"{least} physical cores"
    return (
        f"no CPU cores are derived: {names} would each need {each}, and NUMA node {node} has {cores} for them; "
        "set cpu_cores to divide them by hand, or placement.derive_cpu_cores: off"
    )
