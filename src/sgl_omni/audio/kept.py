"""What was made of recordings, kept for the next request with the same one."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any, Generic, TypeVar

Made = TypeVar("Made")


class LastMade(Generic[Made]):
    """The last results, found again by the content of their recording.

    One is made at a time: two encoders at once would only share the same cores.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[Hashable, Made] = OrderedDict()
        self._lock = Lock()

    def get(self, recording: Any, make: Callable[[], Made], *, kind: Hashable = None) -> Made:
        """``recording``: a buffer of bytes or samples. ``kind`` tells apart different results of the same one. What
        ``make`` raises is raised here, and nothing is kept."""
        key = hashlib.blake2b(recording).digest(), kind
        with self._lock:
            if key not in self._kept:
                self._kept[key] = make()
                if len(self._kept) > self._most:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
            return self._kept[key]
