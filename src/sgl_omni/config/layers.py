"""Lays a pipeline class, a file and flags over each other, remembers where each value came from, and validates."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from sgl_omni.config.flags import Flag, FlagScope, Override, read_flags
from sgl_omni.config.keys import ENGINE_KEYS, WIRING, children, find_key
from sgl_omni.config.resolved import ResolvedConfig, Tree
from sgl_omni.config.scalars import shown
from sgl_omni.config.schema import PipelineConfig
from sgl_omni.config.violations import KeyPath, Origin, Violation, dotted, nearest
from sgl_omni.config.yaml_source import Document
from sgl_omni.errors import InvalidRequest


class FileTree:
    """The user's file with ``stages`` as a mapping, however it was written."""

    def __init__(self, document: Document, data: Tree, problems: list[Violation]) -> None:
        self.document = document
        self.data = data
        self.renamed: dict[KeyPath, KeyPath] = {}
        stages = data.get("stages")
        self.is_list = isinstance(stages, list)
        if isinstance(stages, list):
            data["stages"] = self._by_name(stages, problems)
        self.is_full = self.is_list or (
            isinstance(stages, dict) and any(isinstance(s, dict) and "factory_path" in s for s in stages.values())
        )

    def origin(self, path: KeyPath) -> Origin:
        if path[:2] in self.renamed:
            path = (*self.renamed[path[:2]], *path[2:])
        return self.document.origin(path)

    def _by_name(self, stages: list[Any], problems: list[Violation]) -> Tree:
        named: Tree = {}
        for i, stage in enumerate(stages):
            place = self.document.origin(("stages", i))
            name = stage.get("name") if isinstance(stage, dict) else None
            if not isinstance(name, str) or not name:
                message = f"stages[{i}] has no name"
                problems.append(Violation(code="PLAN-023", message=message, place=place, hint="- name: <stage>"))
            elif name in named:
                message = f"stage '{name}' is listed twice"
                problems.append(Violation(code="PLAN-021", message=message, place=place, about=frozenset({name})))
            else:
                named[name] = {k: v for k, v in stage.items() if k != "name"}
                self.renamed["stages", name] = ("stages", i)
        return named


class Layers:
    """Lays class, file and flags over each other and validates the result."""

    def __init__(self, cls: type[PipelineConfig], problems: list[Violation]) -> None:
        self.cls = cls
        self.shipped = cls is not PipelineConfig
        self.class_name = cls.__name__ if self.shipped else None
        self.problems = problems
        self.tree: Tree = {}
        self.class_tree: Tree = {}
        self.origins: dict[KeyPath, Origin] = {}
        self.groups: dict[KeyPath, Origin] = {}
        self.unread: list[KeyPath] = []

    def add_class(self) -> None:
        if not self.shipped:
            return
        self.class_tree = {
            "stages": copy.deepcopy(dict(self.cls.default_stages)),
            "processes": copy.deepcopy(dict(self.cls.default_processes)),
        }
        if self.cls.default_placement:
            self.class_tree["placement"] = copy.deepcopy(dict(self.cls.default_placement))
        if self.cls.default_entry_stage is not None:
            self.class_tree["entry_stage"] = self.cls.default_entry_stage
        self.tree = copy.deepcopy(self.class_tree)
        self._mark((), self.tree, Origin("class", self.cls.__name__))

    def _mark(self, path: KeyPath, value: Any, origin: Origin) -> None:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                self._mark((*path, key), inner, origin)
        elif value != {}:
            self.origins[path] = origin

    def add_file(self, file: FileTree) -> None:
        data = {k: v for k, v in file.data.items() if k != "config_cls"}
        if self.shipped and file.is_list:
            message = f"'stages' is a list, but the pipeline class {self.cls.__name__} has its own stages"
            hint = "stages as a mapping, stage name -> what to change"
            self._refuse("PLAN-023", message, file.origin(("stages",)), hint)
            data.pop("stages")
        self._lay((), data, self.tree, file)

    def _lay(self, path: KeyPath, new: Mapping[str, Any], into: Tree, file: FileTree) -> None:
        for key, value in new.items():
            here = (*path, key)
            place = file.origin(here)
            if not self._accepts(here, place):
                continue
            schema = find_key(tuple(map(str, here)))
            if schema is not None and schema.kind != "leaf":
                self._lay_group(here, value, into, file, place)
                continue
            into[key] = value
            self.origins[here] = place
            if value is None:
                into.pop(key)

    def _lay_group(self, here: KeyPath, value: Any, into: Tree, file: FileTree, place: Origin) -> None:
        key = str(here[-1])
        if value is None:
            if len(here) == 2:  # "vocoder:" with nothing under it changes nothing
                into.setdefault(key, {})
            else:
                into.pop(key, None)
                self._forget(here)
            self.groups[here] = place
            return
        if not isinstance(value, dict):
            message = f"'{dotted(here)}' must be a mapping of keys to values"
            self.unread.append(here)
            self._refuse("PLAN-023", message, place, about=here)
            return
        self.groups[here] = place
        self._lay(here, value, into.setdefault(key, {}), file)

    def _forget(self, path: KeyPath) -> None:
        for known in [p for p in self.origins if p[: len(path)] == path]:
            del self.origins[known]

    def _accepts(self, path: KeyPath, place: Origin) -> bool:
        """Refuses a key that the schema does not know, or that belongs to the pipeline class."""
        if not self.shipped:
            known_stage = True
        else:
            known_stage = path[0] != "stages" or len(path) < 2 or path[1] in self.cls.default_stages
        if not known_stage:
            if len(path) == 2:
                names = list(self.cls.default_stages)
                message = f"unknown stage '{path[1]}'; the stages of {self.cls.__name__} are {', '.join(names)}"
                self._refuse("PLAN-001", message, place, nearest(str(path[1]), names), about=path)
            return False
        if self.shipped and len(path) == 3 and path[0] == "stages" and path[2] in WIRING:
            message = f"'{dotted(path)}': the wiring belongs to the pipeline class {self.cls.__name__}"
            hint = "nothing here; for another wiring, a full list of stages without config_cls"
            self._refuse("PLAN-022", message, place, hint, about=path)
            return False
        if find_key(tuple(map(str, path))) is None:
            known = children(tuple(map(str, path[:-1])))
            message = f"unknown key '{dotted(path)}'"
            if not known:
                return True
            if path[0] == "stages" and len(path) == 3 and path[2] in ENGINE_KEYS:
                hint = f"{dotted((*path[:2], 'engine', path[2]))}"
            else:
                hint = nearest(str(path[-1]), known)
            self._refuse("PLAN-022", message, place, hint, about=path)
            return False
        return True

    def add_flags(self, flags: Sequence[Flag]) -> None:
        stages = self._names("stages")
        process_names = [self._process_of(s) for s in stages]
        moved = [f.value for f in flags if f.value and f.name.endswith(".process")]
        processes = tuple(dict.fromkeys([*filter(None, process_names), *moved, *self._names("processes")]))
        scope = FlagScope(stages=stages, processes=processes, engine_stages=self._engine_stages(stages))
        overrides, problems = read_flags(flags, scope)
        self.problems += problems
        for override in overrides:
            if override.path != ("config_cls",) and self._accepts(override.path, override.origin):
                self._set(override)

    def _set(self, override: Override) -> None:
        group = self.tree
        for part in override.path[:-1]:
            inner = group.setdefault(part, {})
            if not isinstance(inner, dict):
                return
            group = inner
        group[override.path[-1]] = override.value
        if override.value is None:
            del group[override.path[-1]]
        self.origins[override.path] = override.origin

    def _names(self, group: str) -> tuple[str, ...]:
        named = self.tree.get(group)
        return tuple(named) if isinstance(named, dict) else ()

    def _stage(self, name: str) -> Tree:
        stage = self.tree["stages"].get(name)
        return stage if isinstance(stage, dict) else {}

    def _process_of(self, stage: str) -> str | None:
        """The Process of a stage as far as it is known before validation; a TP stage has its own name."""
        settings = self._stage(stage)
        process = settings.get("process")
        if isinstance(process, str) and process:
            return process
        return stage if settings.get("tp_size", 1) != 1 else None

    def _engine_stages(self, stages: tuple[str, ...]) -> tuple[str, ...]:
        if self.shipped:
            return self.cls.engine_stages
        return tuple(s for s in stages if "engine" in self._stage(s))

    def finish(self) -> ResolvedConfig:
        config = self._validated()
        return ResolvedConfig(
            config=config,
            cls=self.cls,
            class_name=self.class_name,
            model_path=self._model_path(config),
            tree=self.tree,
            class_tree=self.class_tree,
            origins=self.origins,
            groups=self.groups,
            violations=tuple(self.problems),
            unread=tuple(self.unread),
        )

    def _validated(self) -> PipelineConfig:
        """Drops what cannot be read, reports it, and validates the rest."""
        tree = copy.deepcopy(self.tree)
        for _ in range(len(self.origins) + 2):
            try:
                return self.cls.model_validate(tree)
            except ValidationError as error:
                for problem in error.errors(include_url=False):
                    self._report(tuple(problem["loc"]), problem, tree)
        raise AssertionError("a configuration that drops its faults must validate")

    def _report(self, loc: KeyPath, problem: Any, tree: Tree) -> None:
        path = loc
        while path and not _drop(tree, path):
            path = path[:-1]
        self.unread.append(path)
        place = self._origin(path)
        message = str(problem.get("ctx", {}).get("problem") or problem["msg"])
        self._refuse("PLAN-023", f"'{dotted(path)}' {message}", place, about=path)

    def _origin(self, path: KeyPath) -> Origin | None:
        while path and path not in self.origins and path not in self.groups:
            path = path[:-1]
        return self.origins.get(path) or self.groups.get(path)

    def _model_path(self, config: PipelineConfig) -> str | None:
        if config.model_path is None:
            return None
        try:
            return self.cls.resolve_model_path(config.model_path)
        except InvalidRequest as error:
            self._refuse("PLAN-027", str(error), self._origin(("model_path",)))
        except OSError as error:  # no permission, a name too long for a file
            message = f"model_path {shown(config.model_path)} cannot be looked at: {error.strerror or error}"
            self._refuse("PLAN-027", message, self._origin(("model_path",)))
        return config.model_path

    def _refuse(
        self, code: str, message: str, place: Origin | None, hint: str | None = None, about: KeyPath = ()
    ) -> None:
        names = frozenset(str(p) for p in about[1:2])
        self.problems.append(Violation(code=code, message=message, place=place, hint=hint, about=names))


def _drop(tree: Any, path: KeyPath) -> bool:
    """Removes the value at ``path``; False where there is nothing there."""
    for part in path[:-1]:
        if not isinstance(tree, dict) or part not in tree:
            return False
        tree = tree[part]
    if isinstance(tree, dict) and path[-1] in tree:
        del tree[path[-1]]
        return True
    return False
