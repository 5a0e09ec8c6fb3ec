"""Generated pipelines: accepted plans keep their promises, refused ones name a rule, nothing else is raised."""

import copy
import itertools
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sgl_omni.config.load import resolve
from sgl_omni.config.violations import PlanError
from sgl_omni.config.yaml_source import Document
from sgl_omni.models.registry import PipelineRegistry
from sgl_omni.runtime.channel import Channel
from sgl_omni.runtime.coordinator import Coordinator
from sgl_omni.runtime.messages import Submit
from sgl_omni.topology.builder import Planned, plan_config
from sgl_omni.topology.host import Host, cuda_host, virtual_host
from sgl_omni.topology.plan import Plan

HOSTS = (cuda_host(None), cuda_host(4, 80 << 30), cuda_host(4, same_physical=[[0, 1]]), virtual_host())
FACTORIES = ("dummy.engine", "dummy.gpu_stage", "dummy.cpu_stage", "dummy.gpu_stage_without_gpu_id")


def planned(data: Any, host: Host) -> Planned | None:
    """None where the configuration is refused with a code."""
    try:
        return plan_config(resolve(Document("f", data), registry=PipelineRegistry()), host, {})
    except PlanError as error:
        assert error.violations
        assert all(v.code.startswith("PLAN-") and v.message for v in error.violations)
        return None


@st.composite
def pipelines(draw: st.DrawFn) -> dict[str, Any]:
    """One to six stages, mostly well wired; about half of them are accepted."""
    count = draw(st.integers(1, 6))
    names = [f"s{i}" for i in range(count)]
    stages = [draw(stage_settings(name, count)) for name in names]
    for i, stage in enumerate(stages[1:], start=1):
        source = stages[draw(st.integers(max(0, i - 2), i - 1))]
        source["next"] = [*source.get("next", ()), stage["name"]]
    for i, stage in enumerate(stages):
        later = [n for n in names[i + 1 :] if n not in stage.get("next", ())]
        if later and rarely(draw, 4):
            stage["next"] = [*stage.get("next", ()), draw(st.sampled_from(later))]
        if "next" not in stage and not rarely(draw, 20):
            stage["terminal"] = True
    for stage in stages:
        sources = [s["name"] for s in stages if stage["name"] in s.get("next", ())]
        if len(sources) > 1:
            stage |= {"wait_for": sources, "merge_fn": "dummy.merge"}
    chains = [[s["name"], s["next"][0]] for s in stages if len(s.get("next", ())) == 1]
    return {
        "stages": stages,
        "processes": draw(process_settings(stages)),
        "fused_stages": [draw(st.sampled_from(chains))] if chains and rarely(draw, 3) else [],
        "placement": {"max_total_gpu_memory_fraction_per_gpu": 0.5} if rarely(draw, 3) else {},
        "mps": draw(st.sampled_from(["off", "off", "auto", "on"])),
        "weight_share": "on" if rarely(draw, 4) else "off",
    }


def rarely(draw: st.DrawFn, one_in: int) -> bool:
    return draw(st.integers(1, one_in)) == one_in


@st.composite
def stage_settings(draw: st.DrawFn, name: str, processes: int) -> dict[str, Any]:
    stage: dict[str, Any] = {"name": name, "process": f"p{draw(st.integers(0, processes - 1))}"}
    stage["factory_path"] = FACTORIES[-1] if rarely(draw, 12) else draw(st.sampled_from(FACTORIES[:-1]))
    if rarely(draw, 10):
        stage |= {"tp_size": 2, "gpu": [0, draw(st.integers(1, 3))], "process": name}
    elif stage["factory_path"] != "dummy.cpu_stage":
        stage["gpu"] = draw(st.integers(0, 3))
    if "gpu" in stage and not rarely(draw, 15):
        stage["gpu_memory_fraction"] = draw(st.sampled_from([0.02, 0.05, 0.1, 0.3]))
    if stage["factory_path"] == "dummy.engine":
        stage["engine"] = {"max_total_tokens": 100}
    return stage


@st.composite
def process_settings(draw: st.DrawFn, stages: list[dict[str, Any]]) -> dict[str, Any]:
    processes: dict[str, Any] = {}
    for process in dict.fromkeys(s["process"] for s in stages):
        replicas = draw(st.integers(1, 3))
        width = max(s.get("tp_size", 1) for s in stages if s["process"] == process)
        if replicas > 1:
            processes[process] = {"num_replicas": replicas}
            if any("gpu" in s for s in stages if s["process"] == process):
                size = replicas * width
                devices = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
                processes[process]["replica_devices"] = devices
    return processes


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=pipelines(), host=st.sampled_from(HOSTS))
def test_accepted_plans_keep_their_promises(data: dict[str, Any], host: Host) -> None:
    made = planned(copy.deepcopy(data), host)
    if made is None:
        return
    plan = made.plan
    assert_every_stage_is_in_one_process(plan, data)
    assert_devices_are_as_declared(plan, data)
    assert_no_gpu_is_over_its_limit(made, data)
    assert_leaders_start_first_and_end_last(plan)
    assert_bindings_hold_what_is_reachable(plan)
    for edge in plan.edges:
        same = plan.stage(edge.source).process == plan.stage(edge.target).process
        assert (edge.transport == "local") is same
    assert all(plan.process(plan.instance(n).process).tp_size == 1 for ns in plan.mps.values() for n in ns)
    again = planned(reordered(data), host)
    assert again is not None
    assert again.plan == plan
    if data["fused_stages"]:
        assert_fusing_is_the_same_as_writing_one_process(data, host, plan)


def assert_every_stage_is_in_one_process(plan: Plan, data: dict[str, Any]) -> None:
    assert sorted(s for p in plan.processes for s in p.stages) == sorted(s["name"] for s in data["stages"])
    names = [i.name for i in plan.instances]
    assert len(set(names)) == len(names)
    for process in plan.processes:
        members = plan.instances_of(process.name)
        assert {i.stages for i in members} == {process.stages}
        assert [(i.replica, i.rank) for i in members] == [
            (r, k) for r in range(process.num_replicas) for k in range(process.tp_size)
        ]
        assert all(plan.stage(s).process == process.name for s in process.stages)


def assert_devices_are_as_declared(plan: Plan, data: dict[str, Any]) -> None:
    declared = {s["name"]: s.get("gpu") for s in data["stages"]}
    for process in plan.processes:
        devices = [i.device for i in plan.instances_of(process.name)]
        moved = data["processes"].get(process.name, {}).get("replica_devices")
        own = [declared[s] for s in process.stages if declared[s] is not None]
        if moved is not None:
            assert devices == moved
        elif not own:
            assert set(devices) == {None}
        else:
            assert all(devices == (gpu if isinstance(gpu, list) else [gpu]) for gpu in own)


def assert_no_gpu_is_over_its_limit(made: Planned, data: dict[str, Any]) -> None:
    limit = data["placement"].get("max_total_gpu_memory_fraction_per_gpu", 1.0)
    cards: dict[int, float] = {}
    for instance in made.plan.instances:
        for stage in (made.plan.stage(s) for s in instance.stages):
            if stage.gpu and instance.device is not None:
                card = made.host.card(instance.device)
                cards[card] = cards.get(card, 0.0) + (stage.budget_fraction or 0.0)
    assert all(total <= limit + 1e-9 for total in cards.values())
    drawn = {gpu: sum(c.fraction or 0.0 for c in claims) for gpu, claims in made.claims.items()}
    assert sum(drawn.values()) == pytest.approx(sum(cards.values()))


def assert_leaders_start_first_and_end_last(plan: Plan) -> None:
    names = sorted(i.name for i in plan.instances)
    start = {name: i for i, wave in enumerate(plan.spawn_waves) for name in wave}
    end = {name: i for i, wave in enumerate(plan.shutdown_order) for name in wave}
    assert sorted(name for wave in plan.spawn_waves for name in wave) == names
    assert sorted(name for wave in plan.shutdown_order for name in wave) == names
    for group in plan.sharing_groups:
        for follower in group.followers:
            assert start[group.leader] < start[follower]
            assert end[follower] < end[group.leader]
            assert plan.instance(follower).device == plan.instance(group.leader).device == group.device
            assert plan.instance(follower).weight_leader == group.leader


def assert_bindings_hold_what_is_reachable(plan: Plan) -> None:
    """For each set of outputs, a request is bound in exactly the replicated Processes on a path to one of them."""
    outputs = {s.name: {*s.next, *s.stream_to} for s in plan.stages}
    terminals = [s.name for s in plan.stages if s.terminal]
    replicated = {p.name: p.num_replicas for p in plan.processes if p.num_replicas > 1}
    for count in range(1, len(terminals) + 1):
        for wanted in itertools.combinations(terminals, count):
            on_the_way = {s for s in outputs if reaches(outputs, s, set(wanted))}
            binding = admitted(plan, wanted)
            assert binding.keys() == {plan.stage(s).process for s in on_the_way} & replicated.keys()
            assert all(0 <= replica < replicated[process] for process, replica in binding.items())


class RecordingChannel:
    """Stands for the connection to the entry's instance."""

    def __init__(self) -> None:
        self.sent: list[Submit] = []

    def send_payload(self, message: Submit, sender: str) -> None:
        self.sent.append(message)


def admitted(plan: Plan, outputs: tuple[str, ...]) -> dict[str, int]:
    """The binding of the first request for these outputs."""
    coordinator, channel = Coordinator(plan, timeout=None), RecordingChannel()
    for instance in plan.instances:
        coordinator.attach(instance.name, cast(Channel, channel))
    coordinator.admit(None)
    coordinator.submit({}, outputs=outputs)
    [submit] = channel.sent
    return dict(submit.header.binding)


def reaches(outputs: dict[str, set[str]], start: str, targets: set[str]) -> bool:
    seen, stack = {start}, [start]
    while stack:
        new = outputs[stack.pop()] - seen
        seen |= new
        stack += new
    return bool(seen & targets)


def reordered(data: dict[str, Any]) -> dict[str, Any]:
    """The same configuration with the keys of every mapping in reverse; the order of stages has a meaning."""
    stages = [dict(reversed(stage.items())) for stage in data["stages"]]
    processes = {name: dict(reversed(data["processes"][name].items())) for name in reversed(data["processes"])}
    return {**dict(reversed(data.items())), "stages": stages, "processes": processes}


def assert_fusing_is_the_same_as_writing_one_process(data: dict[str, Any], host: Host, plan: Plan) -> None:
    written = copy.deepcopy(data)
    process = {s["name"]: s["process"] for s in data["stages"]}
    for group in written.pop("fused_stages"):
        for stage in written["stages"]:
            if stage["name"] in group:
                stage["process"] = process[group[0]]
    by_hand = planned(written, host)
    assert by_hand is not None
    assert by_hand.plan == plan
