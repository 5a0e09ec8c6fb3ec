"""The benchmark of two cards: what it starts is what a machine of two cards can run, and its sums are right."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import several_gpus
from benchmarks.several.both_cards import flags, halves
from benchmarks.several.replicas import LAYOUTS, arguments
from benchmarks.several.tensor_parallel import Ranks, agreement, prompts
from benchmarks.several.transfer import WAYS, plan_of

from sgl_omni.config.load import load_config
from sgl_omni.models.registry import PipelineRegistry
from sgl_omni.topology.builder import build_plan
from sgl_omni.topology.host import GIB, Cores, Device, Host, cuda_host
from sgl_omni.topology.plan import Plan

TWO = cuda_host(2, 141 * GIB, mps=True)


def planned(path: Path | None, arguments: list[str], model_path: str | None = None) -> Plan:
    return build_plan(load_config(path, arguments, registry=PipelineRegistry(), model_path=model_path), TWO)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_speech_stages_stand_where_the_layout_says(layout: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3OmniMoeForConditionalGeneration"]}))
    devices = LAYOUTS[layout]
    given = arguments(tmp_path, devices, "cuda", "auto")
    at = given.index("--model-path")
    kept = [*given[:at], *given[at + 4 :]]  # without the path and the name
    kept = [part for i, part in enumerate(kept) if "--platform" not in kept[max(0, i - 1) : i + 1]]
    plan = planned(None, kept, str(tmp_path))
    for stage in ("talker_ar", "code2wav"):
        assert tuple(i.device for i in plan.instances_of(stage)) == devices
    assert sorted(plan.mps) == sorted({0, *devices})


@pytest.mark.parametrize("card", [0, 1])
def test_copies_on_a_card_share_weights_there(card: int) -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "tts" / "pipeline.yaml"
    plan = planned(path, ["--mps", "on", *flags(card, 2, "on")])
    assert {i.device for i in plan.instances} == {None, card}
    (group,) = plan.sharing_groups
    assert (group.device, plan.mps[card]) == (card, ("tts_engine@r0", "tts_engine@r1", "vocoder"))


@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_are_on_cards_of_their_own(tp: int, tmp_path: Path) -> None:
    ranks = Ranks(tp, graphs=True, dtype="bfloat16", batches=[1, 32], outputs=(32, 288))
    plan = ranks.plan(tmp_path, TWO, tmp_path / "notes.json")
    assert [i.device for i in plan.instances] == list(range(tp))
    assert plan.stage("llm").engine == {
        "max_total_tokens": 32 * 352,
        "max_running_requests": 32,
        "cuda_graph_max_bs": 32,
    }


@pytest.mark.parametrize(
    "wrong",
    [
        "--copies 0",
        "--share foo",
        "--dtypes int4",
        "--rounds 0",
        "--concurrency 0",
        "--mps maybe",
        "--seconds nan",
        "--seconds -1",
        "--layers -1",
        "--until -1",
        "--out /nonexistent/x.json",
        "--ways x",
        "--layouts x",
        "--sections",
    ],
)
def test_nonsense_is_told_before_anything_starts(
    wrong: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, _, value = wrong.partition(" ")
    monkeypatch.setattr(sys, "argv", ["several_gpus", "--device", "cpu", name, value])
    with pytest.raises(SystemExit) as ended:
        several_gpus.main()
    assert ended.value.code == 2
    assert f"{name}: " in capsys.readouterr().err.splitlines()[-1]


def test_each_way_connects_its_cards() -> None:
    for way in WAYS.values():
        plan = plan_of(way, "cuda")
        assert tuple(i.device for i in plan.instances) == way.devices
        assert {edge.transport for edge in plan.edges} == {way.transport}
        assert plan.mps == ({way.devices[0]: ("source", "sink")} if way.mps else {})


def test_cores_are_halved_by_node_or_by_whole_physical_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    siblings = {cpu: frozenset({cpu, (cpu + 4) % 8}) for cpu in range(8)}
    one = Cores(nodes={0: frozenset(range(8))}, siblings=siblings, allowed=frozenset(range(8)))
    assert halves(Host(devices=(Device(), Device()), cores=one)) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    two = Cores(nodes={0: frozenset({0, 2, 4, 6}), 1: frozenset({1, 3, 5, 7})}, siblings=siblings, allowed=one.allowed)
    cards = (Device(numa_node=1), Device(numa_node=0))
    assert halves(Host(devices=cards, cores=two)) == [[1, 3, 5, 7], [0, 2, 4, 6]]
    assert halves(Host()) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_answers_part_where_they_first_differ() -> None:
    assert agreement([[1, 2, 3], [4, 5, 6], [7, 8, 9]], [[1, 2, 3], [4, 9, 9], [0, 8, 9]]) == {
        "answers": 3,
        "same": 1,
        "parted_after": [1, 0],
    }
    asked = prompts(16, 320)
    assert len({tuple(prompt) for prompt in asked}) == 16 and all(0 <= t < 320 for p in asked for t in p)
