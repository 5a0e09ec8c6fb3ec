"""Processes that a measurement starts: on cores of their own, and gone with it, also when it is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence

from sgl_omni.parent import die_with_parent


def before_exec(cores: Sequence[int] | None, at_parents_end: signal.Signals) -> Callable[[], None]:
    """For ``preexec_fn``: the kernel sends the signal when this process ends."""
    parent = os.getpid()

    def prepare() -> None:
        die_with_parent(parent, at_parents_end)
        if cores:
            os.sched_setaffinity(0, cores)

    return prepare
