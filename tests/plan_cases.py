"""Runs every planner case of a folder: ``python tests/plan_cases.py FOLDER``.

A folder holds ``cases/*.yaml``, ``expected.json`` and ``dummy.py``. Prints a line per disagreement and
``N of M agree`` last; exits 1 unless all do.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from sgl_omni.config.load import resolve
from sgl_omni.config.schema import PipelineConfig
from sgl_omni.config.violations import PlanError
from sgl_omni.config.yaml_source import Document, read_yaml
from sgl_omni.models.registry import PipelineRegistry
from sgl_omni.topology.builder import Planned, plan_config
from sgl_omni.topology.host import GIB, Host, cuda_host

Json = dict[str, Any]
CASE_KEYS = {"pipeline_class", "config", "overrides", "host", "env"}


@dataclass(frozen=True)
class Case:
    """One file: a pipeline class (None: a shipped one), the user's file, flags, machine and environment."""

    name: str
    document: Document
    cls: type[PipelineConfig] | None
    flags: tuple[str, ...]
    host: Host
    environ: dict[str, str]

    def plan(self, mps: str | None = None) -> Planned:
        flags = self.flags if mps is None else (*_without_mps(self.flags), "--mps", mps)
        document = self.document
        if mps is not None and isinstance(document.data, dict):
            data = {k: v for k, v in document.data.items() if k != "mps"}
            document = Document(document.name, data, document.lines, document.violations)
        config = resolve(document, flags, registry=PipelineRegistry(), cls=self.cls)
        return plan_config(config, self.host, self.environ)


def _without_mps(flags: tuple[str, ...]) -> list[str]:
    kept = [flag for flag in flags if not flag.startswith("--mps=")]
    while "--mps" in kept:
        at = kept.index("--mps")
        del kept[at : at + 2]
    return kept


def read_case(path: Path) -> Case:
    document = read_yaml(path.read_text(encoding="utf-8"), path.name)
    data = document.data if isinstance(document.data, dict) else {}
    if not CASE_KEYS & data.keys():
        return Case(path.stem, document, None, (), cuda_host(None), {})
    declared = data.get("pipeline_class")
    return Case(
        name=path.stem,
        document=_part(document, "config"),
        cls=_pipeline_class(declared) if declared is not None else None,
        flags=tuple(str(flag) for flag in data.get("overrides") or ()),
        host=_host(data.get("host") or {}),
        environ={str(k): str(v) for k, v in (data.get("env") or {}).items()},
    )


def _part(document: Document, key: str) -> Document:
    lines = {path[1:]: line for path, line in document.lines.items() if path[:1] == (key,)}
    return Document(document.name, document.data.get(key) or {}, lines, document.violations)


def _pipeline_class(declared: Json) -> type[PipelineConfig]:
    stages = declared.get("stages") or {}
    if isinstance(stages, list):
        stages = {stage["name"]: {k: v for k, v in stage.items() if k != "name"} for stage in stages}
    edges = declared.get("process_local_edges") or declared.get("local_edges") or ()

    class CasePipelineConfig(PipelineConfig):
        engine_stages: ClassVar[tuple[str, ...]] = tuple(str(s) for s in declared.get("engine_stages") or ())
        process_local_edges: ClassVar[tuple[tuple[str, str], ...]] = tuple((a, b) for a, b in edges)
        default_stages: ClassVar[dict[str, Json]] = stages
        default_processes: ClassVar[dict[str, Json]] = declared.get("processes") or {}
        default_entry_stage: ClassVar[str | None] = declared.get("entry_stage")

    return CasePipelineConfig


def _host(given: Json) -> Host:
    memory = given.get("device_memory_gib")
    same = given.get("same_physical") or ()
    groups = same if same and isinstance(same[0], list) else [same] if same else []
    return cuda_host(
        given.get("devices"),
        int(memory * GIB) if memory is not None else None,
        mps=False if given.get("mps_unsupported") else None,
        same_physical=groups,
    )


def disagreements(case: Case, expected: Json) -> Iterator[str]:
    """What differs between this planner's answer and the expected one."""
    try:
        planned = case.plan()
    except PlanError as error:
        if expected["verdict"] == "accept":
            yield f"refused: {error}"
            return
        yield from _unnamed(str(error), expected.get("names", {}))
        return
    if expected["verdict"] != "accept":
        yield f"accepted, but must be refused ({expected.get('why', '')})"
        return
    for key, actual in _facts(case, planned).items():
        if key in expected and actual != expected[key]:
            yield f"{key}: {json.dumps(actual)}, expected {json.dumps(expected[key])}"


def _unnamed(message: str, names: Json) -> Iterator[str]:
    for name in (*names.get("stages", ()), *names.get("processes", ())):
        if not re.search(rf"(?<![\w@]){re.escape(name)}(?!\w)", message):
            yield f"the refusal does not name '{name}': {message}"
    for gpu in names.get("gpus", ()):
        if not re.search(rf"\bGPU {gpu}\b", message):
            yield f"the refusal does not name GPU {gpu}: {message}"


def _facts(case: Case, planned: Planned) -> Json:
    plan = planned.plan
    fraction = {str(gpu): round(sum(c.fraction or 0.0 for c in claims), 6) for gpu, claims in planned.claims.items()}
    processes = {
        i.name: {
            "gpus": [] if i.device is None else [i.device],
            "stages": [s if plan.process(i.process).num_replicas == 1 else f"{s}@r{i.replica}" for s in i.stages],
        }
        for i in plan.instances
    }
    groups = [
        {"followers": list(g.followers), "gpu": g.device, "leader": g.leader, "process": g.process}
        for g in plan.sharing_groups
    ]
    return {
        "processes": processes,
        "gpu_fraction": fraction,
        "mps_if_auto": _mps(case, "auto"),
        "mps_if_on": _mps(case, "on"),
        "weight_share": groups,
        "spawn_waves": [list(wave) for wave in plan.spawn_waves],
    }


def _mps(case: Case, mode: str) -> Json | str:
    try:
        plan = case.plan(mode).plan
    except PlanError:
        return "reject"
    return {str(gpu): sorted(names) for gpu, names in plan.mps.items()}


def check_folder(folder: Path) -> tuple[int, int]:
    """How many cases agree, and how many there are."""
    sys.path.insert(0, str(folder))
    try:
        expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
        agreeing = 0
        for name, wanted in sorted(expected.items()):
            found = list(disagreements(read_case(folder / "cases" / f"{name}.yaml"), wanted))
            for problem in found:
                print(f"{name}: {problem}")
            agreeing += not found
        return agreeing, len(expected)
    finally:
        sys.path.remove(str(folder))


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: plan_cases.py FOLDER", file=sys.stderr)
        return 2
    agreeing, total = check_folder(Path(sys.argv[1]).resolve())
    print(f"{agreeing} of {total} agree")
    return 0 if agreeing == total else 1


if __name__ == "__main__":
    sys.exit(main())
