"""A configuration that is read, laid together and validated: what planning starts from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sgl_omni.config.schema import PipelineConfig
from sgl_omni.config.violations import KeyPath, Origin, Violation

Tree = dict[str, Any]
SCHEMA = Origin("default", "schema")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """A configuration ready to plan.

    ``violations`` holds what could not be read; those values are at their defaults, and planning still goes
    on, so that one run reports everything.
    """

    config: PipelineConfig
    cls: type[PipelineConfig]
    class_name: str | None
    model_path: str | None
    tree: Tree
    class_tree: Tree
    origins: dict[KeyPath, Origin]
    groups: dict[KeyPath, Origin]
    violations: tuple[Violation, ...] = ()
    unread: tuple[KeyPath, ...] = ()

    def origin(self, *path: str | int) -> Origin:
        """Where to look for ``path`` in a message: the value, the group, or what the user last set inside it."""
        key: KeyPath = path
        while key:
            if key in self.origins:
                return self.origins[key]
            if key in self.groups:
                return self.groups[key]
            inner = [origin for known, origin in self.origins.items() if known[: len(key)] == key]
            if inner:
                return next((o for o in reversed(inner) if o.kind in ("file", "flag")), inner[0])
            key = key[:-1]
        return SCHEMA

    def value_origin(self, *path: str | int) -> Origin:
        """Where the value in effect came from; the schema where nobody set it."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return SCHEMA

    @property
    def engine_stages(self) -> tuple[str, ...]:
        """Declared by the class; without a class, the stages that have an ``engine`` block."""
        if self.class_name is not None:
            return tuple(s for s in self.cls.engine_stages if s in self.config.stages)
        return tuple(name for name, stage in self.config.stages.items() if stage.engine is not None)
