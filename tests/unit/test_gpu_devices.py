"""This machine's GPUs as the driver's library tells of them, with a stand-in for that library."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sgl_omni.errors import StartupError
from sgl_omni.gpu import devices
from sgl_omni.topology.host import Cores

UUIDS = ("GPU-aaa", "GPU-bbb", "GPU-ccc")
BUSES = (b"00000000:1B:00.0", b"00000000:2B:00.0", b"00000000:9B:00.0")
NODES = {"00000000:1B:00.0": 0, "00000000:2B:00.0": 0, "00000000:9B:00.0": None}


class NVMLError(Exception):
    pass


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Three GPUs of 80 GiB, two of them on node 0; on the second, process 70 holds 5 GiB."""
    running = {1: [SimpleNamespace(pid=70, usedGpuMemory=5 * 2**30)]}
    library = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=80 * 2**30),
        nvmlDeviceGetName=lambda handle: f"Card {handle}",
        nvmlDeviceGetUUID=lambda handle: UUIDS[handle],
        nvmlDeviceGetPciInfo=lambda handle: SimpleNamespace(busId=BUSES[handle]),
        nvmlDeviceGetComputeRunningProcesses=lambda handle: running.get(handle, []),
        running=running,
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(Path, "exists", lambda self: True)
    monkeypatch.setattr(devices, "gpu_node", NODES.__getitem__)
    monkeypatch.setattr(devices, "read_cores", lambda: Cores({0: frozenset({0})}, {0: frozenset({0})}, frozenset({0})))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return library


@pytest.mark.usefixtures("nvml")
def test_gpus_know_their_node_and_their_part_of_it() -> None:
    host = devices.real_host()
    assert host is not None and host.devices is not None and host.cores is not None
    assert [(d.name, d.numa_node, d.node_part) for d in host.devices] == [
        ("Card 0", 0, (0, 2)),
        ("Card 1", 0, (1, 2)),
        ("Card 2", None, None),
    ]
    assert host.memory(2) == 80 * 2**30


@pytest.mark.usefixtures("nvml")
def test_a_gpu_that_is_not_visible_still_has_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bbb,0")
    host = devices.real_host()
    assert host is not None and host.devices is not None
    assert [(d.name, d.node_part) for d in host.devices] == [("Card 1", (1, 2)), ("Card 0", (0, 2))]
    facts = devices.gpu_facts(0)
    assert (facts.uuid, facts.compute_pids, facts.bus_id) == ("GPU-bbb", (70,), "00000000:2B:00.0")
    with pytest.raises(StartupError, match="GPU 2: this process sees 2 GPUs"):
        devices.gpu_facts(2)


def test_memory_of_processes_is_told_or_is_not(nvml: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert [devices.machine_index(i) for i in (0, 1)] == [1, 0]
    assert devices.memory_by_process(0) == {70: 5 * 2**30}
    assert devices.memory_by_process(1) is None, "no process is shown"
    nvml.running[1].append(SimpleNamespace(pid=71, usedGpuMemory=None))
    assert devices.memory_by_process(0) is None, "a container may hide the figures"
