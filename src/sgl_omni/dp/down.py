"""Ends a run: its recorded processes and no others, then its MPS daemon, once nobody is attached to it."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path

from sgl_omni.dp.marks import Mark, boot_id, wait_gone
from sgl_omni.dp.state import Run
from sgl_omni.gpu.mps import DETACH_SECONDS, MpsControl, MpsError, clean
from sgl_omni.runtime.rundir import clean_stale

STOP_SECONDS = 45.0
"""Longer than a server lets its requests end, which is 30 s."""
KILL_SECONDS = 10.0


def tear_down(run: Run, seconds: float = STOP_SECONDS) -> list[str]:
    """What could not be ended or confirmed, and the commands that would; empty when nothing is left of the run.

    Args:
        seconds: how long servers get between a SIGTERM and a SIGKILL.
    """
    servers = [r.server for r in run.replicas if r.server is not None] if run.boot == boot_id() else []
    problems = _end(servers, signal.SIGTERM, seconds)
    workers = [mark for mark in run.marks() if mark not in servers]
    left = wait_gone(workers, KILL_SECONDS)
    problems += _end(left, signal.SIGKILL, KILL_SECONDS)
    if problems:
        return problems
    clean_stale(Path(run.runtime) / "sgl-omni")
    return _end_mps(run)


def _end(marks: Sequence[Mark], number: int, seconds: float) -> list[str]:
    """Signals, waits, kills what is left."""
    problems = [problem for mark in marks if (problem := _send(mark, number))]
    left = wait_gone(marks, seconds)
    problems += [problem for mark in left if (problem := _send(mark, signal.SIGKILL))]
    for mark in wait_gone(left, KILL_SECONDS):
        problems.append(f"process {mark.pid} does not end: kill -9 {mark.pid}")
    return list(dict.fromkeys(problems))


def _send(mark: Mark, number: int) -> str | None:
    try:
        mark.send(number)
    except PermissionError:
        return f"process {mark.pid} may not be signalled by this user: kill -9 {mark.pid}"
    return None


def _end_mps(run: Run) -> list[str]:
    """Waits for the clients to leave, then ends the daemon, where its owners have not done so."""
    if not run.mps or not run.mps_root.is_dir():
        return []
    end = time.monotonic() + DETACH_SECONDS
    control = MpsControl(run.mps_root / run.gpu_key)
    try:
        while control.answers() and control.clients() and time.monotonic() < end:
            time.sleep(0.1)
        return [
            f"MPS daemon of GPU {uuid}: {outcome}; {MpsControl(run.mps_root / uuid).by_hand()}"
            for uuid, outcome in clean(run.mps_root)
            if outcome != "removed"
        ]
    except MpsError as error:
        return [f"MPS: {error}"]
