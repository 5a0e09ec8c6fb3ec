"""What is asked for: texts with a real distribution of lengths, drawn the same again by a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_omni.errors import InvalidRequest

SHIPPED = Path(__file__).parent / "texts"
LONGEST_SHORT = 35
SHORTEST_LONG = 110
"""Characters. Of the shipped English set about one text in six is short by this, and one in six long."""

CLASSES = ("short", "medium", "long")


def length_class(text: str) -> str:
    """``short``, ``medium`` or ``long``."""
    return "short" if len(text) <= LONGEST_SHORT else "long" if len(text) >= SHORTEST_LONG else "medium"


def load_texts(source: str) -> tuple[str, ...]:
    """A set that ships (``english``), or the lines of a file.

    Raises ``InvalidRequest`` where there is neither.
    """
    shipped = {path.stem: path for path in SHIPPED.glob("*.txt")}
    path = shipped.get(source, Path(source))
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        known = ", ".join(sorted(shipped))
        raise InvalidRequest(
            f"texts {source!r}: {error}; give a file with a text a line, or one of: {known}"
        ) from error
    texts = tuple(line.strip() for line in lines if line.strip())
    if not texts:
        raise InvalidRequest(f"texts {source!r}: no text in it; write one a line")
    return texts


def parse_mix(text: str) -> tuple[float, float, float]:
    """``10/60/30``: weights of short, medium and long. Raises ``InvalidRequest``."""
    try:
        short, medium, long = (float(part) for part in text.split("/"))
    except ValueError as error:
        raise InvalidRequest(f"mix {text!r}: write three weights, as 10/60/30 for short/medium/long") from error
    if min(short, medium, long) < 0 or not 0 < short + medium + long < float("inf"):
        raise InvalidRequest(f"mix {text!r}: weights are not negative and not all zero")
    return short, medium, long


@dataclass(frozen=True, slots=True)
class Workload:
    """Which texts, in which proportions, spoken how. ``mix`` None: each text equally often.

    ``max_new_tokens``: how long each may get, in the model's steps; as long as the model likes if None.
    """

    texts: tuple[str, ...]
    seed: int = 0
    mix: tuple[float, float, float] | None = None
    model: str = "demo-voice"
    voice: str | None = None
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.mix is None:
            return
        found = {length_class(text) for text in self.texts}
        missing = [name for name, weight in zip(CLASSES, self.mix, strict=True) if weight and name not in found]
        if missing:
            raise InvalidRequest(f"the mix asks for {' and '.join(missing)} texts, of which the set has none")

    def draw(self, stream: int) -> Iterator[str]:
        """Texts without end. Each client has a ``stream`` of its own, so that no two ask for the same at once."""
        rng = random.Random(self.seed * 1_000_003 + stream)
        by_class = {name: [t for t in self.texts if length_class(t) == name] for name in CLASSES}
        while True:
            if self.mix is None:
                yield from rng.sample(self.texts, len(self.texts))
            else:
                yield rng.choice(by_class[rng.choices(CLASSES, self.mix)[0]])

    def request(self, text: str) -> dict[str, Any]:
        """The body of a speech request; raw PCM, whose bytes are seconds."""
        body = {"model": self.model, "input": text, "response_format": "pcm"}
        options = {"voice": self.voice, "max_new_tokens": self.max_new_tokens}
        return body | {key: value for key, value in options.items() if value is not None}


def arrivals(rate: float, seconds: float, seed: int, burst: int = 1) -> list[float]:
    """Times of a Poisson process of ``rate`` per second, from 0 on; with ``burst``, so many come at once each time."""
    rng = random.Random(seed)
    times: list[float] = []
    now = rng.expovariate(rate / burst)
    while now < seconds:
        times += [now] * burst
        now += rng.expovariate(rate / burst)
    return times
