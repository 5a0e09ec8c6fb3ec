"""This machine's CPU cores: which NUMA node a GPU hangs on, which cores are threads of one another, and blocks of them.

Everything is read from sysfs, whose root is an argument, so that another machine's can be looked at.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sgl_omni.config.scalars import core_numbers

SYSFS = Path("/sys")
_BLOCK = re.compile(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*")


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


def read_cores(sysfs: Path = SYSFS, allowed: Collection[int] | None = None) -> Cores:
    """What sysfs tells. A kernel without NUMA has one node, 0; a CPU without topology is a core by itself.

    Args:
        allowed: CPUs that may be used; this process's affinity where left out.
    """
    usable = frozenset(os.sched_getaffinity(0) if allowed is None else allowed)
    base = sysfs / "devices/system"
    online = _list_in(base / "cpu/online") or usable
    folders = sorted((base / "node").glob("node[0-9]*"))
    nodes = {int(f.name.removeprefix("node")): _list_in(f / "cpulist") & online for f in folders}
    siblings = {cpu: _siblings(base / f"cpu/cpu{cpu}/topology", cpu) for cpu in online}
    return Cores(nodes or {0: online}, siblings, usable & online)


def gpu_node(bus_id: str, sysfs: Path = SYSFS) -> int | None:
    """The NUMA node of a PCI device, as NVML writes its address (``00000000:1B:00.0``); None where the machine does
    not say, which sysfs writes as -1."""
    domain, _, rest = bus_id.lower().partition(":")
    try:
        node = int((sysfs / "bus/pci/devices" / f"{domain[-4:]}:{rest}" / "numa_node").read_text())
    except (FileNotFoundError, ValueError):
        return None
    return None if node < 0 else node


def parse_blocks(text: str) -> tuple[tuple[int, ...], ...]:
    """``"0-3 8,9"`` -> ``((0, 1, 2, 3), (8, 9))``.

    Raises:
        ValueError: names the block that is no list of cores.
    """
    blocks = []
    for word in text.split():
        parts = [core_numbers(part) for part in word.split(",")] if _BLOCK.fullmatch(word) else [()]
        if not all(parts):
            raise ValueError(
                f"core block '{word}': write cores and ranges, as 0-9 or 0,2,4-7, and a space between blocks"
            )
        blocks.append(tuple(sorted({cpu for part in parts for cpu in part})))
    return tuple(blocks)


def split_cores(cores: Sequence[int], blocks: int) -> tuple[tuple[int, ...], ...]:
    """As many even blocks of neighbouring cores; what cannot be divided is left out.

    Raises:
        ValueError: there are fewer cores than blocks.
    """
    size = len(cores) // blocks
    if size == 0:
        raise ValueError(f"{blocks} blocks of cores are asked for, and there are {len(cores)} physical cores")
    return tuple(tuple(cores[i * size : (i + 1) * size]) for i in range(blocks))


def block_problems(blocks: Sequence[Sequence[int]], cores: Cores, node: int | None) -> list[str]:
    """All that is wrong with core blocks: a core used twice, by number or as two threads of it; one that is missing."""
    problems = []
    owner: dict[int, int] = {}
    twice: dict[tuple[int, int], list[int]] = {}
    for index, block in enumerate(blocks):
        for cpu in block:
            if cpu in owner:
                twice.setdefault((owner[cpu], index), []).append(cpu)
            owner.setdefault(cpu, index)
    for (first, second), shared in twice.items():
        problems.append(f"core blocks {first} and {second} overlap: both have {_cores(shared)}")
    absent = sorted(cpu for cpu in owner if cpu not in cores.siblings)
    elsewhere = sorted(cpu for cpu in owner if cpu not in absent and cpu not in cores.of_node(None))
    remote = sorted(cpu for cpu in owner if cpu not in absent + elsewhere and cpu not in cores.of_node(node))
    if absent:
        problems.append(f"this machine has no {_cores(absent)} (online: {core_text(cores.siblings)})")
    if elsewhere:
        problems.append(f"this process may not run on {_cores(elsewhere)}, only on {core_text(cores.allowed)}")
    if remote:
        usable = core_text(cores.physical(node)) or "none"
        problems.append(
            f"{_cores(remote)} {_is(remote)} not on NUMA node {node}, whose physical cores here are {usable}"
        )
    for group in sorted({tuple(sorted(cores.siblings[cpu] & owner.keys())) for cpu in owner if cpu not in absent}):
        if len(group) > 1:
            problems.append(f"{_cores(group)} are threads of one physical core: name one of them")
    return problems


def core_text(cores: Iterable[int]) -> str:
    """``0-3,8``: how cores are written."""
    runs: list[list[int]] = []
    for cpu in sorted(cores):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _cores(cores: Sequence[int]) -> str:
    return f"core{'s' if len(cores) > 1 else ''} {core_text(cores)}"


def _is(cores: Sequence[int]) -> str:
    return "are" if len(cores) > 1 else "is"


def _siblings(topology: Path, cpu: int) -> frozenset[int]:
    return _list_in(topology / "thread_siblings_list") or frozenset({cpu})


def _list_in(path: Path) -> frozenset[int]:
    """A list such as ``0-3,8``; empty where the file is absent or empty."""
    try:
        text = path.read_text().strip()
    except FileNotFoundError:
        return frozenset()
    return frozenset(core_numbers(text)) if text else frozenset()
