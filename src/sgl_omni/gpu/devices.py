"""Which platform this machine offers. Asks the driver's management library; imports no torch."""

from __future__ import annotations

import importlib.metadata

import pynvml

from sgl_omni.topology.plan import PlatformName


def detect_platform() -> PlatformName:
    """`cuda` where an NVIDIA driver lists a GPU and the installed torch is not the CPU-only build, else `cpu`."""
    if importlib.metadata.version("torch").endswith("+cpu"):
        return "cpu"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return "cpu"
    try:
        return "cuda" if pynvml.nvmlDeviceGetCount() else "cpu"
    finally:
        pynvml.nvmlShutdown()
