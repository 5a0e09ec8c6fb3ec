"""Where a request goes: reachability under cut edges, the next stages, and the instance behind a stage name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterable
from functools import lru_cache
from typing import Any

from sgl_omni.runtime.messages import Binding, Cuts
from sgl_omni.topology.plan import Plan, StagePlan, instance_name


class Wiring:
    """Answers questions about a plan's graph; pure, and cached because few sets of cuts ever occur."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.stages = {stage.name: stage for stage in plan.stages}
        self.by_device = frozenset((edge.source, edge.target) for edge in plan.edges if edge.transport == "cuda_ipc")
        """The edges whose tensors may stay on their device."""
        self.terminals = tuple(stage.name for stage in plan.stages if stage.terminal)
        self._processes = {process.name: process for process in plan.processes}
        self._stream_sources = {name: tuple(s.name for s in plan.stages if name in s.stream_to) for name in self.stages}
        self._payload_sources = {name: tuple(s.name for s in plan.stages if name in s.next) for name in self.stages}
        self.reach = lru_cache(maxsize=256)(self._reach)
        self.cuts_for = lru_cache(maxsize=256)(self._cuts_for)

    def _reach(self, cuts: Cuts) -> frozenset[str]:
        """The stages that a request with these cuts can still visit."""
        seen = {self.plan.entry}
        stack = [self.plan.entry]
        cut = set(cuts)
        while stack:
            stage = self.stages[stack.pop()]
            for target in (*stage.next, *stage.stream_to):
                if target not in seen and (stage.name, target) not in cut:
                    seen.add(target)
                    stack.append(target)
        return frozenset(seen)

    def _cuts_for(self, outputs: frozenset[str]) -> Cuts:
        """The edges to cut so that only the stages that lead to `outputs` are visited."""
        useful = set(outputs)
        while True:
            more = {s.name for s in self.plan.stages if s.name not in useful and useful & {*s.next, *s.stream_to}}
            if not more:
                break
            useful |= more
        return tuple(
            (s.name, target)
            for s in self.plan.stages
            if s.name in useful
            for target in dict.fromkeys((*s.next, *s.stream_to))
            if target not in useful
        )

    def outputs_in(self, cuts: Cuts) -> tuple[str, ...]:
        """The terminal stages from which a request with these cuts still gets a result."""
        reach = self.reach(cuts)
        return tuple(name for name in self.terminals if name in reach)

    def inputs_of(self, stage: StagePlan, cuts: Cuts) -> set[str]:
        """The sources that a fan-in stage still waits for under these cuts."""
        return self._live(stage.name, stage.wait_for, cuts)

    def streams_into(self, stage: str, cuts: Cuts) -> set[str]:
        """The sources whose streams must end before `stage` can finish."""
        return self._live(stage, self._stream_sources[stage], cuts)

    def has_payload_input(self, stage: str, cuts: Cuts) -> bool:
        """Whether a payload (not only a stream) will reach `stage`."""
        return stage == self.plan.entry or bool(self._live(stage, self._payload_sources[stage], cuts))

    def targets(self, stage: StagePlan, cuts: Cuts) -> list[str]:
        return [t for t in stage.next if (stage.name, t) not in cuts]

    def stream_targets(self, stage: StagePlan, cuts: Cuts) -> list[str]:
        return [t for t in stage.stream_to if (stage.name, t) not in cuts]

    def _live(self, stage: str, sources: Iterable[str], cuts: Cuts) -> set[str]:
        reach = self.reach(cuts)
        return {source for source in sources if source in reach and (source, stage) not in cuts}

    def instance_of(self, stage: str, binding: Binding) -> str:
        """The instance (rank 0 of a tensor-parallel group) that serves `stage` for this request."""
        process = self._processes[self.stages[stage].process]
        replica = binding.get(process.name, 0)
        return instance_name(process.name, replica, process.num_replicas, 0, process.tp_size)

    def processes_in(self, cuts: Cuts) -> list[str]:
        """The Processes that a request with these cuts can reach, in plan order."""
        reach = self.reach(cuts)
        return [p.name for p in self.plan.processes if reach.intersection(p.stages)]


def cut_others(stage: StagePlan, chosen: Collection[str], cuts: Cuts) -> Cuts:
    """`cuts` plus every edge from a routing stage to a successor that it did not choose."""
    others = dict.fromkeys(t for t in (*stage.next, *stage.stream_to) if t not in chosen)
    return (*cuts, *((stage.name, t) for t in others if (stage.name, t) not in cuts))


def load_object(path: str) -> Callable[..., Any]:
    """Imports `package.module.name` or `package.module:name`.

    Raises:
        ImportError, AttributeError: as the import system words it.
    """
    module, _, name = path.replace(":", ".").rpartition(".")
    if not module:
        raise ImportError(f"'{path}' is no dotted import path (package.module.name)")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found
