"""The schema as a tree of keys: which paths exist, which are groups, and what each means."""

from __future__ import annotations

import types
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from sgl_omni.config.schema import EngineConfig, PipelineConfig

KeyKind = Literal["leaf", "group", "named", "open"]


@dataclass(frozen=True, slots=True)
class Key:
    """One key. ``group`` holds known keys, ``named`` holds groups by a name of the user's choice (stages,
    processes), ``open`` holds free values by any name (factory arguments, environment)."""

    kind: KeyKind
    description: str = ""
    default: Any = None
    model: type[BaseModel] | None = None
    options: tuple[str, ...] = ()


def find_key(path: tuple[str, ...]) -> Key | None:
    """The key at a path such as ``("stages", "vocoder", "gpu")``; None where the schema has none."""
    key = Key("group", (PipelineConfig.__doc__ or "").strip(), model=PipelineConfig)
    for depth, part in enumerate(path, start=1):
        if key.kind == "open":
            return Key("leaf", key.description) if depth == len(path) else None
        if key.kind == "named":
            key = Key("group", key.description, model=key.model)
            continue
        known = _keys_of(key.model).get(part) if key.model is not None else None
        if known is None:
            return None
        key = known
    return key


def children(path: tuple[str, ...]) -> tuple[str, ...]:
    """The known keys of a group."""
    key = find_key(path)
    return tuple(key.model.model_fields) if key and key.kind == "group" and key.model else ()


WIRING = ("next", "stream_to", "wait_for", "terminal", "route_fn", "merge_fn", "local_output", "device_input")
"""Keys of a stage that belong to the pipeline class where there is one."""
ENGINE_KEYS: tuple[str, ...] = tuple(EngineConfig.model_fields)
TOP_KEYS: tuple[str, ...] = tuple(PipelineConfig.model_fields)


def same_name(written: str, names: Iterable[str]) -> str | None:
    """The name meant on the command line, where dashes and underscores are the same."""
    candidates = list(names)
    if written in candidates:
        return written
    plain = written.replace("-", "_")
    return next((name for name in candidates if name.replace("-", "_") == plain), None)


@cache
def _keys_of(model: type[BaseModel]) -> dict[str, Key]:
    return {name: _key_of(info) for name, info in model.model_fields.items()}


def _key_of(info: FieldInfo) -> Key:
    description = info.description or ""
    annotation = info.annotation
    if get_origin(annotation) in (types.UnionType, Union):
        inner = [a for a in get_args(annotation) if a is not type(None)]
        annotation = inner[0] if inner else annotation
    if get_origin(annotation) is dict:
        value = get_args(annotation)[1]
        if isinstance(value, type) and issubclass(value, BaseModel):
            return Key("named", description, model=value)
        return Key("open", description)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return Key("group", description, model=annotation)
    options = get_args(annotation) if get_origin(annotation) is Literal else ()
    return Key("leaf", description, info.get_default(call_default_factory=True), options=options)
