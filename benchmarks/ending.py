"""How a benchmark that is told to end (SIGTERM, as `timeout` sends it, or Ctrl-C) ends what it has started."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine
from types import FrameType
from typing import Any, NoReturn, TypeVar

import psutil
import uvloop

T = TypeVar("T")
STATUS = 128 + signal.SIGTERM


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs it. SIGTERM or SIGINT cancels it, so that what it has open ends as it always does; the status is 143 or 130.

    Only the first one does: `timeout` sends two, to the program and to its process group.
    """
    told = 0

    async def guarded() -> T:
        task = asyncio.current_task()
        assert task is not None

        def end(number: int) -> None:
            nonlocal told
            if not told:
                told = number
                _tell_children()
                task.cancel()

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, end, number)
        return await main

    try:
        return uvloop.run(guarded())
    except asyncio.CancelledError:
        sys.exit(128 + told)


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
