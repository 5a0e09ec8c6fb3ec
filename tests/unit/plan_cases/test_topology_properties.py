"""Generated pipelines: accepted plans keep their promises, refused ones name a rule, nothing else is raised."""

import copy
import random
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planning import FULL

from sgl_omni.config.load import resolve
from sgl_omni.config.violations import PlanError
from sgl_omni.config.yaml_source import Document, read_yaml
from sgl_omni.models.registry import PipelineRegistry
from sgl_omni.topology.builder import Planned, plan_config
from sgl_omni.topology.host import cuda_host, virtual_host
from sgl_omni.topology.render import layout_text

HOSTS = (cuda_host(None), cuda_host(4, 80 << 30), cuda_host(4, same_physical=[[0, 1]]), virtual_host())
FACTORIES = ("dummy.engine", "dummy.gpu_stage", "dummy.cpu_stage", "dummy.gpu_stage_without_gpu_id")


def planned(data: Any, host: Any) -> Planned | None:
    """None where the configuration is refused with a code."""
    try:
        return plan_config(resolve(Document("f", data), registry=PipelineRegistry()), host, {})
    except PlanError as error:
        assert error.violations
        assert all(v.code.startswith("PLAN-") and v.message for v in error.violations)
        return None


@st.composite
def pipelines(draw: st.DrawFn) -> dict[str, Any]:
    count = draw(st.integers(1, 5))
    names = [f"s{i}" for i in range(count)]
    stages = []
    for i, name in enumerate(names):
        later = names[i + 1 :]
        stage: dict[str, Any] = {"name": name, "factory_path": draw(st.sampled_from(FACTORIES))}
        stage["process"] = f"p{draw(st.integers(0, count - 1))}"
        gpu = draw(st.none() | st.integers(0, 3))
        if draw(st.integers(0, 9)) == 0:
            stage["tp_size"], gpu = 2, [0, draw(st.integers(0, 3))]
        if gpu is not None:
            stage["gpu"] = gpu
            stage["gpu_memory_fraction"] = draw(st.sampled_from([0.05, 0.1, 0.2, 0.6]))
        if later and draw(st.integers(0, 5)):
            stage["next"] = draw(st.lists(st.sampled_from(later), min_size=1, max_size=2, unique=True))
        else:
            stage["terminal"] = True
        if stage["factory_path"] == "dummy.engine":
            stage["engine"] = {"max_total_tokens": 100}
        stages.append(stage)
    for stage in stages:
        sources = [s["name"] for s in stages if stage["name"] in s.get("next", ())]
        if len(sources) > 1:
            stage |= {"wait_for": sources, "merge_fn": "dummy.merge"}
    processes: dict[str, Any] = {}
    for process in {s["process"] for s in stages}:
        replicas = draw(st.integers(1, 3))
        width = max(s.get("tp_size", 1) for s in stages if s["process"] == process)
        on_gpu = any("gpu" in s for s in stages if s["process"] == process)
        if replicas > 1:
            size = replicas * width
            devices = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
            processes[process] = {"num_replicas": replicas, **({"replica_devices": devices} if on_gpu else {})}
    modes = {"mps": draw(st.sampled_from(["off", "auto", "on"])), "weight_share": draw(st.sampled_from(["off", "on"]))}
    return {"stages": stages, "processes": processes, **modes}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=pipelines(), host=st.sampled_from(HOSTS))
def test_accepted_plans_keep_their_promises(data: dict[str, Any], host: Any) -> None:
    made = planned(copy.deepcopy(data), host)
    if made is None:
        return
    plan = made.plan
    names = [i.name for i in plan.instances]
    assert len(set(names)) == len(names)
    members = [s for p in plan.processes for s in p.stages]
    assert sorted(members) == sorted(s["name"] for s in data["stages"])
    for process in plan.processes:
        assert len(plan.instances_of(process.name)) == process.num_replicas * process.tp_size
        devices = data["processes"].get(process.name, {}).get("replica_devices")
        if devices is not None:
            assert [i.device for i in plan.instances_of(process.name)] == devices
    for claims in made.claims.values():
        assert sum(c.fraction or 0 for c in claims) <= 1 + 1e-9
    started = [name for wave in plan.spawn_waves for name in wave]
    assert sorted(started) == sorted(names)
    assert sorted(n for wave in plan.shutdown_order for n in wave) == sorted(names)
    for group in plan.sharing_groups:
        for follower in group.followers:
            assert started.index(group.leader) < started.index(follower)
            assert plan.instance(follower).device == plan.instance(group.leader).device == group.device
    for edge in plan.edges:
        same = plan.stage(edge.source).process == plan.stage(edge.target).process
        assert (edge.transport == "local") is same
    assert all(plan.process(plan.instance(n).process).tp_size == 1 for ns in plan.mps.values() for n in ns)
    shuffled = dict(reversed(list(data.items())))
    shuffled["processes"] = dict(reversed(list(data["processes"].items())))
    again = planned(shuffled, host)
    assert again is not None
    assert again.plan == plan


JUNK: tuple[Any, ...] = (
    None,
    True,
    2.0,
    -1,
    0,
    10**30,
    "",
    "x",
    "2",
    [],
    {},
    [[]],
    {"a": {}},
    "a@r0",
    "4GiB",
    float("nan"),
)


def mutated(data: Any, rng: random.Random) -> Any:
    """A copy with one value replaced, removed or repeated under another key."""
    data = copy.deepcopy(data)
    node = data
    while isinstance(node, dict | list) and node:
        key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
        if not isinstance(node[key], dict | list) or rng.random() < 0.3:
            if rng.random() < 0.2:
                del node[key]
            elif isinstance(node, dict) and rng.random() < 0.2:
                node[rng.choice(["gpus", "name", "stages", "process", "engine", "x"])] = node[key]
            else:
                node[key] = rng.choice(JUNK)
            break
        node = node[key]
    return data


@pytest.mark.parametrize("seed", range(4))
def test_mutated_configurations_are_planned_or_refused(seed: int) -> None:
    rng = random.Random(seed)
    sources = [yaml.safe_load(FULL), {"model_path": "demo-voice", "stages": {"vocoder": {"gpu": 0}}, "mps": "auto"}]
    sources[0]["processes"] = {"pb": {"num_replicas": 2, "replica_devices": [0, 0], "cpu_cores": ["0", "1"]}}
    sources[0] |= {"fused_stages": [["a", "b"]], "weight_share": "on", "placement": {}, "name": "n"}
    for _ in range(300):
        data = rng.choice(sources)
        for _ in range(rng.randint(1, 3)):
            data = mutated(data, rng)
        made = planned(data, rng.choice(HOSTS))
        if made is not None:
            layout_text(made.plan, made.host, made.eligible)


@pytest.mark.parametrize("seed", range(4))
def test_mutated_text_is_read_or_refused(seed: int) -> None:
    rng = random.Random(seed)
    tokens = [
        "null",
        "&a",
        "*a",
        "<<: *a",
        "!!int",
        "- ",
        "\t",
        "0x1F",
        ".nan",
        "1e400",
        "@",
        "\x00",
        "\u2028",
        "? ",
        "|",
        "%",
        "[[[",
        "}",
        "#",
        "9" * 5000,
    ]
    for _ in range(400):
        text = FULL
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(text) + 1)
            text = text[:at] + rng.choice([*tokens, "", chr(rng.randrange(32, 300))]) + text[at + rng.randint(0, 6) :]
        document = read_yaml(text, "f.yaml")
        try:
            plan_config(resolve(document, registry=PipelineRegistry()), rng.choice(HOSTS), {})
        except PlanError as error:
            assert str(error)
