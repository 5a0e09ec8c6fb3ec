"""Reachability, cuts, binding and exit texts: the pure parts of the runtime."""

from __future__ import annotations

import pytest

from sgl_omni.runtime.child import describe_exit
from sgl_omni.runtime.coordinator import ReplicaPicker
from sgl_omni.runtime.wiring import Wiring, cut_others, load_object
from sgl_omni.topology.plan import Plan, ProcessPlan, StagePlan, instance_name


def wiring(*stages: StagePlan, replicas: int = 1) -> Wiring:
    processes = tuple(ProcessPlan(name=s.process, stages=(s.name,), num_replicas=replicas) for s in stages)
    return Wiring(
        Plan(
            name="t", model_path=None, platform="cpu", entry=stages[0].name, stages=stages, processes=processes,
            instances=(), edges=(), spawn_waves=(), shutdown_order=(),
        )
    )  # fmt: skip


def stage(name: str, *following: str, **fields: object) -> StagePlan:
    return StagePlan(name=name, process=f"p_{name}", factory_path="m.f", next=following, **fields)  # type: ignore[arg-type]


OMNI = wiring(
    stage("pre", "thinker"),
    stage("thinker", "decode", "talker", stream_to=("talker",)),
    stage("decode", terminal=True),
    stage("talker", "vocoder", stream_to=("vocoder",)),
    stage("vocoder", terminal=True),
)


def test_text_only_cuts_the_speech_branch_at_its_root() -> None:
    cuts = OMNI.cuts_for(frozenset({"decode"}))
    assert cuts == (("thinker", "talker"),)
    assert OMNI.reach(cuts) == {"pre", "thinker", "decode"}
    assert OMNI.outputs_in(cuts) == ("decode",)
    assert OMNI.processes_in(cuts) == ["p_pre", "p_thinker", "p_decode"]
    assert OMNI.stream_targets(OMNI.stages["thinker"], cuts) == []


def test_all_outputs_cut_nothing() -> None:
    assert OMNI.cuts_for(frozenset({"decode", "vocoder"})) == ()
    assert len(OMNI.reach(())) == 5


def test_a_route_cuts_what_was_not_chosen_and_fan_in_waits_for_the_rest() -> None:
    graph = wiring(
        stage("a", "b", "c"), stage("b", "d"), stage("c", "d"), stage("d", terminal=True, wait_for=("b", "c"))
    )
    d = graph.stages["d"]
    assert graph.inputs_of(d, ()) == {"b", "c"}
    cuts = cut_others(graph.stages["a"], ["b"], ())
    assert cuts == (("a", "c"),)
    assert graph.inputs_of(d, cuts) == {"b"}
    assert cut_others(graph.stages["a"], ["b"], cuts) == cuts


def test_streams_and_payloads_into_a_stage() -> None:
    assert OMNI.streams_into("vocoder", ()) == {"talker"}
    assert OMNI.has_payload_input("vocoder", ())
    only_stream = wiring(stage("a", stream_to=("b",)), stage("b", terminal=True))
    assert not only_stream.has_payload_input("b", ())
    assert only_stream.has_payload_input("a", ())


def test_the_binding_names_the_instance() -> None:
    graph = wiring(stage("a", "b"), stage("b", terminal=True), replicas=2)
    assert graph.instance_of("b", {"p_a": 0, "p_b": 1}) == "p_b@r1"
    assert instance_name("p", 0, 1) == "p"
    assert instance_name("p", 1, 2, rank=3, tp_size=4) == "p@r1_tp3"


def test_round_robin_skips_what_is_down_and_stays_even() -> None:
    picker = ReplicaPicker(ProcessPlan(name="p", stages=("s",), num_replicas=3))
    assert [picker.pick([0, 1, 2], {}) for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [picker.pick([0, 2], {}) for _ in range(3)] == [0, 2, 2]


def test_least_inflight_takes_the_idlest_and_ties_in_turn() -> None:
    picker = ReplicaPicker(ProcessPlan(name="p", stages=("s",), num_replicas=3, policy="least_inflight"))
    assert picker.pick([0, 1, 2], {0: 5, 1: 2, 2: 3}) == 1
    assert {picker.pick([0, 1, 2], {0: 1, 1: 1, 2: 1}) for _ in range(3)} == {0, 1, 2}


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (0, "exited with status 0"),
        (3, "exited with status 3"),
        (-9, "was killed by SIGKILL (exit status -9)"),
        (-11, "was killed by SIGSEGV (exit status -11)"),
        (-200, "was killed by signal 200 (exit status -200)"),
    ],
)
def test_an_exit_reads_like_a_sentence(status: int, text: str) -> None:
    assert describe_exit(status) == text


def test_dotted_paths_with_dot_or_colon() -> None:
    assert load_object("os.path.join") is load_object("os.path:join")
    with pytest.raises(ImportError, match="no dotted import path"):
        load_object("join")
