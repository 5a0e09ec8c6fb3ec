"""What the rules find: violations, warnings, and where in the configuration they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sgl_omni.config.resolved import ResolvedConfig
from sgl_omni.config.schema import StageConfig
from sgl_omni.config.violations import KeyPath, Violation
from sgl_omni.topology.host import Host


@dataclass(slots=True)
class Findings:
    """Collects what the rules say. Stages are read from here, since `fused_stages` changes their Process."""

    resolved: ResolvedConfig
    host: Host
    stages: dict[str, StageConfig]
    environ: Mapping[str, str]
    violations: list[Violation] = field(default_factory=list[Violation])
    warnings: list[str] = field(default_factory=list[str])

    def refuse(
        self, code: str, message: str, at: KeyPath = (), *, hint: str | None = None, about: Iterable[str] = ()
    ) -> None:
        names = frozenset((*about, *(str(p) for p in at[1:2] if at[0] in ("stages", "processes"))))
        place = self.resolved.origin(*at) if at else None
        if place is not None and place.kind == "default":
            place = None
        self.violations.append(Violation(code=code, message=message, place=place, hint=hint, about=names))

    def warn(self, message: str) -> None:
        if message not in self.warnings:
            self.warnings.append(message)


def listed(names: Iterable[object], word: str = "and") -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    texts = [str(name) for name in names]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} {word} {texts[-1]}" if texts else "none"


def quoted(names: Iterable[str]) -> str:
    """``'a' and 'b'``."""
    return listed(f"'{name}'" for name in names)


def gpus(devices: Iterable[int]) -> str:
    return listed(f"GPU {d}" for d in devices)
