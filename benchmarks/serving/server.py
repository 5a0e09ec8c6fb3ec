"""A real `sgl-omni serve` of its own: started, watched from outside, ended, and what it left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Self, TextIO

import httpx
import psutil

ROOT = Path(__file__).parents[2]
READY = re.compile(r"ready: \S+ on (http://\S+)")
END_SECONDS = 45.0
"""More than requests in flight are given."""

INSTANCE = re.compile(r'instance="([^"]+)"')


class ServerFailed(Exception):
    """The server did not get ready, or did not end by itself."""


class Server:
    """Started by ``with``, ended with it if it is still there; ``stop`` ends it as an operator would."""

    def __init__(self, *arguments: str, log: Path | None = None) -> None:
        """``log``: a file, written anew, for what the server says, with the seconds since its start."""
        self._arguments = arguments
        self._log = log
        self.lines: list[str] = []
        self.url = ""
        self._members: dict[int, psutil.Process] = {}

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="omni-")  # short, as paths of sockets must be
        log = None if self._log is None else self._log.open("w", buffering=1)
        self.begun = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sgl_omni.cli.main", "serve", "--port", "0", *self._arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=ROOT,
            env=os.environ | {"XDG_RUNTIME_DIR": self._folder.name},
        )
        self._reader = threading.Thread(target=self._read, args=(log,), daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._note_members()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()  # the children die with it
                self.process.wait()
        psutil.wait_procs(self.alive(), timeout=10)
        for member in self.alive():
            member.kill()
        self._reader.join(5)
        self._folder.cleanup()

    def wait_ready(self, seconds: float) -> float:
        """Seconds from the start until requests are taken. Raises ``ServerFailed``."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            if found := next((match for line in [*self.lines] if (match := READY.search(line))), None):
                self.url = found[1]
                self._note_members()
                return time.perf_counter() - self.begun
            if self.process.poll() is not None:
                self._reader.join(5)
                raise ServerFailed(f"the server ended with status {self.process.returncode} before it was ready")
            time.sleep(0.05)
        raise ServerFailed(f"the server was not ready after {seconds:g} s")

    def health(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.url}/health", timeout=30).json()
        return found

    def gauges(self) -> dict[str, dict[str, float]]:
        """The numbers of /metrics that are not 0, by instance; those of the server itself below ``server``."""
        found: dict[str, dict[str, float]] = {}
        for line in httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines():
            name, _, value = line.rpartition(" ")
            name, _, labels = name.partition("{")
            if not name or line.startswith("#") or name.endswith(("_bucket", "_created")) or not float(value):
                continue
            instance = INSTANCE.search(labels)
            key = name.removeprefix("sgl_omni_").removeprefix("instance_")
            if instance is None and labels:
                key += "{" + labels
            found.setdefault(instance[1] if instance else "server", {})[key] = float(value)
        return found

    def memory(self) -> dict[str, Any]:
        """What the GPU has in use, and each instance of GPU (where the driver knows its processes) and host memory."""
        gpu, names = gpu_memory(), {i["pid"]: i["name"] for i in self.health()["instances"]}
        resident = {name: psutil.Process(pid).memory_info().rss for pid, name in names.items()}
        by_pid = gpu.pop("by_pid", {})
        return {
            **gpu,
            "gpu_bytes": {names.get(pid, f"pid {pid}"): used for pid, used in by_pid.items()},
            "host_bytes": resident,
        }

    def stop(self, seconds: float = 60.0) -> dict[str, Any]:
        """Ends it by SIGTERM and tells its status, how long it took and what is left of it."""
        self._note_members()
        begun = time.perf_counter()
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise ServerFailed(f"the server did not end within {seconds:g} s of SIGTERM") from error
        took = time.perf_counter() - begun
        psutil.wait_procs(self.alive(), timeout=2)
        left = [path.name for path in Path(self._folder.name).glob("sgl-omni/run-*")]
        return {"status": status, "seconds": took, "processes_left": len(self.alive()), "run_folders_left": len(left)}

    def alive(self) -> list[psutil.Process]:
        return [p for p in self._members.values() if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def _note_members(self) -> None:
        if self.process.poll() is None:
            self._members |= {p.pid: p for p in psutil.Process(self.process.pid).children(recursive=True)}

    def _read(self, log: TextIO | None) -> None:
        assert self.process.stdout is not None
        with log or nullcontext():
            for line in self.process.stdout:
                self.lines.append(line.rstrip())
                if log is not None:
                    log.write(f"{time.perf_counter() - self.begun:8.3f} {self.lines[-1]}\n")


def gpu_memory() -> dict[str, Any]:
    """Bytes in use on the first GPU in all and by process, as the driver tells; empty where there is none."""
    try:
        import pynvml
    except ImportError:
        return {}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    try:
        device = pynvml.nvmlDeviceGetHandleByIndex(0)
        memory = pynvml.nvmlDeviceGetMemoryInfo(device)
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(device)
        by_pid = {p.pid: p.usedGpuMemory for p in processes}
        return {"used_bytes": int(memory.used), "total_bytes": int(memory.total), "by_pid": by_pid}
    finally:
        pynvml.nvmlShutdown()
