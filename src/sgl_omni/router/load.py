"""What a worker says of itself, and how much work a request looks like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from sgl_omni.gauges import read_engine_gauges

BARE_BODY = 120
"""Bytes of a speech request around its text, about; what is longer is taken for text where the body is not read."""


@dataclass(frozen=True, slots=True)
class Load:
    """Of one worker, over all its engines. ``known`` is how many requests this router had there at that time."""

    running: int
    queued: int
    kv_free: float | None
    known: int

    @property
    def others(self) -> int:
        """Requests in the engines that did not come from here."""
        return max(0, self.running + self.queued - self.known)


def parse_load(metrics: bytes, known: int) -> Load | None:
    """Reads a worker's /metrics; None where it reports no engine."""
    found = read_engine_gauges(metrics)
    if found is None:
        return None
    free = 1.0 - found.kv_used / found.kv_capacity if found.kv_capacity > 0 else None
    return Load(found.running, found.queued, free, known)


class _Text(msgspec.Struct):
    input: Any = ""
    messages: Any = ()


_decoder = msgspec.json.Decoder(_Text)


def estimate(body: bytes | None, length: int) -> float:
    """How much there is to do, in characters of text: of ``input`` or of all ``messages``.

    ``body`` is None where it is not at hand as a whole; then its ``length`` in bytes stands for it.
    """
    if body is not None:
        try:
            fields = _decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            fields = None
        if fields is not None and (characters := _characters(fields.input) + _characters(fields.messages)):
            return float(characters)
    return float(max(1, length - BARE_BODY))


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list):
        return sum(map(_characters, value))
    if isinstance(value, dict):
        return _characters(value.get("content")) + _characters(value.get("text"))
    return 0
