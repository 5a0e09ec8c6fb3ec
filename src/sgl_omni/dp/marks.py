"""Processes that are recognised: a pid alone may have been given to another process meanwhile."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_START = 19
"""Place of the start time in /proc/<pid>/stat, counted from the process's state."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A process by pid and start time, in the kernel's ticks since boot."""

    pid: int
    started: int

    @staticmethod
    def of(pid: int) -> Mark | None:
        """None where there is no such process, or nothing but its exit status is left of it."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return None
        fields = stat.rpartition(")")[2].split()
        return None if fields[0] in "ZX" else Mark(pid, int(fields[_START]))

    @property
    def alive(self) -> bool:
        return Mark.of(self.pid) == self

    def send(self, number: int) -> None:
        """Signals this very process; one that is gone, and one that has its pid now, is left alone.

        Raises:
            PermissionError: the process changed its user.
        """
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            if self.alive:
                signal.pidfd_send_signal(fd, number)
        except ProcessLookupError:
            return
        finally:
            os.close(fd)


def wait_gone(marks: Iterable[Mark], seconds: float) -> list[Mark]:
    """Those that are still there when the time is up."""
    end = time.monotonic() + seconds
    while (left := [mark for mark in marks if mark.alive]) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def boot_id() -> str:
    """Names the time since the machine was started: marks of an earlier one mean nothing."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
