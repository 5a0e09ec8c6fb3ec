"""Segments of a transcript as files of subtitles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Segments = Sequence[Mapping[str, Any]]
"""Each has ``start`` and ``end`` in seconds, and ``text``."""


def srt(segments: Segments) -> str:
    """SubRip: numbered blocks, each ended by an empty line."""
    return "".join(
        f"{i}\n{_clock(each['start'], ',')} --> {_clock(each['end'], ',')}\n{_lines(each['text'])}\n\n"
        for i, each in enumerate(segments, 1)
    )


def vtt(segments: Segments) -> str:
    """WebVTT."""
    cues = (
        f"{_clock(each['start'], '.')} --> {_clock(each['end'], '.')}\n{_escaped(_lines(each['text']))}\n\n"
        for each in segments
    )
    return "WEBVTT\n\n" + "".join(cues)


def _clock(seconds: float, point: str) -> str:
    """``hh:mm:ss,mmm``."""
    milliseconds = round(max(0.0, seconds) * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{point}{rest % 1000:03}"


def _lines(text: str) -> str:
    """An empty line would end the block, and an arrow begin another."""
    return " ".join(text.split()).replace("-->", "->")


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
