"""What `config resolve` and `config explain` say about a configuration."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from sgl_omni.config.keys import WIRING, Key, children, find_key
from sgl_omni.config.resolved import ResolvedConfig, Tree
from sgl_omni.config.schema import PipelineConfig
from sgl_omni.config.violations import KeyPath, PlanError, Violation, dotted, nearest

_PLACEHOLDERS = {"stages": "<stage>", "processes": "<process>"}


def effective_tree(resolved: ResolvedConfig) -> Tree:
    """Everything that is set, as a file that resolves to the same plan: wiring only where no class owns it."""
    dumped: Tree = _plain(resolved.config.model_dump(exclude_unset=True))
    shipped = resolved.class_name is not None
    tree: Tree = {}
    if shipped:
        module = resolved.cls.__module__
        registered = module.startswith("sgl_omni.models.")
        tree["config_cls"] = resolved.class_name if registered else f"{module}.{resolved.class_name}"
    tree.update({key: value for key, value in dumped.items() if key not in ("config_cls", "stages")})
    stages: dict[str, Tree] = copy.deepcopy(dumped.get("stages", {}))
    for name, stage in stages.items():
        _tidy(stage)
        if shipped:
            for key in WIRING:
                stage.pop(key, None)
            cleared = resolved.class_tree["stages"].get(name, {}).keys() - resolved.tree["stages"].get(name, {}).keys()
            stage.update(dict.fromkeys(sorted(cleared)))
    tree["stages"] = stages if shipped else [{"name": name, **stage} for name, stage in stages.items()]
    return tree


def _tidy(stage: Tree) -> None:
    """One GPU as a number, one successor as a word: as people write them."""
    for key in ("gpu", "next"):
        value = stage.get(key)
        if isinstance(value, list) and len(value) == 1:
            stage[key] = value[0]


def _plain(value: Any) -> Any:
    """Tuples as lists, as JSON and YAML have them."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, tuple | list) else value


def provenance(resolved: ResolvedConfig) -> list[dict[str, Any]]:
    """Each value in effect with its place; schema defaults are those that a file could change."""
    dumped = _plain(resolved.config.model_dump())
    return [
        {"path": dotted(path), "value": value, "from": str(resolved.value_origin(*path))}
        for path, value in _leaves((), dumped)
        if value not in (None, [], {}) or path in resolved.origins
    ]


def differences(resolved: ResolvedConfig) -> list[dict[str, Any]]:
    """What the user changed of the pipeline class's own configuration."""
    before = dict(_leaves((), resolved.class_tree))
    after = dict(_leaves((), resolved.tree))
    return [
        {
            "path": dotted(path),
            "default": before.get(path),
            "value": after.get(path),
            "from": str(resolved.origin(*path)),
        }
        for path in dict.fromkeys((*before, *after))
        if before.get(path) != after.get(path)
    ]


def _leaves(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves((*path, key), inner)
    elif path and value != {}:
        yield path, value


def explain(path_text: str, resolved: ResolvedConfig | None) -> dict[str, Any]:
    """What a key means, its default, and with a configuration its value and where that came from.

    Raises:
        PlanError: there is no such key.
    """
    path = _full_path(path_text, resolved)
    key = find_key(path)
    if key is None:
        known = children(path[:-1])
        message = f"there is no key '{'.'.join(path)}'"
        raise PlanError([Violation(code="PLAN-022", message=message, hint=nearest(path[-1], known) if known else None)])
    facts: dict[str, Any] = {"path": ".".join(path), "meaning": key.description, **_shape(key, path)}
    if resolved is not None and key.kind == "leaf":
        facts |= {"value": _value_at(resolved, path), "from": str(resolved.value_origin(*path))}
    return facts


def _shape(key: Key, path: tuple[str, ...]) -> dict[str, Any]:
    if key.kind == "leaf":
        return {"default": key.default}
    if key.kind == "named":
        return {"keys": [_PLACEHOLDERS.get(path[-1], "<name>")]}
    return {"keys": list(children(path))}


def _full_path(text: str, resolved: ResolvedConfig | None) -> tuple[str, ...]:
    """``vocoder.gpu`` and ``--vocoder.gpu`` mean ``stages.vocoder.gpu``."""
    path = tuple(part for part in text.removeprefix("--").split(".") if part) or ("",)
    path = tuple(part if part.startswith("<") else part.replace("-", "_") for part in path)
    if path[0] in PipelineConfig.model_fields:
        return path
    if len(path) == 1 and find_key(("stages", "<stage>", *path)) is not None:
        return ("stages", "<stage>", *path)
    if len(path) == 1 and find_key(("stages", "<stage>", "engine", *path)) is not None:
        return ("stages", "<stage>", "engine", *path)
    if len(path) > 1 and (resolved is None or path[0] in resolved.config.stages):
        return ("stages", *path)
    return path


def _value_at(resolved: ResolvedConfig, path: tuple[str, ...]) -> Any:
    value: Any = _plain(resolved.config.model_dump())
    for part in path:
        value = value.get(part) if isinstance(value, dict) else None
    return value


def json_schema() -> dict[str, Any]:
    """A JSON Schema of the file, for editors."""
    schema = PipelineConfig.model_json_schema(mode="validation")
    mapping = schema["properties"]["stages"]
    stage = {"$ref": "#/$defs/StageConfig"}
    named = copy.deepcopy(schema["$defs"]["StageConfig"])
    named["properties"] = {"name": {"type": "string", "description": "Name of the stage."}, **named["properties"]}
    named["required"] = ["name"]
    named["title"] = "NamedStageConfig"
    schema["$defs"]["NamedStageConfig"] = named
    schema["properties"]["stages"] = {
        "description": mapping.get("description", ""),
        "anyOf": [
            {"type": "object", "additionalProperties": {"anyOf": [stage, {"type": "null"}]}},
            {"type": "array", "items": {"$ref": "#/$defs/NamedStageConfig"}},
        ],
    }
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "sgl-omni pipeline"
    return schema
