"""Starts the real `sgl-omni serve` in a process of its own, as a user would."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

ROOT = Path(__file__).parents[2]
PATIENT = 120.0
"""Seconds for an answer; a machine that does much else is no failure."""

READY = re.compile(r"ready: \S+ on (http://\S+)")


def fetch(url: str) -> httpx.Response:
    return httpx.get(url, timeout=PATIENT)


class Server:
    """A running server: its address, its log, its processes."""

    def __init__(self, *arguments: str, run_folder: Path, cwd: Path = ROOT) -> None:
        self.run_folder = run_folder
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sgl_omni.cli.main", "serve", "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=cwd,
            env=os.environ | {"XDG_RUNTIME_DIR": str(run_folder)},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = ""
        self.members: list[psutil.Process] = []

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    def wait_ready(self, seconds: float = 180.0) -> Server:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found = READY.search(self.log)
            if found:
                self.url = found[1]
                self.members = psutil.Process(self.process.pid).children()
                return self
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        self.process.kill()
        self._reader.join(5)
        raise AssertionError(f"the server did not get ready:\n{self.log}")

    def wait(self, seconds: float) -> int:
        """Its exit status."""
        status = self.process.wait(seconds)
        self._reader.join(5)
        return status

    def instance(self, name: str) -> dict[str, object]:
        health = fetch(f"{self.url}/health").json()
        return next(i for i in health["instances"] if i["name"] == name)

    def pid(self, name: str) -> int:
        pid = self.instance(name)["pid"]
        assert isinstance(pid, int)
        return pid

    def gauges(self) -> dict[str, float]:
        """The numbers of /metrics by name, over all instances."""
        total: dict[str, float] = {}
        for line in fetch(f"{self.url}/metrics").text.splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                total[name] = total.get(name, 0.0) + float(value)
        return total

    def alive(self) -> list[psutil.Process]:
        return [p for p in self.members if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def assert_nothing_left(self) -> None:
        assert not self.alive()
        assert not list(self.run_folder.glob("sgl-omni/run-*"))


@contextmanager
def serving(*arguments: str, run_folder: Path, cwd: Path = ROOT) -> Iterator[Server]:
    """A ready server that has to end well, unless the test ended it itself."""
    server = Server(*arguments, run_folder=run_folder, cwd=cwd)
    try:
        yield server.wait_ready()
        if server.process.poll() is None:
            server.process.send_signal(signal.SIGTERM)
            assert server.wait(40) == 0, server.log
            server.assert_nothing_left()
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()
