"""A server that is told to end while it has hardly begun."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import psutil
import pytest

from servers import Server

pytestmark = pytest.mark.alone

ARGUMENTS = ("--platform", "cpu", "--model-path", "demo-voice")


def begin(run_folder: Path) -> Server:
    """A server from the moment at which it looks after its signals; until then Python itself starts."""
    server = Server(*ARGUMENTS, run_folder=run_folder)
    end = time.monotonic() + 60
    while not catches(server.process.pid, signal.SIGTERM):
        assert server.process.poll() is None and time.monotonic() < end, server.log
        time.sleep(0.001)
    return server


def catches(pid: int, number: signal.Signals) -> bool:
    status = dict(line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(status["SigCgt"], 16) >> (number - 1) & 1)


def test_signals_are_looked_after_before_anything_else(own_run_folder: Path) -> None:
    server = begin(own_run_folder)
    loaded = {Path(m.path).name for m in psutil.Process(server.process.pid).memory_maps()}
    server.process.terminate()
    assert server.wait(60) == 0
    assert server.log == ""
    assert not any("torch" in name or "numpy" in name for name in loaded), "this comes before what takes time"


@pytest.mark.parametrize("part", range(10))
def test_a_signal_at_any_moment_of_the_start_ends_it_quietly_and_leaves_nothing(
    own_run_folder: Path, part: int
) -> None:
    moment = 0.2 * (part + random.random())
    first, second = random.choices((signal.SIGTERM, signal.SIGINT), k=2)
    server = begin(own_run_folder)
    time.sleep(moment)
    server.members = psutil.Process(server.process.pid).children(recursive=True)
    server.process.send_signal(first)
    if part % 3 == 0:
        time.sleep(0.1 * random.random())
        server.process.send_signal(second)
    case = f"{first.name} after {moment:.3f} s:\n{server.log}"
    assert server.wait(60) == 0, case
    for noise in ("Traceback", "Aborted", "WARNING", "ERROR", "0 requests"):
        assert noise not in server.log, case
    server.assert_nothing_left()
