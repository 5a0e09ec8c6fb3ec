"""Work that may be told to end: by Ctrl-C, and in the same way by SIGTERM, which timers and batch systems send."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def run_until_told(
    work: Coroutine[Any, Any, T],
    *,
    signals: Sequence[signal.Signals] = (signal.SIGTERM,),
    on_told: Callable[[], None] = lambda: None,
    runner: Callable[[Coroutine[Any, Any, T]], T] = asyncio.run,
) -> T:
    """Runs it. One of the signals cancels it, so that it ends what it has begun; the exit status is 128 and its number.

    Only the first one does: `timeout` sends two, to the program and to its process group.
    """
    told = 0

    async def watched() -> T:
        task = asyncio.current_task()
        assert task is not None

        def end(number: int) -> None:
            nonlocal told
            if not told:
                told = number
                on_told()
                task.cancel()

        for number in signals:
            asyncio.get_running_loop().add_signal_handler(number, end, number)
        return await work

    try:
        return runner(watched())
    except asyncio.CancelledError:
        sys.exit(128 + told)
