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
from sgl_omni.topology.host import Device, Host


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
        devices = tuple(
            Device(memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(h).total), name=str(pynvml.nvmlDeviceGetName(h)))
            for h in _visible_handles()
        )
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
    if not devices:
        return None
    mps = shutil.which("nvidia-cuda-mps-control") is not None
    return Host(devices=devices, mps=mps, cpu_count=os.cpu_count())


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
        handles = _visible_handles()
        if ordinal >= len(handles):
            raise StartupError(f"GPU {ordinal}: this process sees {len(handles)} GPUs")
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(handles[ordinal])
        bus = pynvml.nvmlDeviceGetPciInfo(handles[ordinal]).busId
        uuid = str(pynvml.nvmlDeviceGetUUID(handles[ordinal]))
        return GpuFacts(uuid, tuple(int(p.pid) for p in running), bus if isinstance(bus, str) else bus.decode())
    except pynvml.NVMLError as error:
        raise StartupError(f"GPU {ordinal}: the NVIDIA driver refuses: {error}") from error
    finally:
        pynvml.nvmlShutdown()


def _visible_handles() -> list[Any]:
    """Handles of the GPUs that this process may use: indices and (beginnings of) UUIDs are understood, and as CUDA
    does, the list ends at the first entry that names no GPU."""
    import pynvml

    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return handles
    uuids = [str(pynvml.nvmlDeviceGetUUID(h)) for h in handles]
    return [handles[i] for i in select_visible(visible, uuids)]


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
