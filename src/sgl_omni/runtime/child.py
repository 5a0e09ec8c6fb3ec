"""The OS process of an instance: how it is started, how it is killed, and how it ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import NamedTuple

from sgl_omni.errors import StartupError
from sgl_omni.runtime.messages import GroupLink


class Child(NamedTuple):
    """A process that has just been started. ``channel`` and the descriptor ``output``, of what it prints, are the
    caller's to close."""

    process: subprocess.Popen[bytes]
    channel: socket.socket
    output: int


def start_child(name: str, environment: Mapping[str, str], link: GroupLink | None) -> Child:
    """A fresh Python process, in a session and process group of its own, that waits for its spawn record.

    ``link``: what it inherits to reach the other ranks of its group. Raises ``StartupError`` where there is no process.
    """
    ours, theirs = socket.socketpair()
    read_fd, write_fd = os.pipe()
    command = [sys.executable, "-m", "sgl_omni.runtime.worker"]
    command += ["--fd", str(theirs.fileno()), "--parent", str(os.getpid()), "--name", name]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=write_fd,
            stderr=write_fd,
            env=environment,
            pass_fds=(theirs.fileno(), *(link.descriptors if link is not None else ())),
            start_new_session=True,
        )
    except OSError as error:
        ours.close()
        os.close(read_fd)
        raise StartupError(f"cannot start a process for '{name}': {error}") from error
    finally:
        theirs.close()
        os.close(write_fd)
    return Child(process, ours, read_fd)


def kill_group(pid: int) -> None:
    """Kills a child with all that it has started; harmless where nothing of it is left."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def describe_exit(status: int) -> str:
    """`status` as subprocess gives it: negative for a signal."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was killed by {name} (exit status {status})"
