"""Signatures of functions and classes, read from their source. Imports nothing, so a factory's torch stays unloaded."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
from dataclasses import dataclass
from pathlib import Path

_MAX_HOPS = 8


@dataclass(frozen=True, slots=True)
class Signature:
    """Keyword parameters of a callable. ``exact`` is False where a decorator may have changed them."""

    parameters: tuple[str, ...]
    required: tuple[str, ...]
    takes_any: bool = False
    exact: bool = True


@dataclass(frozen=True, slots=True)
class Missing:
    """The path leads nowhere; ``names`` are what the module defines."""

    reason: str
    names: tuple[str, ...] = ()


class Opaque:
    """It exists, or may exist, but its source does not say what it takes."""


Found = Signature | Missing | Opaque


class SourceReader:
    """Looks up dotted paths. Each module is parsed once in a reader's life."""

    def __init__(self) -> None:
        self._modules: dict[str, ast.Module | Missing | Opaque] = {}
        self._found: dict[str, Found] = {}

    def find(self, path: str) -> Found:
        """The callable behind ``package.module.name`` or ``package.module:name``."""
        if path not in self._found:
            module, _, name = path.replace(":", ".").rpartition(".")
            known = module and name.isidentifier()
            self._found[path] = self._lookup(module, name, 0) if known else Missing("it is no dotted import path")
        return self._found[path]

    def _lookup(self, module: str, name: str, hops: int) -> Found:
        tree = self._module(module)
        if not isinstance(tree, ast.Module):
            return tree
        if hops > _MAX_HOPS:
            return Opaque()
        definition = _definition(tree, name)
        if definition is None:
            if _is_open(tree):
                return Opaque()
            return Missing(f"module '{module}' defines no '{name}'", tuple(_names(tree)))
        if isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
            return _signature(definition, bound=False)
        if isinstance(definition, ast.ClassDef):
            return self._class(module, definition, hops)
        if isinstance(definition, ast.ImportFrom):
            original = next(a.name for a in definition.names if (a.asname or a.name) == name)
            target = _absolute(module, self._is_package(module), definition)
            return self._lookup(target, original, hops + 1) if target else Opaque()
        if isinstance(definition, ast.Assign) and isinstance(definition.value, ast.Name):
            return self._lookup(module, definition.value.id, hops + 1)
        return Opaque()

    def _class(self, module: str, node: ast.ClassDef, hops: int) -> Found:
        for item in node.body:
            if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                return _signature(item, bound=True)
        if node.decorator_list or node.keywords or len(node.bases) > 1:
            return Opaque()
        if not node.bases:
            return Signature((), ())
        base = node.bases[0]
        found = self._lookup(module, base.id, hops + 1) if isinstance(base, ast.Name) else Opaque()
        return Opaque() if isinstance(found, Missing) else found

    def _module(self, name: str) -> ast.Module | Missing | Opaque:
        if name not in self._modules:
            self._modules[name] = _parse(name)
        return self._modules[name]

    def _is_package(self, name: str) -> bool:
        spec = _spec(name)
        return spec is not None and spec.submodule_search_locations is not None


def _spec(name: str) -> importlib.machinery.ModuleSpec | None:
    """The module's spec, found by walking its packages' folders rather than importing them."""
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return None
    for depth, part in enumerate(rest, start=2):
        if spec is None or spec.submodule_search_locations is None or not part.isidentifier():
            return None
        full = ".".join(name.split(".")[:depth])
        spec = importlib.machinery.PathFinder.find_spec(full, list(spec.submodule_search_locations))
    return spec


def _parse(name: str) -> ast.Module | Missing | Opaque:
    spec = _spec(name)
    if spec is None:
        return Missing(f"there is no module '{name}'")
    if spec.origin is None or not spec.origin.endswith(".py"):
        return Opaque()
    try:
        return ast.parse(Path(spec.origin).read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        return Missing(f"module '{name}' cannot be read: {error}")


def _statements(tree: ast.Module) -> list[ast.stmt]:
    """Top-level statements, those under ``if`` and ``try`` included."""
    found: list[ast.stmt] = []
    stack = list(reversed(tree.body))
    while stack:
        node = stack.pop()
        found.append(node)
        if isinstance(node, ast.If | ast.Try):
            inner = [*node.body, *node.orelse]
            inner += [s for h in getattr(node, "handlers", []) for s in h.body] + getattr(node, "finalbody", [])
            stack.extend(reversed(inner))
    return found


def _defines(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.ImportFrom | ast.Import):
        return [(a.asname or a.name).partition(".")[0] for a in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [t.id for t in targets if isinstance(t, ast.Name)]


def _definition(tree: ast.Module, name: str) -> ast.stmt | None:
    """The last statement that binds the name, as at run time."""
    return next((node for node in reversed(_statements(tree)) if name in _defines(node)), None)


def _names(tree: ast.Module) -> list[str]:
    callables = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [n for node in _statements(tree) if isinstance(node, callables) for n in _defines(node) if n[0] != "_"]


def _is_open(tree: ast.Module) -> bool:
    """Whether names may come from elsewhere: a star import or a module-level ``__getattr__``."""
    for node in _statements(tree):
        if isinstance(node, ast.ImportFrom) and any(a.name == "*" for a in node.names):
            return True
        if isinstance(node, ast.FunctionDef) and node.name == "__getattr__":
            return True
    return False


def _absolute(module: str, is_package: bool, node: ast.ImportFrom) -> str | None:
    if not node.level:
        return node.module
    parts = module.split(".")
    keep = len(parts) - node.level + (1 if is_package else 0)
    if keep < 1:
        return None
    return ".".join([*parts[:keep], *([node.module] if node.module else [])])


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef, bound: bool) -> Signature:
    arguments = node.args
    positional_only = arguments.posonlyargs[1:] if bound and arguments.posonlyargs else arguments.posonlyargs
    positional = arguments.args[1:] if bound and not arguments.posonlyargs else arguments.args
    in_order = [*positional_only, *positional]
    without_default = in_order[: max(len(in_order) - len(arguments.defaults), 0)]
    required = [a.arg for a in without_default]
    required += [a.arg for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is None]
    return Signature(
        parameters=tuple(a.arg for a in (*positional, *arguments.kwonlyargs)),
        required=tuple(required),
        takes_any=arguments.kwarg is not None,
        exact=not node.decorator_list,
    )
