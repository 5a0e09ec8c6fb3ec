"""Where a text has to stop: at the first of some texts that come up in it, wherever they lie in its tokens."""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """Takes a text piece by piece and gives out what surely lies before every stop.

    How the text was cut into pieces does not matter: the stop that is complete first counts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """``stops`` are not empty texts; there may be none of them."""
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.found = False
        """Whether a stop has come. All that is fed from then on is dropped."""

    def feed(self, text: str) -> str:
        """The text that is now known to lie before any stop. What may be the beginning of one waits."""
        if self.found:
            return ""
        held = self._held + text
        ends = [(at + len(stop), at) for stop in self._stops if (at := held.find(stop)) >= 0]
        if ends:
            self.found = True
            self._held = ""
            return held[: min(ends)[1]]
        keep = self._begun(held)
        self._held = held[keep:]
        return held[:keep]

    def end(self) -> str:
        """What waited; no more comes, so it was no stop."""
        held, self._held = self._held, ""
        return held

    def _begun(self, text: str) -> int:
        """Where the earliest stop that may have begun in ``text`` begins."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(stop.startswith(text[at:]) for stop in self._stops):
                return at
        return len(text)
