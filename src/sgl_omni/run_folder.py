"""Private folders that belong to a running process, and are recognised once it has died.

Each lies in the user's base folder and is locked for as long as its process lives, so one whose lock is free belongs to
a process that is gone. A lock outlives a fork: the folder is in use while the process or any child of it is there.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sgl_omni.errors import StartupError

LOCK = "lock"
LONGEST_BASE = 80
"""Bytes of the base folder's path that leave room for a socket's name within the 107 that an address may have."""


class LockedFolder:
    """A new folder in the base, whose lock is held. Made under `locked`, so that nobody takes it for a dead one."""

    def __init__(self, base: Path, prefix: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        """Removes the folder; harmless when called again."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def base_folder() -> Path:
    """Where this user's servers keep such folders: `$XDG_RUNTIME_DIR/sgl-omni`, else in the temporary folder."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "sgl-omni"
    return Path(tempfile.gettempdir()) / f"sgl-omni-{os.getuid()}"


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
def locked(base: Path) -> Iterator[None]:
    """One process at a time cleans and creates, so that none sees another's half-made folder."""
    fd = os.open(base / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def dead_folders(base: Path, prefix: str) -> list[Path]:
    """The folders whose processes are gone."""
    return [folder for folder in sorted(base.glob(f"{prefix}*")) if not _is_held(folder)]


def _is_held(folder: Path) -> bool:
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
