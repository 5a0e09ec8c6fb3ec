"""This machine's CPU cores: which NUMA node a GPU hangs on, which cores are threads of one another, and blocks of them.

Everything is read from sysfs, whose root is an argument, so that another machine's can be looked at.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from sgl_omni.config.scalars import core_numbers, core_text
from sgl_omni.topology.host import Cores

SYSFS = Path("/sys")
_BLOCK = re.compile(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*")


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
