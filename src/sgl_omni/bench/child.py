"""Processes that a measurement starts: on cores of their own, and gone with it, also when it is killed."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Sequence

PR_SET_PDEATHSIG = 1


def before_exec(cores: Sequence[int] | None, at_parents_end: signal.Signals) -> Callable[[], None]:
    """For ``preexec_fn``: the kernel sends the signal when this process ends."""
    libc, parent = ctypes.CDLL(None, use_errno=True), os.getpid()

    def prepare() -> None:
        libc.prctl(PR_SET_PDEATHSIG, int(at_parents_end), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        if cores:
            os.sched_setaffinity(0, cores)

    return prepare
