"""Server-sent events on their way: passed on by whole events, so that one more can follow at any time."""

from __future__ import annotations

MAX_EVENT = 4 << 20
ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")


class Events:
    """Takes pieces of a stream and gives back what ends with an event's end; the bytes stay as they are.

    A client acts on an event when its blank line has come, so nothing is late by waiting for it. An event longer
    than ``MAX_EVENT`` is passed on in parts, and ``whole`` tells that no other event may follow.
    """

    def __init__(self) -> None:
        self._rest = b""
        self.whole = True

    def take(self, piece: bytes) -> bytes:
        data = self._rest + piece if self._rest else piece
        end = max(found + len(mark) if (found := data.rfind(mark)) >= 0 else 0 for mark in ENDS)
        if end:
            self._rest = data[end:]
            self.whole = True
            return data[:end] if self._rest else data
        if len(data) > MAX_EVENT:
            self._rest = b""
            self.whole = False
            return data
        self._rest = data
        return b""

    def rest(self) -> bytes:
        """What came after the last whole event, for a stream that ended well without a blank line."""
        rest, self._rest = self._rest, b""
        return rest
