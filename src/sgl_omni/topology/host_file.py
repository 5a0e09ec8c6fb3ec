"""A pretended machine from a YAML file, so that a laptop can check a plan for a big host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pydantic_core import PydanticCustomError

from sgl_omni.config.load import read_document
from sgl_omni.config.scalars import at_least, core_numbers, number, read_core_set, read_flag, read_size, shown
from sgl_omni.config.violations import Origin, PlanError, Violation, nearest
from sgl_omni.config.yaml_source import Document
from sgl_omni.topology.host import GIB, Cores, Host, cuda_host

T = TypeVar("T")
_KEYS = (
    "devices",
    "device_memory",
    "device_memory_gib",
    "mps_unsupported",
    "same_physical",
    "cpus",
    "numa_nodes",
    "threads_per_core",
    "gpu_numa_nodes",
)
MAX_DEVICES = 1024


def read_host(path: Path) -> Host:
    """Reads ``devices``, ``device_memory`` ("80GiB"), ``mps_unsupported``, ``same_physical``, ``cpus``, and where CPU
    cores are: ``numa_nodes`` (the CPUs of each), ``threads_per_core`` and ``gpu_numa_nodes``.

    Raises:
        PlanError: the file cannot be read or says something unknown.
    """
    document = read_document(path)
    if document.violations:
        raise PlanError(document.violations)
    return host_of(document)


def host_of(document: Document) -> Host:
    """The machine that a document describes; an empty one is a CUDA machine of unknown size."""
    data = document.data if document.data is not None else {}
    if not isinstance(data, dict):
        raise _refusal("a host is a mapping of keys to values", document.origin(()))
    for key in data:
        if key not in _KEYS:
            raise _refusal(f"unknown key '{key}' of a host", document.origin((key,)), nearest(key, _KEYS))
    fields = _Fields(document, data)
    memory = fields.read("device_memory", read_size)
    gib = fields.read("device_memory_gib", number)
    if memory is None and gib is not None:
        memory = int(gib * GIB)
    unsupported = fields.read("mps_unsupported", read_flag)
    count = fields.read("devices", at_least(0))
    if count is not None and count > MAX_DEVICES:
        raise _refusal(f"devices: more than {MAX_DEVICES}", document.origin(("devices",)))
    return cuda_host(
        count,
        memory,
        mps=None if unsupported is None else not unsupported,
        same_physical=fields.read("same_physical", _groups) or (),
        cpu_count=fields.read("cpus", at_least(1)),
        cores=_cores(fields),
        gpu_nodes=fields.read("gpu_numa_nodes", _node_list) or (),
    )


def _cores(fields: _Fields) -> Cores | None:
    """Where the file has ``numa_nodes``. Threads of a core are numbered as Linux does: all first ones come first."""
    nodes = fields.read("numa_nodes", _core_sets)
    threads = fields.read("threads_per_core", at_least(1)) or 1
    if nodes is None:
        return None
    cpus = sorted(cpu for node in nodes for cpu in node)
    stride = max(1, len(cpus) // threads)
    siblings = {cpu: frozenset(cpus[i % stride :: stride]) for i, cpu in enumerate(cpus)}
    return Cores({i: frozenset(node) for i, node in enumerate(nodes)}, siblings, frozenset(cpus))


class _Fields:
    def __init__(self, document: Document, data: dict[str, Any]) -> None:
        self._document = document
        self._data = data

    def read(self, key: str, parse: Callable[[object], T]) -> T | None:
        value = self._data.get(key)
        if value is None:
            return None
        try:
            return parse(value)
        except PydanticCustomError as error:
            raise _refusal(f"'{key}' {error.message()}", self._document.origin((key,))) from error


def _core_sets(value: object) -> list[tuple[int, ...]]:
    """``["0-31", "32-63"]``."""
    texts: list[Any] = value if isinstance(value, list) else [value]
    return [core_numbers(read_core_set(text)) for text in texts]


def _node_list(value: object) -> list[int | None]:
    """A node for each GPU; null, or -1 as the kernel writes it, where the machine does not say."""
    nodes: list[Any] = value if isinstance(value, list) else [value]
    number = at_least(0)
    return [None if node is None or node == -1 else number(node) for node in nodes]


def _groups(value: object) -> list[list[int]]:
    """``[0, 1]`` or ``[[0, 1], [2, 3]]``: ordinals that are one card."""
    groups: list[Any] = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
    ordinal = at_least(0)
    if not all(isinstance(group, list) for group in groups):
        raise PydanticCustomError("scalar", "{problem}", {"problem": f"must be lists of ordinals, not {shown(value)}"})
    return [[ordinal(o) for o in group] for group in groups]


def _refusal(message: str, place: Origin, hint: str | None = None) -> PlanError:
    return PlanError([Violation(code="PLAN-028", message=message, place=place, hint=hint)])
