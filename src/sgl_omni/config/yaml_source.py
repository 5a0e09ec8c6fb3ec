"""YAML with the line of every value. Built from parser events, so that nesting depth and aliases stay bounded."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from sgl_omni.config.scalars import shown
from sgl_omni.config.violations import KeyPath, Origin, Violation, dotted

_Parser: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MAX_DEPTH = 40
_MAX_VALUES = 200_000
_MAX_DIGITS = 40
_PLAIN_INT = re.compile(r"0|[1-9][0-9]{0,17}")


@dataclass(slots=True)
class Document:
    """Plain data, and for every value's path the line where it is written."""

    name: str
    data: Any = None
    lines: dict[KeyPath, int] = field(default_factory=dict[KeyPath, int])
    violations: list[Violation] = field(default_factory=list[Violation])

    def origin(self, path: KeyPath) -> Origin:
        """The place of a path, or of the nearest group that holds it."""
        while path and path not in self.lines:
            path = path[:-1]
        return Origin("file", f"{self.name}:{self.lines.get(path, 1)}")


@dataclass(slots=True)
class _Node:
    kind: str
    line: int
    value: str = ""
    plain: bool = True
    tag: str | None = None
    items: list[_Node] = field(default_factory=list["_Node"])


class _Unreadable(Exception):
    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


def read_yaml(text: str, name: str) -> Document:
    """Parses one document. What is wrong with it goes to ``violations``; ``data`` is then what could be read."""
    document = Document(name)
    try:
        root = _compose(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        _refuse(document, "PLAN-020", f"this is not YAML: {error.problem or error.context}", line)
    except (yaml.YAMLError, UnicodeError, RecursionError) as error:
        _refuse(document, "PLAN-020", f"this is not YAML: {shown(str(error)).strip(chr(39))}", 1)
    except _Unreadable as error:
        _refuse(document, "PLAN-020", str(error), error.line)
    else:
        if root is not None:
            document.data = _Reader(document).read(root, ())
    return document


def _refuse(document: Document, code: str, message: str, line: int) -> None:
    document.violations.append(Violation(code=code, message=message, place=Origin("file", f"{document.name}:{line}")))


def _compose(text: str) -> _Node | None:
    """A tree of nodes; an alias is the very node of its anchor."""
    root: _Node | None = None
    stack: list[_Node] = []
    anchors: dict[str, _Node] = {}
    for event in yaml.parse(text, Loader=_Parser):
        if isinstance(event, yaml.SequenceEndEvent | yaml.MappingEndEvent):
            stack.pop()
            continue
        if not isinstance(event, yaml.NodeEvent):
            continue
        line = event.start_mark.line + 1 if event.start_mark else 1
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in anchors:
                raise _Unreadable(f"alias '*{event.anchor}' names no anchor above it", line)
            node = anchors[event.anchor]
            if node in stack:
                raise _Unreadable(f"alias '*{event.anchor}' holds itself", line)
        else:
            node = _node_of(event, line)
            if event.anchor:
                anchors[event.anchor] = node
        if stack:
            stack[-1].items.append(node)
        elif root is not None:
            raise _Unreadable("a second document; one file holds one pipeline", line)
        else:
            root = node
        if isinstance(event, yaml.SequenceStartEvent | yaml.MappingStartEvent):
            stack.append(node)
            if len(stack) > _MAX_DEPTH:
                raise _Unreadable(f"nested more than {_MAX_DEPTH} deep", line)
    return root


def _node_of(event: Any, line: int) -> _Node:
    if isinstance(event, yaml.ScalarEvent):
        return _Node("scalar", line, event.value, plain=not event.style, tag=event.tag)
    kind = "mapping" if isinstance(event, yaml.MappingStartEvent) else "sequence"
    return _Node(kind, line, tag=event.tag)


class _Reader:
    def __init__(self, document: Document) -> None:
        self._document = document
        self._scalars: Any = yaml.SafeLoader("")
        self._count = 0

    def read(self, node: _Node, path: KeyPath, line: int | None = None) -> Any:
        self._count += 1
        if self._count > _MAX_VALUES:
            if self._count == _MAX_VALUES + 1:
                self._refuse("PLAN-020", f"more than {_MAX_VALUES} values", node)
            return None
        self._document.lines[path] = line or node.line
        if node.kind == "scalar":
            return self._scalar(node, path)
        if node.tag not in (None, "!", "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"):
            self._refuse("PLAN-023", f"tag '{node.tag}' has no meaning here", node)
        if node.kind == "sequence":
            return [self.read(item, (*path, i)) for i, item in enumerate(node.items)]
        return self._mapping(node, path)

    def _mapping(self, node: _Node, path: KeyPath) -> dict[str, Any]:
        written: dict[str, int] = {}
        merged: list[_Node] = []
        data: dict[str, Any] = {}
        for key, value in zip(node.items[::2], node.items[1::2], strict=False):
            if key.kind != "scalar":
                self._refuse("PLAN-023", "a key must be text", key)
            elif key.value == "<<" and key.plain:
                merged.append(value)
            elif key.value in written:
                name = dotted((*path, key.value))
                self._refuse("PLAN-021", f"'{name}' is written twice; the first is in line {written[key.value]}", key)
            else:
                written[key.value] = key.line
                data[key.value] = self.read(value, (*path, key.value), key.line)
        for base in merged:
            self._merge(base, path, data)
        return data

    def _merge(self, base: _Node, path: KeyPath, data: dict[str, Any]) -> None:
        """YAML's ``<<``: keys of the base that the mapping does not set itself."""
        if base.kind == "sequence":
            for part in base.items:
                self._merge(part, path, data)
            return
        if base.kind != "mapping":
            self._refuse("PLAN-023", "'<<' takes a mapping", base)
            return
        known = dict(self._document.lines)
        for name, value in self._mapping(base, path).items():
            if name in data:
                self._document.lines.update({p: n for p, n in known.items() if p[: len(path) + 1] == (*path, name)})
            else:
                data[name] = value

    def _scalar(self, node: _Node, path: KeyPath) -> Any:
        if not node.plain and node.tag in (None, "!"):
            return node.value
        if node.tag is None and _PLAIN_INT.fullmatch(node.value):
            return int(node.value)  # most scalars of a large file; the general way takes four times as long
        tag = (
            node.tag
            if node.tag not in (None, "!")
            else self._scalars.resolve(yaml.ScalarNode, node.value, (True, False))
        )
        if tag == "tag:yaml.org,2002:str":
            return node.value
        if tag not in _SCALAR_TAGS:
            if node.tag in (None, "!"):
                return node.value  # a date or '=' is only text to us
            self._refuse("PLAN-023", f"tag '{node.tag}' has no meaning here", node)
            return node.value
        if tag == "tag:yaml.org,2002:int" and (len(node.value) > _MAX_DIGITS or ":" in node.value):
            return node.value  # 1:30 is text, whatever YAML 1.1 makes of it
        try:
            return self._scalars.construct_object(yaml.ScalarNode(tag, node.value))
        except (ValueError, OverflowError, KeyError, IndexError, yaml.YAMLError):
            self._refuse("PLAN-023", f"'{dotted(path)}': {shown(node.value)} is no {tag.rpartition(':')[2]}", node)
            return None

    def _refuse(self, code: str, message: str, node: _Node) -> None:
        _refuse(self._document, code, message, node.line)


_SCALAR_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float")}
