"""What SIGTERM and Ctrl-C do to a server, from its first moment to its last.

Python's own handlers are replaced as a whole, never removed, so that there is no moment between two of them at which
a signal kills. An event loop's `add_signal_handler` is no use for that: its loop takes the handlers away as it closes.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # this is imported before everything else, and asyncio takes longer than Python's own start
    import asyncio
    from collections.abc import Callable

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def leave_at_once() -> None:
    """Until `tell`, a signal ends the process with status 0: nothing that would outlive it exists yet."""
    for number in SIGNALS:
        signal.signal(number, lambda *_: os._exit(0))


def tell(loop: asyncio.AbstractEventLoop, on_signal: Callable[[], None]) -> None:
    """From now on a signal calls ``on_signal`` in the loop; once that is closed, nothing."""

    def handle(*_: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(on_signal)

    for number in SIGNALS:
        signal.signal(number, handle)


def leave_alone() -> None:
    """For the interpreter's own end, which puts the system's handlers back and may take a while."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
