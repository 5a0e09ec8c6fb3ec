"""Text without the white space at its ends, as it comes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TrimmedText:
    """All that ``take`` returned so far is ``text``: what it was given, less the white space at both ends."""

    text: str = ""
    _held: str = ""
    """White space that is text only if something follows it."""

    def take(self, piece: str) -> str:
        """What can be handed on now."""
        piece = self._held + piece
        if not self.text:
            piece = piece.lstrip()
        shown = piece.rstrip()
        self._held = piece[len(shown) :]
        self.text += shown
        return shown
