"""A streamed answer, read event by event as it comes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import pairwise


class EventStream(ABC):
    """The server-sent events of one answer."""

    def __init__(self) -> None:
        self.times: list[float] = []
        """When each piece of text came; pieces that came in one read have the same time."""
        self.tokens = 0
        self._rest = b""
        self._failure: str | None = None
        self._done = False

    def feed(self, data: bytes, now: float) -> None:
        """``now`` is when it came, in seconds of any clock."""
        *whole, self._rest = (self._rest + data).split(b"\n\n")
        for event in whole:
            self._take(event.removeprefix(b"data: "), now)

    @abstractmethod
    def _take(self, event: bytes, now: float) -> None:
        """Notes what one event says."""

    @property
    def error(self) -> str | None:
        """Why the answer does not count."""
        if self._failure is not None:
            return self._failure
        return None if self._done else "the stream broke off"

    @property
    def gaps(self) -> tuple[float, ...]:
        """Times between pieces of text."""
        return tuple(later - earlier for earlier, later in pairwise(self.times))
