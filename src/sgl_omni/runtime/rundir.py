"""The folder of one running server: its sockets and the record by which its remains are recognised.

The folder itself is locked for as long as the server lives, so one whose lock is free belongs to a dead server. Only
processes whose pid AND start time match that record are ever signalled.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import signal
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from sgl_omni.errors import StartupError

log = logging.getLogger("sgl_omni.rundir")

LOCK = "lock"
LONGEST_BASE = 80
"""Bytes of the base folder's path that leave room for a socket's name within the 107 that an address may have."""
RECORD = "processes.json"


def base_folder() -> Path:
    """Where this user's servers keep their run folders: `$XDG_RUNTIME_DIR/sgl-omni`, else in the temporary folder."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "sgl-omni"
    return Path(tempfile.gettempdir()) / f"sgl-omni-{os.getuid()}"


class RunDir:
    """Creates the folder, after clearing what dead servers of this user have left.

    Raises:
        StartupError: the base folder belongs to someone else or cannot be made.
    """

    def __init__(self, base: Path | None = None) -> None:
        base = base or base_folder()
        private_folder(base)
        with _locked(base):
            clean_stale(base)
            self.path = Path(tempfile.mkdtemp(prefix="run-", dir=base))
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def clean_stale(base: Path) -> list[Path]:
    """Ends the processes and removes the folders of servers that no longer live; returns the folders removed."""
    removed = []
    for folder in sorted(base.glob("run-*")):
        if _is_alive(folder):
            continue
        for pid, started in _recorded(folder):
            _kill_group(pid, started)
        shutil.rmtree(folder, ignore_errors=True)
        log.info("removed what a dead server left in %s", folder)
        removed.append(folder)
    return removed


def private_folder(base: Path) -> None:
    """Makes a folder that only this user enters. Raises ``StartupError`` where it is someone else's or cannot be."""
    if len(os.fsencode(base)) > LONGEST_BASE:
        raise StartupError(f"the run folder {base} is too long a path for sockets in it; set XDG_RUNTIME_DIR")
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(f"cannot make the run folder {base}: {error}") from error
    info = base.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        raise StartupError(f"the run folder {base} is not a folder of this user; remove it or set XDG_RUNTIME_DIR")
    base.chmod(0o700)


@contextmanager
def _locked(base: Path) -> Iterator[None]:
    """One server at a time cleans and creates, so that none sees another's half-made folder."""
    fd = os.open(base / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _is_alive(folder: Path) -> bool:
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


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
