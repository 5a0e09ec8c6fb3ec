"""Where the audio of a request is cut into chunks. Imports no torch."""

from __future__ import annotations

FIRST_CUTS = (4, 12, 36)
CHUNK_FRAMES = 60
"""Frames of a chunk after the first three, which are shorter so that sound comes soon. Each is decoded with the frames
around it that its samples depend on, so longer ones cost less."""


def cut_after(start: int) -> int:
    """The frame that the chunk which begins at ``start`` ends before. It depends on nothing else, so a request's audio
    does not depend on how its codes were grouped on arrival."""
    return next((cut for cut in FIRST_CUTS if start < cut), start + CHUNK_FRAMES)


def frames_wanted(known: int, ahead: int) -> int:
    """How many frames let another chunk be decoded, where ``known`` are known and a chunk needs ``ahead`` after it."""
    end = cut_after(0)
    while end + ahead <= known:
        end = cut_after(end)
    return end + ahead
