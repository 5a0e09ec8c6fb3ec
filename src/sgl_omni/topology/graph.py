"""The wiring: one entry, no cycle, every stage reachable, every path ending in a terminal stage (rules 2 and 9)."""

from __future__ import annotations

from collections.abc import Iterable

from sgl_omni.config.schema import StageConfig
from sgl_omni.config.violations import nearest
from sgl_omni.topology.findings import Findings, quoted

Stages = dict[str, StageConfig]


def check_graph(found: Findings) -> str | None:
    """The entry stage. Reports what is wrong with the wiring."""
    stages = found.stages
    for name, stage in stages.items():
        _check_targets(found, name, stage)
        _check_ends(found, name, stage)
        _check_fan_in(found, name, stage)
    entry = _entry(found)
    cycle = _cycle(stages)
    if cycle is not None:
        message = f"the wiring has a cycle: {' -> '.join([*cycle, cycle[0]])}"
        found.refuse("PLAN-002", message, ("stages", cycle[-1]), hint="an edge less", about=cycle)
    elif entry is not None:
        _check_reachable(found, entry)
    _check_local_edges(found)
    return entry


def _outputs(stage: StageConfig) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*stage.next, *stage.stream_to)))


def _check_targets(found: Findings, name: str, stage: StageConfig) -> None:
    for key, targets in (("next", stage.next), ("stream_to", stage.stream_to), ("wait_for", stage.wait_for)):
        for target in targets:
            if target not in found.stages:
                message = f"stage '{name}': '{key}' names '{target}', and there is no such stage"
                found.refuse("PLAN-002", message, ("stages", name, key), hint=nearest(target, found.stages))
        repeated = next((t for t in targets if targets.count(t) > 1), None)
        if repeated is not None:
            message = f"stage '{name}': '{key}' names '{repeated}' twice"
            found.refuse("PLAN-002", message, ("stages", name, key), hint=f"'{repeated}' once")


def _check_ends(found: Findings, name: str, stage: StageConfig) -> None:
    if stage.terminal and stage.next:
        message = f"stage '{name}' is terminal and also has 'next': {quoted(stage.next)}"
        found.refuse("PLAN-002", message, ("stages", name), hint="either terminal: true or next", about=(name,))
    if not stage.terminal and not stage.next:
        message = f"stage '{name}' is neither terminal nor has 'next', so its requests never end"
        found.refuse("PLAN-002", message, ("stages", name), hint="terminal: true, or next")
    if stage.terminal and stage.route_fn is not None:
        message = f"stage '{name}' is terminal, so route_fn has nothing to choose"
        found.refuse("PLAN-002", message, ("stages", name, "route_fn"), hint="no route_fn")


def _check_fan_in(found: Findings, name: str, stage: StageConfig) -> None:
    sources = [s for s, other in found.stages.items() if name in other.next]
    never = [s for s in stage.wait_for if s in found.stages and s not in sources]
    for source in never:
        only = "only a stream, no payload," if name in found.stages[source].stream_to else "nothing"
        message = f"stage '{name}' waits for '{source}', which sends {only} to it: it would wait for ever"
        hint = f"wait_for: {sources}" if sources else "no wait_for"
        found.refuse("PLAN-002", message, ("stages", name, "wait_for"), hint=hint, about=(source,))
    if stage.wait_for and stage.merge_fn is None:
        message = f"stage '{name}' has wait_for but no merge_fn"
        hint = f"stages.{name}.merge_fn: package.module.function"
        found.refuse("PLAN-002", message, ("stages", name, "wait_for"), hint=hint)
    if stage.merge_fn is not None and not stage.wait_for:
        found.warn(f"stage '{name}' has a merge_fn but no wait_for, so it is never called")
    missing = [s for s in sources if s not in stage.wait_for]
    if len(sources) > 1 and missing and not (not stage.wait_for and _exclusive(found.stages, sources)):
        message = f"stage '{name}' receives from {quoted(sources)} but does not wait for {quoted(missing)}"
        hint = f"wait_for: [{', '.join(sources)}] and a merge_fn"
        found.refuse("PLAN-002", message, ("stages", name), hint=hint, about=sources)


def _exclusive(stages: Stages, sources: list[str]) -> bool:
    """Whether a routing stage above picks one of the sources per request, so that one payload arrives."""
    routing = [name for name, stage in stages.items() if stage.route_fn is not None]
    for router in routing:
        branches = [_reach(stages, [target]) for target in stages[router].next if target in stages]
        if all(sum(source in branch for branch in branches) == 1 or source == router for source in sources):
            return True
    return False


def _entry(found: Findings) -> str | None:
    """The stage named by `entry_stage`, or the one that no edge leads to (the first of several)."""
    stages = found.stages
    named = found.resolved.config.entry_stage
    if named is not None:
        if named in stages:
            return named
        message = f"entry_stage '{named}' is no stage"
        found.refuse("PLAN-002", message, ("entry_stage",), hint=nearest(named, stages))
        return None
    fed = {target for stage in stages.values() for target in _outputs(stage)}
    return next((name for name in stages if name not in fed), None)


def _reach(stages: Stages, start: Iterable[str]) -> set[str]:
    seen = set(start)
    stack = list(seen)
    while stack:
        for target in _outputs(stages[stack.pop()]):
            if target in stages and target not in seen:
                seen.add(target)
                stack.append(target)
    return seen


def _check_reachable(found: Findings, entry: str) -> None:
    lost = found.stages.keys() - _reach(found.stages, [entry])
    for name in (n for n in found.stages if n in lost):
        message = f"stage '{name}' cannot be reached from the entry '{entry}', so it would never run"
        hint = f"'{name}' in some stage's next, or no such stage"
        found.refuse("PLAN-002", message, ("stages", name), hint=hint, about=(entry,))


def _cycle(stages: Stages) -> list[str] | None:
    """One cycle of the graph of payloads and streams, or None."""
    done: set[str] = set()
    for start in stages:
        path: list[str] = []
        on_path: set[str] = set()
        stack: list[tuple[str, bool]] = [(start, False)]
        while stack:
            name, leaving = stack.pop()
            if leaving:
                path.pop()
                on_path.discard(name)
                done.add(name)
                continue
            if name in done or name not in stages:
                continue
            if name in on_path:
                return path[path.index(name) :]
            path.append(name)
            on_path.add(name)
            stack.append((name, True))
            stack.extend((target, False) for target in _outputs(stages[name]))
    return None


def _check_local_edges(found: Findings) -> None:
    """An edge whose state cannot be serialised must stay inside one Process."""
    edges = dict.fromkeys(found.resolved.cls.process_local_edges)
    for name, stage in found.stages.items():
        if stage.local_output:
            edges.update(dict.fromkeys((name, target) for target in _outputs(stage)))
    for source, target in edges:
        if source not in found.stages or target not in found.stages:
            continue
        one, other = (found.stages[s].process or s for s in (source, target))
        if one != other:
            message = (
                f"'{source}' hands state to '{target}' that cannot leave its process, but they are in Processes "
                f"'{one}' and '{other}'"
            )
            moved = found.resolved.value_origin("stages", source, "process").kind in ("file", "flag")
            wrong, right = (source, other) if moved else (target, one)
            at = ("stages", wrong, "process")
            found.refuse("PLAN-009", message, at, hint=f"stages.{wrong}.process: {right}", about=(source, target))
