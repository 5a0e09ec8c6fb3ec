"""Lossless readings of scalars: numeral text is a number, but ``true`` or ``2.0`` is never an integer."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar

from pydantic import PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from sgl_omni.config.violations import PlanError, Violation

_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")
_SIZE = re.compile(r"([0-9]{1,12})(KiB|MiB|GiB|TiB)")
_CORES = re.compile(r"[0-9]{1,5}(-[0-9]{1,5})?(,[0-9]{1,5}(-[0-9]{1,5})?)*")
T = TypeVar("T")

MAX_COPIES = 256
"""Replicas of a Process, or ranks of a stage: OS processes, of which no host of today has room for more."""


def shown(value: object) -> str:
    """A value as an error message quotes it: as YAML writes it, bounded, and on one line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = " ".join((f"'{value}'" if isinstance(value, str) else str(value)).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def _wrong(expected: str, value: object) -> PydanticCustomError:
    return PydanticCustomError("scalar", "{problem}", {"problem": f"must be {expected}, not {shown(value)}"})


def whole(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and _WHOLE.fullmatch(value.strip()):
        return int(value)
    raise _wrong("a whole number", value)


def at_least(minimum: int) -> Callable[[object], int]:
    def read(value: object) -> int:
        number = whole(value)
        if not minimum <= number < 2**63:
            raise _wrong(f"a whole number of at least {minimum}", value)
        return number

    return read


def number(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()) and math.isfinite(float(value)):
        return float(value)
    raise _wrong("a number", value)


def _copies(value: object) -> int:
    copies = whole(value)
    if not 1 <= copies <= MAX_COPIES:
        raise _wrong(f"a whole number from 1 to {MAX_COPIES}", value)
    return copies


def _percentage(value: object) -> int:
    percentage = whole(value)
    if not 1 <= percentage <= 100:
        raise _wrong("a percentage from 1 to 100", value)
    return percentage


def _fraction(value: object) -> float:
    fraction = number(value)
    if not 0 < fraction <= 1:
        raise _wrong("a fraction above 0 and at most 1", value)
    return fraction


def _open_fraction(value: object) -> float:
    fraction = number(value)
    if not 0 < fraction < 1:
        raise _wrong("a fraction above 0 and below 1", value)
    return fraction


def read_size(value: object) -> int:
    if isinstance(value, str) and (match := _SIZE.fullmatch(value)):
        size = int(match[1]) * _UNITS[match[2]]
    else:
        try:
            size = whole(value)
        except PydanticCustomError:
            expected = 'a number of bytes or exactly a whole number with a unit, as in "4GiB" or "512MiB"'
            raise _wrong(expected, value) from None
    if not 0 < size < 2**63:
        raise _wrong("more than 0 bytes and less than 8 EiB", value)
    return size


def parse_bytes(text: str) -> int:
    """``"4GiB"`` as a number of bytes, for command-line options. Raises ``PlanError``."""
    try:
        return read_size(text)
    except PydanticCustomError as error:
        raise PlanError([Violation(code="PLAN-023", message=f"a size {error.message()}")]) from error


def read_flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value in ("true", "false"):
        return value == "true"
    raise _wrong("true or false", value)


def _text(value: object) -> str:
    if isinstance(value, str) and value and "\0" not in value:
        return value
    if isinstance(value, bool | int | float):
        raise _wrong("text; put it in quotes", value)
    raise _wrong("text", value)


def _env_value(value: object) -> str:
    """Variables are text; a plain integer is taken as its digits."""
    if isinstance(value, str) and "\0" not in value:
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise _wrong("text; put it in quotes", value)


def _list_of(read: Callable[[object], T], what: str, separator: str = ",") -> Callable[[object], tuple[T, ...]]:
    """Takes a list, one element, or text with separators (as the command line gives it)."""

    def read_all(written: object) -> tuple[T, ...]:
        value = written
        if isinstance(value, str):
            bare = value.strip().removeprefix("[").removesuffix("]").strip()
            value = [part.strip() for part in bare.split(separator)] if bare else []
        if isinstance(value, tuple):
            value = list(value)
        elif not isinstance(value, list):
            value = [value]
        try:
            return tuple(read(element) for element in value)
        except PydanticCustomError:
            raise _wrong(what, written) from None

    return read_all


def read_core_set(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return str(value)
    if isinstance(value, str) and _CORES.fullmatch(value.strip()):
        return value.strip()
    raise _wrong('a core set, as in "0-9" or "0-3,8"', value)


def core_numbers(cores: str) -> tuple[int, ...]:
    """``"0-2,8"`` -> ``(0, 1, 2, 8)``; empty for a range written backwards."""
    numbers: set[int] = set()
    for part in cores.split(","):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(numbers))


def core_text(cores: Iterable[int]) -> str:
    """``0-3,8``: how cores are written."""
    runs: list[list[int]] = []
    for cpu in sorted(cores):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def choice(*options: str, switch: bool = False) -> Callable[[object], str]:
    """One of ``options``; with ``switch``, YAML's bare on and off (a boolean) mean the words."""

    def read(value: object) -> str:
        if switch and isinstance(value, bool):
            return "on" if value else "off"
        if isinstance(value, str) and value in options:
            return value
        raise _wrong(f"one of {', '.join(options)}", value)

    return read


def _groups(value: object) -> tuple[tuple[str, ...], ...]:
    names = _list_of(_text, "a list of stage names")
    if isinstance(value, str):
        return (names(value),)
    if isinstance(value, list | tuple) and value and all(isinstance(v, str) for v in value):
        raise _wrong("a list of lists of stage names, as in [[preprocessing, tts_engine]]", list(value))
    if not isinstance(value, list | tuple):
        raise _wrong("a list of lists of stage names", value)
    return tuple(names(group) for group in value)


def _schema(kind: str, **more: Any) -> WithJsonSchema:
    return WithJsonSchema({"type": kind, **more})


def _schema_any(*options: dict[str, Any]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": list(options)})


_INT_LIST: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_TEXT_LIST: dict[str, Any] = {"type": "array", "items": {"type": "string"}}

PositiveInt = Annotated[int, PlainValidator(at_least(1)), _schema("integer", minimum=1)]
Count = Annotated[int, PlainValidator(at_least(0)), _schema("integer", minimum=0)]
Copies = Annotated[int, PlainValidator(_copies), _schema("integer", minimum=1, maximum=MAX_COPIES)]
Percentage = Annotated[int, PlainValidator(_percentage), _schema("integer", minimum=1, maximum=100)]
Fraction = Annotated[float, PlainValidator(_fraction), _schema("number", exclusiveMinimum=0, maximum=1)]
OpenFraction = Annotated[
    float, PlainValidator(_open_fraction), _schema("number", exclusiveMinimum=0, exclusiveMaximum=1)
]
Size = Annotated[
    int,
    PlainValidator(read_size),
    _schema_any({"type": "integer", "minimum": 1}, {"type": "string", "pattern": "^[0-9]+(KiB|MiB|GiB|TiB)$"}),
]
Flag = Annotated[bool, PlainValidator(read_flag), _schema("boolean")]
Text = Annotated[str, PlainValidator(_text), _schema("string")]
EnvValue = Annotated[str, PlainValidator(_env_value), _schema_any({"type": "string"}, {"type": "integer"})]
Devices = Annotated[
    tuple[int, ...],
    PlainValidator(_list_of(at_least(0), "a GPU id or a list of them, as in 0 or [0, 1]")),
    _schema_any({"type": "integer", "minimum": 0}, _INT_LIST),
]
Names = Annotated[
    tuple[str, ...],
    PlainValidator(_list_of(_text, "a stage name or a list of them")),
    _schema_any({"type": "string"}, _TEXT_LIST),
]
CoreSets = Annotated[
    tuple[str, ...],
    PlainValidator(_list_of(read_core_set, 'one core set per replica, as in ["0-9", "10-19"]', separator=" ")),
    WithJsonSchema(_TEXT_LIST),
]
StageGroups = Annotated[
    tuple[tuple[str, ...], ...],
    PlainValidator(_groups),
    WithJsonSchema({"type": "array", "items": _TEXT_LIST}),
]
