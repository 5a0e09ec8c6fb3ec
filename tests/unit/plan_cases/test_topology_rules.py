"""One refusal after another: its code, what it names, and what it proposes."""

import pytest
from planning import FULL, GIB, SpeechPipelineConfig, codes, plan, refusals

from sgl_omni.config.violations import Violation
from sgl_omni.topology.host import Device, Host, cuda_host, virtual_host
from sgl_omni.topology.render import layout_text

TWO_ON_GPU_0 = "processes:\n  engine: {num_replicas: 2, replica_devices: [0, 0]}\n"
TOGETHER = ("--vocoder.gpu", "0")


def only(text: str, *flags: str, **options: object) -> Violation:
    [violation] = refusals(text, *flags, **options)
    return violation


def full(change: str, by: str) -> str:
    assert change in FULL
    return FULL.replace(change, by)


# 1, 14, 15, 16: names, factories and their arguments -----------------------------------------------------------------


def test_a_stage_without_process() -> None:
    violation = only(full("process: pc, ", ""), cls=None)
    assert (violation.code, str(violation.place)) == ("PLAN-001", "f.yaml:5")
    assert violation.hint == "stages.c.process: c"


@pytest.mark.parametrize(
    ("path", "says", "hint"),
    [
        ("dummy.gpu_stag", "defines no 'gpu_stag'", "gpu_stage"),
        ("no_such_module.make", "no module 'no_such_module'", None),
        ("dummy", "no dotted import path", None),
    ],
)
def test_a_factory_that_does_not_exist(path: str, says: str, hint: str | None) -> None:
    violation = only("", "--vocoder.factory_path", path)
    assert violation.code == "PLAN-001"
    assert says in violation.message
    assert hint is None or violation.hint == hint


def test_factory_arguments_are_checked_against_the_signature() -> None:
    violation = only("stages:\n  vocoder:\n    factory: {max_batch: 4}\n")
    assert (violation.code, violation.hint, str(violation.place)) == ("PLAN-016", "max_batch_size", "f.yaml:3")
    assert codes("stages:\n  vocoder:\n    factory: {gpu_id: 1}\n") == ["PLAN-016"]
    assert codes("stages:\n  preprocessing:\n    factory: {anything: 1}\n") == []
    needs = only("", "--preprocessing.factory_path", "dummy.route_first")
    assert "needs 'request_id' and 'output'" in needs.message


@pytest.mark.parametrize("name", ["x@r0", "has space", "coordinator", "n" * 65, "a.b"])
def test_names_that_cannot_be(name: str) -> None:
    assert codes("", "--vocoder.process", name) == ["PLAN-014"]


def test_a_name_that_no_environment_can_hold() -> None:
    violation = only(full("process: pc, ", "process: pc, env: {'B=C': 1}, "), cls=None)
    assert violation.code == "PLAN-015"
    assert "'B=C' cannot be an environment variable" in violation.message


def test_one_process_has_one_environment() -> None:
    text = "stages:\n  preprocessing: {process: engine, env: {A: 1}}\n  tts_engine: {env: {A: 2}}\n"
    violation = only(text)
    assert violation.code == "PLAN-015"
    assert "A=1" in violation.message
    assert "A=2" in violation.message


# 2: the wiring -------------------------------------------------------------------------------------------------------


def graph(*stages: str) -> str:
    return "stages:\n" + "".join(f"  - {{factory_path: dummy.cpu_stage, process: p, {stage}}}\n" for stage in stages)


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        (("name: a, next: b", "name: b, next: c", "name: c, next: b"), "cycle"),
        (("name: a, next: a",), "cycle"),
        (("name: a, next: b", "name: b, terminal: true, stream_to: [a]"), "cycle"),
        (("name: a, next: b", "name: b"), "neither terminal nor has 'next'"),
        (("name: a, next: [b, b]", "name: b, terminal: true"), "twice"),
        (("name: a, next: b, terminal: true", "name: b, terminal: true"), "also has 'next'"),
        (("name: a, stream_to: [z], next: b", "name: b, terminal: true"), "'stream_to' names 'z'"),
        (
            ("name: a, next: [b, c]", "name: b, next: d", "name: c, next: d", "name: d, terminal: true"),
            "does not wait for 'b' and 'c'",
        ),
        (
            (
                "name: a, next: [b, c]",
                "name: b, next: d",
                "name: c, next: d",
                "name: d, terminal: true, wait_for: [b, c]",
            ),
            "no merge_fn",
        ),
        (("name: a, next: b, route_fn: dummy.nothing", "name: b, terminal: true"), "route_fn 'dummy.nothing'"),
    ],
)
def test_wirings_that_cannot_work(stages: tuple[str, ...], says: str) -> None:
    found = refusals(graph(*stages), cls=None)
    assert any(says in violation.message for violation in found), found


def test_a_route_may_join_again_without_waiting() -> None:
    text = graph(
        "name: a, next: [b, c], route_fn: dummy.route_first",
        "name: b, next: d",
        "name: c, next: d",
        "name: d, terminal: true",
    )
    assert codes(text, cls=None) == []


def test_the_entry_is_the_stage_that_nothing_leads_to() -> None:
    text = graph("name: z, terminal: true", "name: a, next: z")
    assert plan(text, cls=None).plan.entry == "a"
    assert "entry_stage 'q' is no stage" in only(text + "entry_stage: q\n", cls=None).message


# 3, 4, 5, 6, 13: placement -------------------------------------------------------------------------------------------


def test_a_process_spans_one_gpu() -> None:
    violation = only("", "--vocoder.process", "engine")
    assert violation.code == "PLAN-003"
    assert "GPU 0 and GPU 1" in violation.message


def test_replica_devices_put_the_stages_of_a_process_together() -> None:
    text = "processes:\n  engine: {num_replicas: 1, replica_devices: [2]}\n"
    assert {i.device for i in plan(text, "--vocoder.process", "engine").plan.instances} == {2, None}


@pytest.mark.parametrize("gpu", ["0", "[0]", "[3, 3]", "[0, 1, 2]", "none"])
def test_a_tp_stage_has_a_gpu_per_rank(gpu: str) -> None:
    flags = ("--tts_engine.tp_size", "2", "--tts_engine.gpu", gpu, "--tts_engine.gpu_memory_fraction", "none")
    assert codes("", *flags) == ["PLAN-004"]


def test_a_tp_stage_owns_its_process_and_its_ranks_names() -> None:
    tp = ("--tts_engine.tp_size", "2", "--tts_engine.gpu", "[2, 3]")
    assert codes("", *tp, "--preprocessing.process", "engine") == ["PLAN-004"]
    assert codes("", *tp, "--preprocessing.process", "engine_tp1") == ["PLAN-004"]
    planned = plan("", *tp, "--tts_engine.process", "none")
    assert [i.name for i in planned.plan.instances] == ["front", "tts_engine_tp0", "tts_engine_tp1", "vocoder"]


@pytest.mark.parametrize(
    ("process", "settings", "says"),
    [
        ("engine", "num_replicas: 2", "no replica_devices"),
        ("engine", "num_replicas: 2, replica_devices: [0]", "needs 2 replica_devices"),
        ("engine", "replica_devices: [0, 1]", "needs 1 replica_devices"),
        ("engine", "replica_devices: []", "not 0"),
        ("front", "num_replicas: 2, replica_devices: [0, 1]", "no GPU stage"),
    ],
)
def test_replica_devices(process: str, settings: str, says: str) -> None:
    violation = only(f"processes:\n  {process}: {{{settings}}}\n")
    assert violation.code == "PLAN-005"
    assert process in violation.message
    assert says in violation.message


def test_ranks_of_one_replica_need_distinct_cards() -> None:
    tp = ("--tts_engine.tp_size", "2", "--tts_engine.gpu", "[2, 3]")
    text = "processes:\n  engine: {num_replicas: 2, replica_devices: [2, 3, 4, 4]}\n"
    assert codes(text, *tp) == ["PLAN-005"]
    twins = cuda_host(8, same_physical=[[2, 3]])
    assert codes("", *tp, host=twins) == ["PLAN-004"]


def test_the_ranks_of_a_tp_stage_are_told_which_they_are() -> None:
    tp = ("--tts_engine.tp_size", "2", "--tts_engine.gpu", "[2, 3]")
    violation = only("", *tp, "--tts_engine.factory_path", "dummy.gpu_stage")
    assert violation.code == "PLAN-004"
    assert "'tts_engine' cannot be tensor-parallel" in violation.message
    assert "tp_size: 1" in str(violation.hint)
    assert codes("", *tp) == []
    assert codes("stages:\n  tts_engine:\n    factory: {shard: 1}\n") == ["PLAN-016"]


def test_a_replicated_gpu_stage_is_told_its_gpu() -> None:
    violation = only(TWO_ON_GPU_0, "--tts_engine.factory_path", "dummy.gpu_stage_without_gpu_id")
    assert violation.code == "PLAN-006"
    assert "tts_engine@r1" in violation.message


def test_gpus_that_the_host_lacks() -> None:
    violation = only("", "--vocoder.gpu", "2", host=cuda_host(2))
    assert (violation.code, violation.hint) == ("PLAN-013", "a GPU id from 0 to 1")
    assert codes("", "--vocoder.gpu", "2", host=cuda_host(None)) == []
    assert codes("", "--vocoder.gpu", "2", host=virtual_host()) == []


# 7, 8: memory --------------------------------------------------------------------------------------------------------


def test_over_budget_lists_who_asks_for_how_much() -> None:
    violation = only(TWO_ON_GPU_0, "--tts_engine.gpu_memory_fraction", "0.45", "--vocoder.gpu", "0")
    assert violation.code == "PLAN-007"
    assert "tts_engine@r0 0.45, tts_engine@r1 0.45 and vocoder 0.2 sum to 1.1" in violation.message


def test_fractions_and_bytes_add_up_on_a_card_of_known_size() -> None:
    flags = ("--vocoder.gpu", "0", "--vocoder.gpu_memory_fraction", "none", "--vocoder.total_reserve_bytes", "60GiB")
    assert codes("", *flags, host=cuda_host(1, 80 * GIB)) == ["PLAN-007"]
    assert codes("", *flags, host=cuda_host(1, 90 * GIB)) == []
    assert plan("", *flags).plan.warnings != ()


def test_the_limit_per_gpu() -> None:
    limit = ("--placement.max_total_gpu_memory_fraction_per_gpu", "0.49")
    assert codes("", "--vocoder.gpu", "0", *limit) == ["PLAN-007"]
    assert codes("", "--vocoder.gpu", "0") == []


def test_colocation_needs_budgets_unless_switched_off() -> None:
    silent = ("--vocoder.gpu", "0", "--vocoder.gpu_memory_fraction", "none")
    off = ("--placement.require_memory_fraction_for_colocation", "false")
    violation = only("", *silent)
    assert violation.code == "PLAN-007"
    assert "'vocoder'" in violation.message
    assert codes("", *silent, *off) == []
    assert "cannot be switched off" in only(TWO_ON_GPU_0, *silent, *off).message


def test_two_ordinals_of_one_card_are_one_card() -> None:
    twins = cuda_host(2, same_physical=[[0, 1]])
    assert codes("", "--vocoder.gpu_memory_fraction", "none", host=twins) == ["PLAN-007"]
    over = only("", "--vocoder.gpu_memory_fraction", "0.8", host=twins)
    assert over.code == "PLAN-007"
    assert over.message.startswith("the card of GPU 0 and GPU 1 is over budget: tts_engine 0.3 and vocoder 0.8")
    assert str(over.place) == "--vocoder.gpu_memory_fraction"
    drawn = layout_text(plan("", host=twins).plan, twins)
    assert "GPU 1 (the card of GPU 0): vocoder" in drawn


def test_what_an_engine_pins_is_held_against_the_card_that_its_replica_lands_on() -> None:
    unequal = Host(devices=(Device(memory_bytes=80 * GIB), Device(memory_bytes=24 * GIB)))
    two = "processes:\n  engine: {num_replicas: 2, replica_devices: [0, 1]}\n"
    pool = ("--tts_engine.engine.kv_cache_bytes", "8GiB", "--vocoder.gpu", "0")
    violation = only(two, *pool, host=unequal)
    assert violation.code == "PLAN-008"
    assert "a KV pool of 8 GiB (engine.kv_cache_bytes) exceeds the stage's budget of 7.2 GiB" in violation.message
    assert codes("", *pool, host=unequal) == []
    static = ("--mem-fraction-static", "0.5", "--tts_engine.gpu_memory_fraction", "none", "--vocoder.gpu", "none")
    static += ("--vocoder.gpu_memory_fraction", "none", "--tts_engine.total_reserve_bytes", "16GiB")
    assert "40 GiB of GPU 0, exceeds the stage's budget of 16 GiB" in only("", *static, host=unequal).message


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (("--preprocessing.gpu_memory_fraction", "0.1"), "PLAN-007"),
        (("--vocoder.total_reserve_bytes", "1GiB"), "PLAN-007"),
        (("--vocoder.gpu_memory_fraction", "none", "--vocoder.enforce_total_reserve", "true"), "PLAN-007"),
        (("--tts_engine.engine.kv_cache_bytes", "1GiB", "--max-total-tokens", "5"), "PLAN-008"),
        (("--tts_engine.engine.kv_cache_bytes", "1GiB", "--mem-fraction-static", "0.1"), "PLAN-008"),
        (("--mem-fraction-static", "0.31"), "PLAN-008"),
        (("--vocoder.engine.page_size", "16"), "PLAN-008"),
        (("--tts_engine.engine.kv_cache_bytes", "25GiB"), "PLAN-008"),
        (("--tts_engine.engine.kv_cache_bytes", "81GiB", "--tts_engine.gpu_memory_fraction", "none"), "PLAN-008"),
    ],
)
def test_memory_settings_that_contradict(flags: tuple[str, ...], code: str) -> None:
    assert codes("", *flags, host=cuda_host(2, 80 * GIB)) == [code]


def test_tokens_cap_a_pool_that_a_fraction_sizes() -> None:
    assert codes("", "--mem-fraction-static", "0.3", "--max-total-tokens", "30000") == []


# 9, 10, 11, 12, 18: edges, sharing, MPS, fusion, cores ---------------------------------------------------------------


def test_state_that_cannot_travel_stays_in_its_process() -> None:
    text = full("process: pa, ", "process: pa, local_output: true, ")
    violation = only(text, cls=None)
    assert violation.code == "PLAN-009"
    assert "'pa' and 'pb'" in violation.message
    assert codes(text.replace("process: pa", "process: pb"), cls=None) == []


SHARED = ("--weight-share", "on", "--max-total-tokens", "1000")


def test_sharing_groups() -> None:
    planned = plan(TWO_ON_GPU_0, *SHARED).plan
    assert [(g.leader, g.followers) for g in planned.sharing_groups] == [("engine@r0", ("engine@r1",))]
    assert planned.spawn_waves == (("front", "engine@r0", "vocoder"), ("engine@r1",))
    assert planned.shutdown_order == (("engine@r1",), ("front", "engine@r0", "vocoder"))
    roles = [(i.name, i.weight_role, i.weight_leader) for i in planned.instances_of("engine")]
    assert roles == [("engine@r0", "leader", None), ("engine@r1", "follower", "engine@r0")]


def test_replicas_alone_on_their_gpu_do_not_share() -> None:
    text = "processes:\n  engine: {num_replicas: 3, replica_devices: [0, 2, 0]}\n"
    assert [i.weight_role for i in plan(text, *SHARED).plan.instances_of("engine")] == ["leader", "own", "follower"]


@pytest.mark.parametrize("variable", ["SGL_OMNI_WEIGHT_SHARE", "SGLANG_OMNI_WEIGHT_SHARE"])
def test_roles_are_not_taken_from_the_environment(variable: str) -> None:
    assert codes(TWO_ON_GPU_0, *SHARED, environ={variable: "leader"}) == ["PLAN-010"]
    assert codes(TWO_ON_GPU_0, *SHARED, f"--tts_engine.env.{variable}", "leader") == ["PLAN-010"]
    assert codes(TWO_ON_GPU_0, f"--tts_engine.env.{variable}", "leader") == codes(TWO_ON_GPU_0)


def test_what_sharing_needs() -> None:
    assert codes(TWO_ON_GPU_0, "--weight-share", "on") == ["PLAN-010"]  # no pinned capacity
    assert codes("", *SHARED) == ["PLAN-010"]  # no replicas
    apart = "processes:\n  engine: {num_replicas: 2, replica_devices: [0, 2]}\n"
    assert codes(apart, *SHARED) == ["PLAN-010"]


WITH_SERVERS = ("--weight-share", "servers", "--max-total-tokens", "1000")
SOCKET = "/run/user/0/sgl-omni/run-1/weights.sock"


def test_one_replica_leads_other_servers() -> None:
    planned = plan("", *WITH_SERVERS).plan
    assert [(g.process, g.device, g.leader, g.followers) for g in planned.sharing_groups] == [
        ("engine", 0, "engine", ())
    ]
    assert {i.name: i.weight_role for i in planned.instances} == {"front": "own", "engine": "leader", "vocoder": "own"}
    assert (planned.lends_weights, planned.weights_from) == (True, None)
    assert planned.spawn_waves == (("front", "engine", "vocoder"),)
    assert planned.warnings == ("weight_share: Process 'vocoder' has no engine stage, so it is not shared",)
    assert "GPU 0: engine leads other servers that borrow them" in layout_text(planned, cuda_host(2))
    within = plan(TWO_ON_GPU_0, *SHARED).plan
    assert not within.lends_weights


def test_replicas_may_have_their_weights_from_another_server() -> None:
    planned = plan(TWO_ON_GPU_0, *WITH_SERVERS, "--weights-from", SOCKET).plan
    roles = [(i.name, i.weight_role, i.weight_leader) for i in planned.instances_of("engine")]
    assert roles == [("engine@r0", "borrower", "engine@r0"), ("engine@r1", "borrower", "engine@r0")]
    assert (planned.lends_weights, planned.weights_from) == (True, SOCKET)
    assert planned.spawn_waves == (("front", "engine@r0", "engine@r1", "vocoder"),), "nobody waits for a leader"
    assert f"GPU 0: engine@r0, engine@r1 as lent at {SOCKET}" in layout_text(planned, cuda_host(2))


def test_what_sharing_with_other_servers_needs() -> None:
    unpinned = only("", "--weight-share", "servers")
    assert unpinned.code == "PLAN-010" and "'tts_engine' of Process 'engine' pins no KV capacity" in unpinned.message
    for mode in ("off", "on"):
        refused = refusals(TWO_ON_GPU_0, *SHARED[2:], "--weight-share", mode, "--weights-from", SOCKET)
        assert [(v.code, v.hint) for v in refused] == [("PLAN-010", "weight_share: servers, or no weights_from")]
    assert codes("", *WITH_SERVERS, environ={"SGLANG_OMNI_WEIGHT_SHARE": "leader"}) == ["PLAN-010"]
    parallel = only("", *WITH_SERVERS, "--tts_engine.tp_size", "2", "--tts_engine.gpu", "0,2", "--vocoder.gpu", "3")
    assert "only tp_size 1 can share" in parallel.message

    class Unknown(SpeechPipelineConfig):
        architectures = ("WritesItsWeights",)

    unlisted = only("", *WITH_SERVERS, cls=Unknown)
    assert unlisted.code == "PLAN-010"
    assert "architecture WritesItsWeights is not on the share-policy list" in unlisted.message


def test_mps_modes() -> None:
    assert plan(TWO_ON_GPU_0, "--mps", "auto").plan.mps == {0: ("engine@r0", "engine@r1")}
    assert plan(TWO_ON_GPU_0, "--mps", "on").plan.mps == {0: ("engine@r0", "engine@r1"), 1: ("vocoder",)}
    assert codes("", "--mps", "on", host=virtual_host()) == ["PLAN-011"]
    assert codes("", "--mps", "on", host=cuda_host(2, mps=False)) == ["PLAN-011"]
    planned = plan(TWO_ON_GPU_0, "--mps", "auto", host=virtual_host()).plan
    assert planned.mps == {}
    assert "no MPS" in planned.warnings[0]


def test_two_ordinals_of_one_card_share_its_mps() -> None:
    twins = cuda_host(2, same_physical=[[0, 1]])
    assert plan("", "--mps", "auto", host=twins).plan.mps == {0: ("engine", "vocoder")}


def test_visibility_belongs_to_mps() -> None:
    assert codes("", "--vocoder.env.CUDA_VISIBLE_DEVICES", "1", "--mps", "auto") == ["PLAN-011"]
    assert codes("", "--vocoder.env.CUDA_VISIBLE_DEVICES", "1") == []


LIMITED = (*TOGETHER, "--processes.engine.mps_thread_percentage", "30")


def test_thread_percentages_go_to_the_clients() -> None:
    planned = plan("", *LIMITED, "--mps", "auto").plan
    assert {i.name: i.mps_thread_percentage for i in planned.instances} == {
        "front": None,
        "engine": 30,
        "vocoder": None,
    }
    assert "[MPS 30% of threads]" in layout_text(planned, cuda_host(2))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (LIMITED, "mps is off"),
        (("--mps", "auto", "--processes.front.mps_thread_percentage", "30"), "no GPU stage"),
        ((*LIMITED, "--mps", "on", "--tts_engine.env.CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "50"), "and so does"),
    ],
)
def test_thread_percentages_that_mean_nothing(flags: tuple[str, ...], says: str) -> None:
    violation = only("", *flags)
    assert violation.code == "PLAN-011"
    assert says in violation.message


def test_a_thread_percentage_is_from_1_to_100() -> None:
    for value in ("0", "101", "2.5", "many"):
        assert codes("", *TOGETHER, "--mps", "on", "--processes.engine.mps_thread_percentage", value) == ["PLAN-023"]


def test_a_thread_percentage_that_mps_does_not_take_is_told() -> None:
    planned = plan("", "--mps", "auto", "--processes.engine.mps_thread_percentage", "30").plan
    assert planned.instance("engine").mps_thread_percentage is None
    assert planned.warnings == ("mps_thread_percentage has no effect on engine, which MPS does not take",)


def test_enforced_budgets_limit_what_mps_gives() -> None:
    host = cuda_host(2, 80 * GIB)
    enforced = (*TOGETHER, "--tts_engine.enforce_total_reserve", "true")
    planned = plan("", *enforced, "--mps", "on", host=host).plan
    assert {i.name: i.mps_memory_limit for i in planned.instances} == {
        "front": None,
        "engine": 24 * GIB,
        "vocoder": None,
    }
    assert "[MPS at most 24 GiB]" in layout_text(planned, host)
    assert plan("", *enforced, host=host).plan.instance("engine").mps_memory_limit is None, "without MPS"
    assert plan("", *enforced, "--mps", "on", host=cuda_host(2)).plan.instance("engine").mps_memory_limit is None
    one = plan("", *enforced, "--vocoder.process", "engine", "--mps", "on", host=host).plan
    assert one.instance("engine").mps_memory_limit == 40 * GIB


def test_fusing_equals_writing_one_process() -> None:
    fused = plan("fused_stages: [[preprocessing, tts_engine]]\n").plan
    assert fused == plan("", "--tts_engine.process", "front").plan
    assert fused.process("front").stages == ("preprocessing", "tts_engine")


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ("[[tts_engine, preprocessing]]", "does not follow"),
        ("[[preprocessing, vocoder]]", "does not follow"),
        ("[[preprocessing]]", "two stages or more"),
        ("[[preprocessing, nobody]]", "no stage 'nobody'"),
        ("[[tts_engine, vocoder]]", "GPU 0 and GPU 1"),
        ("[[preprocessing, tts_engine], [tts_engine, vocoder]]", "more than one place"),
        ("[preprocessing, tts_engine]", "list of lists"),
    ],
)
def test_groups_that_cannot_be_fused(groups: str, says: str) -> None:
    violation = only(f"fused_stages: {groups}\n")
    assert violation.code in ("PLAN-012", "PLAN-023")
    assert says in violation.message


def test_only_a_line_can_be_fused() -> None:
    text = graph("name: a, next: [b, c]", "name: b, terminal: true", "name: c, terminal: true")
    assert "not linear" in only(text + "fused_stages: [[a, b]]\n", cls=None).message


def test_core_sets() -> None:
    two = "processes:\n  front: {num_replicas: 2, cpu_cores: %s}\n"
    planned = plan(two % "['0-2,8', 3-4]").plan
    assert [i.cpu_cores for i in planned.instances_of("front")] == [(0, 1, 2, 8), (3, 4)]
    assert codes(two % "['0-3']") == ["PLAN-018"]
    assert codes(two % "['0-3', '3-4']") == ["PLAN-018"]
    assert codes(two % "['3-0', '4']") == ["PLAN-018"]
    assert codes(two % "['0', '64']", host=cuda_host(2, cpu_count=64)) == ["PLAN-018"]
    assert codes(two % "['0-x', '1']") == ["PLAN-023"]
