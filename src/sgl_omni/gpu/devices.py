"""This machine's GPUs and the platform they make. Asks the driver's management library; imports no torch."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_omni.errors import StartupError
from sgl_omni.gpu.affinity import gpu_node, read_cores
from sgl_omni.topology.host import Device, Host, node_parts


def usable_host() -> Host | None:
    """This machine's GPUs, where the installed torch can use them; None where stages run on the CPU platform."""
    return None if importlib.metadata.version("torch").endswith("+cpu") else real_host()


def real_host() -> Host | None:
    """This machine's GPUs as the driver lists them; None where there is no driver or no GPU."""
    if not any(Path(p).exists() for p in ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg")):
        return None  # spares loading the driver's library
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        nodes = [gpu_node(_bus_id(h)) for h in handles]
        parts = node_parts(nodes)
        devices = tuple(
            Device(
                memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handles[i]).total),
                name=str(pynvml.nvmlDeviceGetName(handles[i])),
                numa_node=nodes[i],
                node_part=parts[i],
            )
            for i in _visible(handles)
        )
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
    if not devices:
        return None
    mps = shutil.which("nvidia-cuda-mps-control") is not None
    return Host(devices=devices, mps=mps, cpu_count=os.cpu_count(), cores=read_cores())


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """What the driver says of one GPU: its UUID, the processes that compute on it now, and its address on the PCI bus
    (``00000000:1B:00.0``)."""

    uuid: str
    compute_pids: tuple[int, ...]
    bus_id: str = ""


def gpu_facts(ordinal: int) -> GpuFacts:
    """The GPU behind an ordinal of this process, in the order of `CUDA_VISIBLE_DEVICES` where that is set.

    Raises:
        StartupError: there is no such GPU, or the driver does not answer.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise StartupError(f"GPU {ordinal}: the NVIDIA driver does not answer: {error}") from error
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        visible = _visible(handles)
        if ordinal >= len(visible):
            raise StartupError(f"GPU {ordinal}: this process sees {len(visible)} GPUs")
        handle = handles[visible[ordinal]]
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        uuid = str(pynvml.nvmlDeviceGetUUID(handle))
        return GpuFacts(uuid, tuple(int(p.pid) for p in running), _bus_id(handle))
    except pynvml.NVMLError as error:
        raise StartupError(f"GPU {ordinal}: the NVIDIA driver refuses: {error}") from error
    finally:
        pynvml.nvmlShutdown()


def machine_index(ordinal: int) -> int:
    """The number that the machine, and so NVML, gives the GPU behind an ordinal of this process.

    Raises:
        StartupError: there is no such GPU, or the driver does not answer.
    """
    import pynvml

    gpu_facts(ordinal)
    pynvml.nvmlInit()
    try:
        return _visible([pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())])[ordinal]
    finally:
        pynvml.nvmlShutdown()


def memory_by_process(ordinal: int) -> dict[int, int] | None:
    """Bytes of a GPU that each process holds, by pid; None where the driver does not tell, as in some containers.

    Raises:
        StartupError: there is no such GPU, or the driver does not answer.
    """
    import pynvml

    gpu_facts(ordinal)
    pynvml.nvmlInit()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(handles[_visible(handles)[ordinal]])
    except pynvml.NVMLError as error:
        raise StartupError(f"GPU {ordinal}: the NVIDIA driver refuses: {error}") from error
    finally:
        pynvml.nvmlShutdown()
    held = {int(p.pid): p.usedGpuMemory for p in running}
    return None if not held or None in held.values() else {pid: int(size) for pid, size in held.items()}


def _visible(handles: Sequence[Any]) -> list[int]:
    """Indices of the GPUs that this process may use: indices and (beginnings of) UUIDs are understood, and as CUDA
    does, the list ends at the first entry that names no GPU."""
    import pynvml

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return list(range(len(handles)))
    return select_visible(visible, [str(pynvml.nvmlDeviceGetUUID(h)) for h in handles])


def _bus_id(handle: Any) -> str:
    import pynvml

    bus = pynvml.nvmlDeviceGetPciInfo(handle).busId
    return bus if isinstance(bus, str) else str(bus.decode())


def select_visible(visible: str, uuids: Sequence[str]) -> list[int]:
    """The indices that a `CUDA_VISIBLE_DEVICES` chooses among GPUs with these UUIDs."""
    chosen: list[int] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.isdigit():
            found = [int(entry)] if int(entry) < len(uuids) else []
        else:
            found = [i for i, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
        if len(found) != 1 or found[0] in chosen:
            break
        chosen += found
    return chosen
