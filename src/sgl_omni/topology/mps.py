"""Which processes CUDA MPS would overlap (rule 11)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from sgl_omni.config.violations import KeyPath
from sgl_omni.topology.findings import Findings, listed
from sgl_omni.topology.placement import Placed
from sgl_omni.topology.processes import ProcessGroup

_ORDINAL = re.compile(r"cuda:([0-9]{1,4})", re.IGNORECASE)
VISIBILITY = "CUDA_VISIBLE_DEVICES"
THREAD_PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


@dataclass(frozen=True, slots=True)
class Eligibility:
    """Clients per GPU if MPS were used, and why some GPUs are left out."""

    clients: dict[int, tuple[str, ...]]
    blocked: dict[int, tuple[str, ...]] = field(default_factory=dict[int, tuple[str, ...]])
    impossible: str | None = None

    def chosen(self, mode: str) -> dict[int, tuple[str, ...]]:
        """The GPUs that a mode takes: ``auto`` needs two clients, ``on`` needs one."""
        if mode == "off" or self.impossible is not None:
            return {}
        least = 2 if mode == "auto" else 1
        return {gpu: names for gpu, names in self.clients.items() if len(names) >= least and gpu not in self.blocked}

    def refusal(self) -> str | None:
        """Why ``on`` is refused, or None where it is possible."""
        if self.impossible is not None:
            return self.impossible
        if self.chosen("on"):
            return None
        reasons = listed(dict.fromkeys(reason for reasons in self.blocked.values() for reason in reasons))
        detail = f"; {reasons}" if self.blocked else ""
        return f"no single-GPU, non-TP process is eligible{detail}"


def eligibility(found: Findings, placed: tuple[Placed, ...]) -> Eligibility:
    """Clients keyed by the lowest ordinal of their physical GPU."""
    clients: dict[int, list[str]] = defaultdict(list)
    blocked: dict[int, list[str]] = defaultdict(list)
    ordinals = {
        name: ordinals for name in found.stages if (ordinals := set(named_ordinals(found.stages[name].factory)))
    }
    for p in placed:
        named = {o for stage in p.group.stages for o in ordinals.get(stage, ())}
        if named - {0} or (named and p.device is None):
            names = listed(f"cuda:{o}" for o in sorted(named))
            reason = f"'{p.name}' names {names} in its factory arguments, and MPS shows a process one device only"
            for gpu in named if p.device is None else {*named, p.device}:
                blocked[found.host.card(gpu)].append(reason)
        if p.device is not None and p.group.tp_size == 1:
            clients[found.host.card(p.device)].append(p.name)
    return Eligibility(
        clients={gpu: tuple(names) for gpu, names in sorted(clients.items())},
        blocked={gpu: tuple(reasons) for gpu, reasons in blocked.items()},
        impossible=_impossible(found),
    )


def choose(found: Findings, placed: tuple[Placed, ...], eligible: Eligibility) -> dict[int, tuple[str, ...]]:
    """The MPS clients per GPU for the mode asked; reports rule 11."""
    mode = found.resolved.config.mps
    chosen = eligible.chosen(mode)
    _check_percentages(found, placed, {name for names in chosen.values() for name in names})
    if mode == "off":
        return {}
    _check_visibility(found, placed)
    refusal = eligible.refusal()
    if mode == "on" and refusal is not None:
        found.refuse("PLAN-011", f"mps: on is not possible: {refusal}", ("mps",), hint="mps: auto or off")
    if mode == "auto":
        if eligible.impossible is not None:
            found.warn(f"mps: auto does nothing: {eligible.impossible}")
        for gpu, reasons in eligible.blocked.items():
            if len(eligible.clients.get(gpu, ())) > 1:
                found.warn(f"mps: auto leaves GPU {gpu} out: {listed(dict.fromkeys(reasons))}")
    return chosen


def _impossible(found: Findings) -> str | None:
    if found.host.platform == "cpu":
        return "the CPU platform has no MPS"
    if found.host.mps is False:
        return "this machine cannot run CUDA MPS"
    return None


def _check_visibility(found: Findings, placed: tuple[Placed, ...]) -> None:
    """Under MPS the planner sets which device a process sees."""
    for group in dict.fromkeys(p.group for p in placed if p.device is not None):
        for stage in group.stages:
            if VISIBILITY in found.stages[stage].env:
                message = (
                    f"stage '{stage}' sets {VISIBILITY}, which MPS sets itself for each process of Process "
                    f"'{group.name}'"
                )
                at: KeyPath = ("stages", stage, "env", VISIBILITY)
                hint = f"stages.{stage}.gpu for the placement, and no {VISIBILITY}"
                found.refuse("PLAN-011", message, at, hint=hint, about=group.stages)


def _check_percentages(found: Findings, placed: tuple[Placed, ...], clients: set[str]) -> None:
    """A percentage is of use to an MPS client only."""
    mode = found.resolved.config.mps
    for group in dict.fromkeys(p.group for p in placed):
        if group.mps_thread_percentage is None:
            continue
        at: KeyPath = ("processes", group.name, "mps_thread_percentage")
        reason = _no_client(group, mode)
        if reason is not None:
            message = f"Process '{group.name}' has an mps_thread_percentage, but {reason}"
            hint = "mps: auto or on" if mode == "off" and group.gpu_stages else "no mps_thread_percentage"
            found.refuse("PLAN-011", message, at, hint=hint, about=group.stages)
            continue
        for stage in group.stages:
            if THREAD_PERCENTAGE in found.stages[stage].env:
                message = f"stage '{stage}' sets {THREAD_PERCENTAGE}, and so does mps_thread_percentage"
                found.refuse("PLAN-011", message, at, hint="one of the two", about=group.stages)
        without = [p.name for p in placed if p.group == group and p.name not in clients]
        if without:
            found.warn(f"mps_thread_percentage has no effect on {listed(without)}, which MPS does not take")


def _no_client(group: ProcessGroup, mode: str) -> str | None:
    if not group.gpu_stages:
        return "no GPU stage"
    if group.tp_size > 1:
        return "its ranks take no part in MPS"
    return "mps is off" if mode == "off" else None


def named_ordinals(value: Any) -> Iterable[int]:
    """Every ``cuda:N`` in a value."""
    if isinstance(value, str):
        match = _ORDINAL.fullmatch(value.strip())
        return [int(match[1])] if match else []
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, Iterable):
        return []
    return [ordinal for item in value for ordinal in named_ordinals(item)]
