"""A plan as a drawing: GPUs and what sits on each, budgets, edges, MPS, weight sharing and the order of start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.text import Text

from sgl_omni.config.scalars import core_text
from sgl_omni.topology.budget import size_text
from sgl_omni.topology.host import Host
from sgl_omni.topology.mps import Eligibility
from sgl_omni.topology.plan import InstancePlan, Plan, StagePlan

if TYPE_CHECKING:
    from rich.console import Console

_BAR = 30
_COLORS = ("cyan", "green", "magenta", "yellow", "blue", "red")


def layout_text(plan: Plan, host: Host, eligible: Eligibility | None = None) -> str:
    """The drawing as plain text."""
    return layout(plan, host, eligible).plain


def print_layout(
    plan: Plan, host: Host, eligible: Eligibility | None = None, *, console: Console | None = None
) -> None:
    """Draws to the terminal, in colour where it can."""
    from rich.console import Console

    (console or Console(highlight=False)).print(layout(plan, host, eligible), soft_wrap=True)


def layout(plan: Plan, host: Host, eligible: Eligibility | None = None) -> Text:
    """The drawing as rich text; with ``eligible``, also what MPS would take in every mode."""
    drawing = _Drawing(plan, host)
    text = Text()
    text.append(plan.name, style="bold")
    text.append(f"   {host.describe()}\n", style="dim")
    for line in drawing.gpus():
        text.append_text(line).append("\n")
    for title, lines in (
        ("Host", drawing.cpu_instances()),
        ("Edges", drawing.edges()),
        ("Replicas", drawing.replicas()),
        ("MPS", drawing.mps(eligible)),
        ("Weights", drawing.sharing()),
        ("Start", drawing.waves()),
        ("Notes", iter(plan.warnings)),
    ):
        _section(text, title, lines)
    text.rstrip()
    return text


def _section(text: Text, title: str, lines: Iterator[str]) -> None:
    for i, line in enumerate(lines):
        text.append(f"{title if i == 0 else '':<10}", style="bold")
        text.append(f"{line}\n")


class _Drawing:
    def __init__(self, plan: Plan, host: Host) -> None:
        self.plan = plan
        self.host = host
        self._stages = {stage.name: stage for stage in plan.stages}
        self._processes = {process.name: process for process in plan.processes}

    def _label(self, instance: InstancePlan, stage: str) -> str:
        """``tts_engine@r0``, ``thinker rank 1``: one copy of a stage."""
        process = self._processes[instance.process]
        label = stage if process.num_replicas == 1 else f"{stage}@r{instance.replica}"
        return label if process.tp_size == 1 else f"{label} rank {instance.rank}"

    def _gpu_stages(self, instance: InstancePlan) -> list[StagePlan]:
        return [self._stages[s] for s in instance.stages if self._stages[s].gpu]

    def gpus(self) -> Iterator[Text]:
        devices = sorted({i.device for i in self.plan.instances if i.device is not None})
        for device in devices:
            instances = [i for i in self.plan.instances if i.device == device]
            labels = [self._label(i, s.name) for i in instances for s in self._gpu_stages(i)]
            card = self.host.card(device)
            where = f"GPU {device}" if card == device else f"GPU {device} (the card of GPU {card})"
            yield Text(f"{where}: {' + '.join(labels)}", style="bold")
            yield self._bar(device, instances)
            for color, instance in zip(_cycle(len(instances)), instances, strict=True):
                yield self._occupant(instance, color)

    def _bar(self, device: int, instances: list[InstancePlan]) -> Text:
        """Declared budgets as a bar of the card's total memory."""
        memory = self.host.memory(device)
        line = Text("  ")
        total, drawn = 0.0, 0
        silent = False
        for color, instance in zip(_cycle(len(instances)), instances, strict=True):
            for stage in self._gpu_stages(instance):
                share = _share(stage, memory)
                silent = silent or share is None
                total += share or 0.0
            end = min(round(total * _BAR), _BAR)
            line.append("█" * (end - drawn), style=color)
            drawn = end
        line.append("░" * (_BAR - drawn), style="dim")
        size = size_text(memory) if memory else "memory unknown"
        if silent and not total:
            return line.append(f" no budget declared ({size})", style="dim")
        return line.append(f" {total:.0%} declared ({size})" + (", some stages without budget" if silent else ""))

    def _occupant(self, instance: InstancePlan, color: str) -> Text:
        line = Text("  ")
        line.append("■ ", style=color)
        line.append(f"{instance.name:<24} ")
        line.append(", ".join(self._described(instance, s) for s in instance.stages))
        marks = [instance.weight_role if instance.weight_role != "own" else "", _mps(instance)]
        cores = _cores(instance)
        extra = [mark for mark in (*marks, cores) if mark]
        return line.append(f"  [{', '.join(extra)}]" if extra else "", style="dim")

    def _described(self, instance: InstancePlan, name: str) -> str:
        stage = self._stages[name]
        label = self._label(instance, name)
        if not stage.gpu:
            return f"{label} (host)"
        if stage.budget_fraction is not None:
            return f"{label} {stage.budget_fraction:g}"
        return f"{label} {size_text(stage.budget_bytes)}" if stage.budget_bytes is not None else label

    def gpu_facts(self, device: int, instances: list[InstancePlan]) -> dict[str, Any]:
        memory = self.host.memory(device)
        shares = [_share(stage, memory) for i in instances for stage in self._gpu_stages(i)]
        return {
            "gpu": device,
            "memory_bytes": memory,
            "declared_fraction": round(sum(s or 0.0 for s in shares), 9),
            "without_budget": sum(s is None for s in shares),
            "processes": [
                {
                    "name": i.name,
                    "stages": [self._label(i, s) for s in i.stages],
                    "weights": i.weight_role,
                    "mps": i.mps,
                }
                for i in instances
            ],
        }

    def cpu_instances(self) -> Iterator[str]:
        for instance in self.plan.instances:
            if instance.device is None:
                cores = f"  [{_cores(instance)}]" if instance.cpu_cores else ""
                yield f"{instance.name:<24} {', '.join(self._label(instance, s) for s in instance.stages)}{cores}"

    def edges(self) -> Iterator[str]:
        kinds: dict[tuple[str, str, str], list[str]] = {}
        for edge in self.plan.edges:
            kinds.setdefault((edge.source, edge.target, edge.transport), []).append(edge.kind)
        width = max((len(f"{s} -> {t}") for s, t, _ in kinds), default=0)
        for (source, target, transport), names in kinds.items():
            yield f"{f'{source} -> {target}':<{width}}  {transport:<8}  {' and '.join(names)}"

    def replicas(self) -> Iterator[str]:
        for process in self.plan.processes:
            if process.num_replicas > 1:
                yield f"{process.name} x {process.num_replicas}, {process.policy}"

    def mps(self, eligible: Eligibility | None) -> Iterator[str]:
        if eligible is None:
            yield from _clients(self.plan.mps)
            return
        taken = "; ".join(_clients(self.plan.mps))
        yield self.plan.mps_mode if self.plan.mps_mode == "off" else f"{self.plan.mps_mode}: {taken or 'no GPU'}"
        for mode in ("auto", "on"):
            if mode == self.plan.mps_mode:
                continue
            refusal = eligible.refusal() if mode == "on" else eligible.impossible
            would = "; ".join(_clients(eligible.chosen(mode)))
            yield f"{mode} would take: {would or refusal or 'no GPU'}"

    def sharing(self) -> Iterator[str]:
        plan = self.plan
        for group in plan.sharing_groups:
            where = f"GPU {group.device}: "
            if plan.weights_from is not None:
                yield f"{where}{', '.join((group.leader, *group.followers))} as lent at {plan.weights_from}"
                continue
            led = [*group.followers, *(["other servers that borrow them"] if plan.lends_weights else [])]
            yield f"{where}{group.leader} leads {', '.join(led)}"

    def waves(self) -> Iterator[str]:
        """Every process starts at once; those after the first wave say what they wait for before they are built."""
        for number, wave in enumerate(self.plan.spawn_waves, start=1):
            yield f"{number}. {', '.join(map(self._waiting, wave))}"

    def _waiting(self, name: str) -> str:
        instance = self.plan.instance(name)
        if instance.weight_role != "follower":
            return name
        return f"{name} (at the same time, but waits for the weights of {instance.weight_leader})"


def _clients(mps: dict[int, tuple[str, ...]]) -> list[str]:
    return [f"GPU {gpu}: {', '.join(names)}" for gpu, names in mps.items()]


def _cores(instance: InstancePlan) -> str:
    """``cores 0-3,8-11 for 4 threads``: what the process is pinned to; empty where it runs anywhere."""
    if not instance.cpu_cores:
        return ""
    threads = f" for {instance.threads} threads" if instance.threads != len(instance.cpu_cores) else ""
    return f"cores {core_text(instance.cpu_cores)}{threads}"


def _mps(instance: InstancePlan) -> str:
    """``MPS 30% of threads, at most 4 GiB``; empty without MPS."""
    if not instance.mps:
        return ""
    threads = f" {instance.mps_thread_percentage}% of threads" if instance.mps_thread_percentage is not None else ""
    limit = f" at most {size_text(instance.mps_memory_limit)}" if instance.mps_memory_limit is not None else ""
    return f"MPS{threads}{',' if threads and limit else ''}{limit}"


def _share(stage: StagePlan, memory: int | None) -> float | None:
    if stage.budget_fraction is not None:
        return stage.budget_fraction
    return stage.budget_bytes / memory if stage.budget_bytes is not None and memory else None


def _cycle(count: int) -> list[str]:
    return [_COLORS[i % len(_COLORS)] for i in range(count)]


def layout_facts(plan: Plan, host: Host, eligible: Eligibility, note: str | None = None) -> dict[str, Any]:
    """The layout as plain data, for scripts."""
    drawing = _Drawing(plan, host)
    occupants: dict[int, list[InstancePlan]] = {}
    for instance in plan.instances:
        if instance.device is not None:
            occupants.setdefault(instance.device, []).append(instance)
    would = {mode: {str(gpu): list(names) for gpu, names in eligible.chosen(mode).items()} for mode in ("auto", "on")}
    return {
        "name": plan.name,
        "host": host.describe(),
        "gpus": [drawing.gpu_facts(device, occupants[device]) for device in sorted(occupants)],
        "cpu_processes": [i.name for i in plan.instances if i.device is None],
        "edges": [
            {"source": e.source, "target": e.target, "kind": e.kind, "transport": e.transport} for e in plan.edges
        ],
        "mps": {"mode": plan.mps_mode, "auto": would["auto"], "on": would["on"], "on_refused": eligible.refusal()},
        "sharing_groups": [
            {"process": g.process, "gpu": g.device, "leader": g.leader, "followers": list(g.followers)}
            for g in plan.sharing_groups
        ],
        "lends_weights": plan.lends_weights,
        "weights_from": plan.weights_from,
        "spawn_waves": [list(wave) for wave in plan.spawn_waves],
        "notes": [*plan.warnings, *([note] if note else [])],
    }


def layout_svg(plan: Plan, host: Host, eligible: Eligibility | None = None) -> str:
    """The drawing as a picture."""
    from io import StringIO

    from rich.console import Console

    drawing = layout(plan, host, eligible)
    width = max((len(line) for line in drawing.plain.splitlines()), default=40) + 2
    console = Console(record=True, width=width, file=StringIO(), force_terminal=True, highlight=False)
    console.print(drawing, soft_wrap=True)
    return console.export_svg(title=plan.name)
