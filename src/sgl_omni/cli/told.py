"""Work that may be told to end: by Ctrl-C, and in the same way by SIGTERM, which timers and batch systems send."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
TERMINATED = 128 + signal.SIGTERM


def run_until_told(work: Coroutine[Any, Any, T]) -> T:
    """Like ``asyncio.run``. On SIGTERM the work is cancelled, ends what it has begun, and the exit status is 143."""

    async def watched() -> T:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    try:
        return asyncio.run(watched())
    except asyncio.CancelledError:
        sys.exit(TERMINATED)
