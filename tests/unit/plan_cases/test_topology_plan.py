"""What a plan holds, how it is drawn, and how fast it is made."""

import subprocess
import sys

import msgspec
from planning import FULL, GIB, SpeechPipelineConfig, load, plan

from sgl_omni.topology.builder import plan_config
from sgl_omni.topology.host import cuda_host, virtual_host
from sgl_omni.topology.plan import TRANSPORT_BYTES, Plan
from sgl_omni.topology.render import layout_facts, layout_svg, layout_text

REPLICAS = "processes:\n  engine: {num_replicas: 2, replica_devices: [0, 0]}\n"
SHARED = ("--mps", "on", "--weight-share", "on", "--max-total-tokens", "1000")


def test_a_plan_survives_json() -> None:
    made = plan(REPLICAS, *SHARED).plan
    assert msgspec.json.decode(msgspec.json.encode(made), type=Plan) == made


def test_edges_follow_locality() -> None:
    made = plan("", "--preprocessing.process", "engine").plan
    assert [(e.source, e.target, e.kind, e.transport) for e in made.edges] == [
        ("preprocessing", "tts_engine", "payload", "local"),
        ("tts_engine", "vocoder", "payload", "shm"),
        ("tts_engine", "vocoder", "stream", "shm"),
    ]


def test_engine_settings_are_complete_and_budgets_are_bytes_where_the_card_is_known() -> None:
    stage = plan("", "--max-total-tokens", "5", host=virtual_host(4 * GIB)).plan.stage("tts_engine")
    assert stage.engine == {"max_total_tokens": 5, "max_running_requests": 64, "cuda_graph_max_bs": 64}
    assert stage.budget_fraction == 0.3
    assert stage.budget_bytes == int(0.3 * 4 * GIB)
    assert plan("").plan.stage("tts_engine").budget_bytes is None
    assert plan("").plan.stage("vocoder").engine is None


def test_the_environment_of_a_process_is_that_of_its_stages() -> None:
    text = "stages:\n  preprocessing: {process: engine, env: {A: 1}}\n  tts_engine: {env: {A: 1, B: x}}\n"
    assert plan(text).plan.instance("engine").env == {"A": "1", "B": "x"}


def test_unrelated_order_changes_nothing() -> None:
    one = "mps: auto\nstages:\n  vocoder: {gpu: 0}\n  tts_engine: {gpu: 0}\n" + REPLICAS
    other = REPLICAS + "stages:\n  tts_engine: {gpu: 0}\n  vocoder: {gpu: 0}\nmps: auto\n"
    assert plan(one).plan == plan(other).plan


def test_the_layout_names_what_sits_on_each_gpu() -> None:
    made = plan(REPLICAS, *SHARED, host=cuda_host(2, 80 * GIB, mps=True))
    text = layout_text(made.plan, made.host, made.eligible)
    for line in (
        "GPU 0: tts_engine@r0 + tts_engine@r1",
        "60% declared (80 GiB)",
        "[leader, MPS]",
        "tts_engine -> vocoder        shm       payload and stream",
        "engine x 2, round_robin",
        "on: GPU 0: engine@r0, engine@r1; GPU 1: vocoder",
        "auto would take: GPU 0: engine@r0, engine@r1",
        "GPU 0: engine@r0 leads engine@r1",
        "2. engine@r1",
    ):
        assert line in text
    assert "<svg" in layout_svg(made.plan, made.host, made.eligible)
    facts = layout_facts(made.plan, made.host, made.eligible)
    assert facts["gpus"][0]["declared_fraction"] == 0.6
    assert facts["mps"]["auto"] == {"0": ["engine@r0", "engine@r1"]}


def test_a_thousand_stages_of_64_replicas_are_planned() -> None:
    """`benchmarks/plan.py` says how long it takes."""
    count = 1000
    lines = ["stages:"]
    for i in range(count):
        end = f"next: s{i + 1}" if i + 1 < count else "terminal: true"
        fields = f"factory_path: dummy.gpu_stage, process: p{i}, gpu: 0, gpu_memory_fraction: 0.00001, {end}"
        lines.append(f"  - {{name: s{i}, {fields}}}")
    lines.append("processes:")
    lines += [f"  p{i}: {{num_replicas: 64, replica_devices: {list(range(8)) * 8}}}" for i in range(count)]
    resolved = load("\n".join(lines), cls=None)
    made = plan_config(resolved, cuda_host(8, 80 * GIB), {})
    assert len(made.plan.instances) == 64_000


def test_planning_imports_no_torch() -> None:
    script = (
        "import sys, sgl_omni.cli.config as c; c.app(['resolve', '--model-path', 'demo-voice'], standalone_mode=False);"
        "assert not {'torch', 'numpy', 'transformers'} & sys.modules.keys(), 'imported'"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "GPU 0: tts_engine + vocoder" in done.stdout


def test_a_full_list_and_a_class_give_the_same_shape() -> None:
    made = plan(FULL, cls=None).plan
    assert [p.name for p in made.processes] == ["pa", "pb", "pc"]
    assert SpeechPipelineConfig.default_stages["vocoder"]["gpu"] == 1  # resolving leaves the class alone


def test_tensors_stay_on_their_gpu_where_the_receiver_takes_them_there() -> None:
    text = FULL.replace("terminal: true}", "terminal: true, device_input: true}")
    planned = plan(text, cls=None, host=cuda_host(1, 80 * GIB)).plan
    assert {(e.source, e.target): e.transport for e in planned.edges} == {("a", "b"): "shm", ("b", "c"): "cuda_ipc"}
    assert [planned.stage(s).transport_bytes for s in "abc"] == [0, TRANSPORT_BYTES, 0]
    small = plan(text.replace("0.3", "0.01"), cls=None, host=cuda_host(1, 8 * GIB)).plan
    assert small.stage("b").transport_bytes == int(0.01 * 8 * GIB) // 4
    together = plan(text, "--c.process", "pb", cls=None, host=cuda_host(1, 80 * GIB)).plan
    assert together.edges[1].transport == "local" and together.stage("b").transport_bytes == 0
    laptop = plan(text, cls=None, host=virtual_host()).plan
    assert laptop.edges[1].transport == "shm"
    assert plan(FULL, cls=None, host=cuda_host(1, 80 * GIB)).plan.edges[1].transport == "shm"
