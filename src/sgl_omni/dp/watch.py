"""One server of this machine seen from outside: CPU time and memory of its processes, and what its engine says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import psutil

from sgl_omni.errors import LaunchFailed
from sgl_omni.gauges import PREFIX
from sgl_omni.gpu.devices import memory_by_process

TIMEOUT = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The engine's gauges at one moment. 0 where the engine does not tell; ``steps`` and ``launch_seconds`` are those
    of engines that run on a GPU's rows. ``kv_peak``: most KV tokens in use at once since the server's start, as a look
    now and then would miss short requests."""

    kv_peak: int
    kv_capacity: int
    page_tokens: int
    bytes_per_token: int
    generated_rows: float
    steps: float
    launch_seconds: float


class Watch:
    """A running server by its address.

    Raises:
        LaunchFailed: it does not answer, or its processes are not on this machine.
    """

    def __init__(self, url: str, stage: str, process: str) -> None:
        """``stage``: the engine stage whose gauges are read; ``process``: its Process, whose memory is."""
        self._url = url
        self._stage = stage
        self._own = process
        health = self._health()
        self._workers = [self._process(i) for i in health["instances"]]
        parents = {worker.ppid() for worker, _ in self._workers}
        self._all = [worker for worker, _ in self._workers] + [psutil.Process(pid) for pid in sorted(parents) if pid]

    def _health(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._get("/health"))
        return found

    def _get(self, path: str) -> bytes:
        try:
            with urlopen(f"{self._url}{path}", timeout=TIMEOUT) as answer:
                body: bytes = answer.read()
                return body
        except (URLError, OSError) as error:
            raise LaunchFailed(f"{self._url}{path} does not answer: {error}") from error

    def _process(self, instance: dict[str, Any]) -> tuple[psutil.Process, bool]:
        """The process and whether it is the engine's."""
        try:
            return psutil.Process(instance["pid"]), instance["process"] == self._own
        except (psutil.NoSuchProcess, TypeError) as error:
            raise LaunchFailed(f"instance '{instance['name']}' of {self._url} is no process of this machine") from error

    def cpu_seconds(self) -> float:
        """CPU time of the server and all its processes so far."""
        times = [process.cpu_times() for process in self._all]
        return sum(t.user + t.system for t in times)

    def reading(self) -> Reading:
        values: dict[str, float] = {}
        for line in self._get("/metrics").decode().splitlines():
            if line.startswith(f"{PREFIX}{self._stage}_"):
                name = line.partition("{")[0].removeprefix(f"{PREFIX}{self._stage}_")
                values[name] = values.get(name, 0.0) + float(line.rpartition(" ")[2])
        if "kv_capacity_tokens" not in values:
            raise LaunchFailed(f"{self._url} says nothing of an engine stage '{self._stage}'")
        return Reading(
            kv_peak=int(values.get("kv_peak_tokens", 0)),
            kv_capacity=int(values["kv_capacity_tokens"]),
            page_tokens=int(values.get("kv_page_tokens", 0)),
            bytes_per_token=int(values.get("kv_bytes_per_token", 0)),
            generated_rows=values.get("generated_rows", 0.0),
            steps=values.get("steps", 0.0),
            launch_seconds=values.get("launch_seconds", 0.0),
        )

    def device_bytes(self, gpu: int | None) -> int | None:
        """What the engine's process holds of the device; on the CPU platform (None) of memory, without shared pages.

        None where the driver does not tell.
        """
        workers = [worker for worker, own in self._workers if own]
        if gpu is None:
            return sum(int(worker.memory_full_info().uss) for worker in workers)
        held = memory_by_process(gpu)
        if held is None or not all(worker.pid in held for worker in workers):
            return None
        return sum(held[worker.pid] for worker in workers)


def busy_seconds(cores: Sequence[int]) -> float:
    """Time that these cores have spent on anything since the machine was started: as with a GPU, others count."""
    times = psutil.cpu_times(percpu=True)
    return sum(sum(times[core]) - times[core].idle - times[core].iowait for core in cores if core < len(times))
