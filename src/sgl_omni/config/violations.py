"""What is wrong with a configuration: one `Violation` each, collected into one `PlanError`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from sgl_omni.errors import OmniError

KeyPath = tuple[str | int, ...]
OriginKind = Literal["default", "class", "file", "flag"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from: the schema, a pipeline class, ``file:line`` or a command-line flag."""

    kind: OriginKind
    where: str

    def __str__(self) -> str:
        if self.kind == "class":
            return f"default of {self.where}"
        if self.kind == "default":
            return "default"
        return self.where


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One thing wrong.

    ``code`` is stable across releases. ``about`` holds the stages and Processes concerned, so that a value
    that could not be read is not also blamed for what follows from its absence.
    """

    code: str
    message: str
    place: Origin | None = None
    hint: str | None = None
    about: frozenset[str] = frozenset()

    def __str__(self) -> str:
        place = f" {self.place}:" if self.place else ""
        hint = f"\n    write instead: {self.hint}" if self.hint else ""
        return f"{self.code}{place} {self.message}{hint}"

    def as_dict(self) -> dict[str, str | None]:
        place = str(self.place) if self.place else None
        return {"code": self.code, "message": self.message, "place": place, "hint": self.hint}


class PlanError(OmniError):
    """The configuration is refused. ``violations`` holds everything that is wrong with it, not only the first."""

    code = "plan"

    def __init__(self, violations: Sequence[Violation]) -> None:
        self.violations = tuple(dict.fromkeys(violations))
        super().__init__("\n".join(map(str, self.violations)))


def nearest(name: str, valid: Iterable[str]) -> str:
    """What to write instead of an unknown name: the nearest valid one, or the choice."""
    names = list(valid)
    close = get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return close[0]
    return f"one of {', '.join(names)}" if names else "nothing"


def dotted(path: Iterable[str | int]) -> str:
    """``stages.vocoder.gpu`` of ``("stages", "vocoder", "gpu")``; list positions as ``[0]``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".")
