"""What a child process prints: passed on with its name in front, and its last lines kept for error messages."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque

KEPT_LINES = 40
MAX_LINE = 8192
LAST_READS = 16


class LogTap:
    """Reads one pipe (stdout and stderr of a child) whenever it has something."""

    def __init__(self, name: str, fd: int) -> None:
        self._name = name
        self._fd = fd
        self._partial = b""
        self._loop = asyncio.get_running_loop()
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._read)

    def _read(self) -> bool:
        """Takes what is there; False when nothing more is to come."""
        try:
            data = os.read(self._fd, 65536)
        except BlockingIOError:
            return False
        if not data:
            self.close()
            return False
        *whole, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > MAX_LINE:
            whole.append(self._partial)
            self._partial = b""
        for line in whole:
            self._take(line)
        return True

    def _take(self, line: bytes) -> None:
        text = line.decode(errors="replace")
        self.lines.append(text)
        print(f"[{self._name}] {text}", file=sys.stderr)

    def finish(self) -> None:
        """Reads what the pipe still holds after the child's end, and closes it; a process that the child has left
        behind may go on writing, and nobody waits for it."""
        for _ in range(LAST_READS):
            if self._fd < 0 or not self._read():
                break
        self.close()

    def close(self) -> None:
        if self._fd < 0:
            return
        if self._partial:
            self._take(self._partial)
            self._partial = b""
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        self._fd = -1
