"""Command-line overrides: ``--stage.key value``, ``--processes.p.num_replicas 2``, ``--mps on``, engine flags."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sgl_omni.config.keys import ENGINE_KEYS, TOP_KEYS, children, find_key, same_name
from sgl_omni.config.scalars import shown
from sgl_omni.config.violations import Origin, Violation, nearest
from sgl_omni.config.yaml_source import read_yaml

_NEGATIVE = re.compile(r"-[0-9.]")


@dataclass(frozen=True, slots=True)
class Override:
    """One leaf set on the command line."""

    path: tuple[str, ...]
    value: Any
    flag: str
    broadcast: bool = False

    @property
    def origin(self) -> Origin:
        return Origin("flag", self.flag)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagScope:
    """The names that flags may speak of."""

    stages: tuple[str, ...]
    processes: tuple[str, ...]
    engine_stages: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Flag:
    """One ``--name value`` as written; ``value`` is None where it is missing."""

    name: str
    value: str | None

    @property
    def text(self) -> str:
        return f"--{self.name}"


def split_flags(arguments: Sequence[str]) -> tuple[list[Flag], list[Violation]]:
    """Pairs names with values. Takes ``--a.b value`` and ``--a.b=value``."""
    flags: list[Flag] = []
    violations: list[Violation] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--") or len(argument) == 2:
            message = f"unexpected argument {shown(argument)}"
            violations.append(Violation(code="PLAN-025", message=message, hint="--<stage>.<key> VALUE"))
            continue
        name, equals, value = argument[2:].partition("=")
        if equals:
            flags.append(Flag(name, value))
        elif rest and (not rest[0].startswith("-") or _NEGATIVE.match(rest[0])):
            flags.append(Flag(name, rest.pop(0)))
        else:
            flags.append(Flag(name, None))
    return flags, violations


def read_flags(flags: Sequence[Flag], scope: FlagScope) -> tuple[list[Override], list[Violation]]:
    """Overrides in order of precedence: broadcast flags first, explicit paths after them."""
    overrides: dict[tuple[str, ...], Override] = {}
    violations: list[Violation] = []
    for flag in flags:
        override = _read_flag(flag, scope)
        if isinstance(override, Violation):
            violations.append(override)
            continue
        earlier = overrides.get(override.path)
        if earlier is None or (earlier.broadcast and not override.broadcast):
            overrides[override.path] = override
        elif earlier.broadcast == override.broadcast and not _same_value(earlier.value, override.value):
            message = f"'{'.'.join(override.path)}' is set to {shown(earlier.value)} and to {shown(override.value)}"
            about = frozenset(override.path[1:2])
            violations.append(
                Violation(code="PLAN-026", message=message, place=override.origin, hint="one of the two", about=about)
            )
    return list(overrides.values()), violations


def _same_value(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


def _read_flag(flag: Flag, scope: FlagScope) -> Override | Violation:
    path = _path_of(flag, scope)
    if isinstance(path, Violation):
        return path
    about = frozenset(path[1:2])
    key = find_key(path)
    name = ".".join(path)
    if key is None:
        known = children(path[:-1])
        message = f"flag {flag.text}: there is no key '{name}'"
        hint = nearest(path[-1], known) if known else None
        return Violation(code="PLAN-025", message=message, place=_place(flag), hint=hint, about=about)
    if key.kind != "leaf":
        inner = children(path)
        example = f"{flag.text}.{inner[0] if inner else '<name>'} VALUE"
        message = f"flag {flag.text} names the group '{name}', not one value"
        return Violation(code="PLAN-025", message=message, place=_place(flag), hint=example, about=about)
    if flag.value is None:
        message = f"flag {flag.text} has no value"
        hint = f"{flag.text} {' or '.join(key.options) or 'VALUE'}"
        return Violation(code="PLAN-025", message=message, place=_place(flag), hint=hint, about=about)
    value = _value(flag.value, free="factory" in path[2:3])
    if isinstance(value, Violation):
        return Violation(code="PLAN-025", message=f"flag {flag.text}: {value.message}", place=_place(flag), about=about)
    return Override(path, value, flag.text, broadcast="." not in flag.name and path[0] == "stages")


def _place(flag: Flag) -> Origin:
    return Origin("flag", flag.text)


def _path_of(flag: Flag, scope: FlagScope) -> tuple[str, ...] | Violation:
    parts = flag.name.split(".")
    head = same_name(parts[0], TOP_KEYS)
    if len(parts) == 1:
        return _bare_path(flag, head, scope)
    if head == "stages":
        names = scope.stages
    elif head == "processes":
        names = scope.processes
    elif head is not None:
        return (head, *(_known(part, children((head,))) for part in parts[1:]))
    else:
        head, names, parts = "stages", scope.stages, ["stages", *parts]
    name = same_name(parts[1], names)
    if name is None:
        what = "stage" if head == "stages" else "Process"
        message = f"flag {flag.text}: there is no {what} '{parts[1]}'; the {what} names are {', '.join(names)}"
        about = frozenset({parts[1]})
        hint = nearest(parts[1], names)
        if head == "stages" and same_name(parts[1], scope.processes) is not None and parts[2:]:
            hint = f"--processes.{parts[1]}.{'.'.join(parts[2:])} VALUE"
        return Violation(code="PLAN-025", message=message, place=_place(flag), hint=hint, about=about)
    return (head, name, *_normal((head, name), parts[2:]))


def _normal(base: tuple[str, ...], parts: list[str]) -> list[str]:
    """Known keys in their own spelling; free names (factory arguments) as written."""
    result: list[str] = []
    for part in parts:
        result.append(_known(part, children((*base, *result))))
    return result


def _known(part: str, names: tuple[str, ...]) -> str:
    return same_name(part, names) or part


def _bare_path(flag: Flag, head: str | None, scope: FlagScope) -> tuple[str, ...] | Violation:
    if head is not None:
        return (head,)
    key = same_name(flag.name, ENGINE_KEYS)
    if key is None:
        message = f"unknown flag {flag.text}"
        return Violation(code="PLAN-025", message=message, place=_place(flag), hint=_full_form(flag, scope))
    if len(scope.engine_stages) == 1:
        return ("stages", scope.engine_stages[0], "engine", key)
    if not scope.engine_stages:
        message = f"flag {flag.text} sets an engine, and this pipeline has no engine stage"
        return Violation(code="PLAN-025", message=message, place=_place(flag))
    message = f"flag {flag.text} fits more than one engine stage: {', '.join(scope.engine_stages)}"
    hint = " or ".join(f"--{stage}.engine.{key} VALUE" for stage in scope.engine_stages)
    about = frozenset(scope.engine_stages)
    return Violation(code="PLAN-025", message=message, place=_place(flag), hint=hint, about=about)


def _full_form(flag: Flag, scope: FlagScope) -> str:
    """What a single word may have been meant for: a stage, a Process, a key of one of them, or a top-level key."""
    places = {
        "<stage>": children(("stages", "<stage>")),
        "processes.<process>": children(("processes", "<process>")),
        "placement": children(("placement",)),
    }
    if same_name(flag.name, scope.stages) is not None:
        return f"{flag.text}.<key> VALUE, as in {flag.text}.process {flag.name}"
    if same_name(flag.name, scope.processes) is not None:
        return f"--processes.{flag.name}.<key> VALUE, as in --processes.{flag.name}.num_replicas 2"
    for place, keys in places.items():
        if key := same_name(flag.name, keys):
            return f"--{place}.{key} VALUE"
    return nearest(flag.name.replace("-", "_"), (*TOP_KEYS, *ENGINE_KEYS))


def _value(text: str, free: bool) -> Any:
    """``none`` clears. Lists may be written as ``[0, 1]``; factory arguments as YAML scalars."""
    if text.strip().lower() == "none":
        return None
    if not (free or text.startswith("[")):
        return text
    document = read_yaml(text, "flag")
    return document.violations[0] if document.violations else document.data
