"""How a benchmark that is told to end (SIGTERM, as `timeout` sends it, or Ctrl-C) ends what it has started."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Coroutine
from types import FrameType
from typing import Any, NoReturn, TypeVar

import psutil
import uvloop

from sgl_omni.cli.told import run_until_told

T = TypeVar("T")
STATUS = 128 + signal.SIGTERM


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs it. SIGTERM or SIGINT cancels it, so that what it has open ends as it always does; the status is 143
    or 130."""
    return run_until_told(main, signals=(signal.SIGTERM, signal.SIGINT), on_told=_tell_children, runner=uvloop.run)


def exit_when_told() -> None:
    """For a program that does one thing after another: SIGTERM raises ``SystemExit`` in it, once."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _tell_children()
        sys.exit(STATUS)

    signal.signal(signal.SIGTERM, end)


def _tell_children() -> None:
    """Servers and other benchmarks that this one runs and waits for. The processes of a pipeline have groups of their
    own, and end with it."""
    for child in psutil.Process().children():
        try:
            if os.getpgid(child.pid) == os.getpgid(0):
                child.terminate()
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
