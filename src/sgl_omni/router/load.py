"""What a worker says of itself, and how much work a request looks like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

GAUGES = {
    b"sgl_omni_instance_running": "running",
    b"sgl_omni_instance_queued": "queued",
    b"sgl_omni_instance_kv_capacity_tokens": "capacity",
    b"sgl_omni_instance_kv_used_tokens": "used",
}

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


def parse_load(text: bytes, known: int) -> Load | None:
    """Reads a worker's /metrics; None where it reports no engine."""
    sums = dict.fromkeys(GAUGES.values(), 0.0)
    found = False
    for line in text.splitlines():
        name = GAUGES.get(line.partition(b"{")[0])
        if name is None:
            continue
        try:
            sums[name] += float(line.rpartition(b" ")[2])
        except ValueError:
            continue  # not a sample of ours; a worker may export what it likes
        found = True
    if not found:
        return None
    free = 1.0 - sums["used"] / sums["capacity"] if sums["capacity"] > 0 else None
    return Load(int(sums["running"]), int(sums["queued"]), free, known)


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
