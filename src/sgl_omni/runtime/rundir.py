"""The folder of one running server: its sockets and the record by which its remains are recognised.

The folder itself is locked for as long as the server lives, so one whose lock is free belongs to a dead server. Only
processes whose pid AND start time match that record are ever signalled.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
from pathlib import Path

import psutil

from sgl_omni.run_folder import LockedFolder, base_folder, dead_folders, locked, private_folder

log = logging.getLogger("sgl_omni.rundir")

PREFIX = "run-"
RECORD = "processes.json"


class RunDir:
    """Creates the folder, after clearing what dead servers of this user have left.

    Raises:
        StartupError: the base folder belongs to someone else or cannot be made.
    """

    def __init__(self, base: Path | None = None) -> None:
        base = base or base_folder()
        private_folder(base)
        with locked(base):
            clean_stale(base)
            self._folder = LockedFolder(base, PREFIX)
        self.path = self._folder.path
        self._processes: dict[int, float] = {}

    def record(self, pid: int) -> None:
        """Notes a child, so that a later server can end it should this one be killed."""
        self._processes[pid] = psutil.Process(pid).create_time()
        self._write()

    def forget(self, pid: int) -> None:
        if self._processes.pop(pid, None) is not None:
            self._write()

    def _write(self) -> None:
        """The record only matters after a crash, so a full disk or a folder that someone removed stops nothing."""
        partial = self.path / f"{RECORD}.partial"
        try:
            partial.write_text(json.dumps({str(pid): started for pid, started in self._processes.items()}))
            partial.replace(self.path / RECORD)
        except OSError as error:
            log.warning("the record of processes in %s cannot be written: %s", self.path, error)

    def close(self) -> None:
        """Removes the folder; harmless when called again."""
        self._folder.close()


def clean_stale(base: Path) -> list[Path]:
    """Ends the processes and removes the folders of servers that no longer live; returns the folders removed."""
    removed = []
    for folder in dead_folders(base, PREFIX):
        for pid, started in _recorded(folder):
            _kill_group(pid, started)
        shutil.rmtree(folder, ignore_errors=True)
        log.info("removed what a dead server left in %s", folder)
        removed.append(folder)
    return removed


def _recorded(folder: Path) -> list[tuple[int, float]]:
    try:
        record = json.loads((folder / RECORD).read_text())
        return [(int(pid), float(started)) for pid, started in record.items()]
    except FileNotFoundError:
        return []
    except (ValueError, AttributeError, TypeError) as error:
        log.warning("the record in %s cannot be read (%s); no process of it is touched", folder, error)
        return []


def _kill_group(pid: int, started: float) -> None:
    try:
        if psutil.Process(pid).create_time() != started or os.getpgid(pid) != pid:
            return
        os.killpg(pid, signal.SIGKILL)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return
