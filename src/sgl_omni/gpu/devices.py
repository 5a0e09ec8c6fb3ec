"""This machine's GPUs and the platform they make. Asks the driver's management library; imports no torch."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from pathlib import Path

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
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        devices = tuple(
            Device(memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(h).total), name=str(pynvml.nvmlDeviceGetName(h)))
            for h in handles
        )
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
    if not devices:
        return None
    mps = shutil.which("nvidia-cuda-mps-control") is not None
    return Host(devices=devices, mps=mps, cpu_count=os.cpu_count())
