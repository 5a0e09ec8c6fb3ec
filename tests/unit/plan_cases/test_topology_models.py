"""The shipped pipeline classes: the layouts of their examples, and what may be split."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from planning import GIB, codes, refusals

from sgl_omni.config.load import load_config
from sgl_omni.config.violations import PlanError
from sgl_omni.models.registry import PipelineRegistry
from sgl_omni.runtime.wiring import load_object
from sgl_omni.topology.builder import build_plan, plan_config
from sgl_omni.topology.host import cuda_host
from sgl_omni.topology.plan import Plan
from sgl_omni.topology.render import layout_text

EXAMPLES = Path(__file__).parents[3] / "examples" / "configs"
REGISTRY = PipelineRegistry()
HIGGS = ("tts_frontend: preprocessing, audio_encoder", "pipeline: tts_engine", "vocoder: vocoder")


def planned(example: str | None, *flags: str, model: str | None = None) -> Plan:
    path = EXAMPLES / f"{example}.yaml" if example else None
    return build_plan(load_config(path, flags, registry=REGISTRY, model_path=model), cuda_host(8, 80 * GIB), {})


def gpu_lines(example: str, *flags: str) -> list[str]:
    resolved = load_config(EXAMPLES / f"{example}.yaml", flags, registry=REGISTRY)
    made = plan_config(resolved, cuda_host(8, 80 * GIB), {})
    return [line for line in layout_text(made.plan, made.host).splitlines() if line.startswith("GPU ")]


def processes(plan: Plan) -> tuple[str, ...]:
    return tuple(f"{p.name}: {', '.join(p.stages)}" for p in plan.processes)


def test_replicas_across_gpus() -> None:
    assert gpu_lines("qwen3_omni_speech_replica2") == [
        "GPU 0: image_encoder + audio_encoder + thinker",
        "GPU 1: talker_ar@r0 + code2wav@r0",
        "GPU 2: talker_ar@r1 + code2wav@r1",
    ]


def test_a_tensor_parallel_thinker() -> None:
    assert gpu_lines("qwen3_omni_speech_tp2") == [
        "GPU 0: thinker rank 0",
        "GPU 1: thinker rank 1",
        "GPU 2: image_encoder + audio_encoder + talker_ar + code2wav",
    ]


def test_replicas_on_one_gpu() -> None:
    assert gpu_lines("moss_tts_local_replica2") == ["GPU 0: preprocessing + tts_engine@r0 + tts_engine@r1 + vocoder"]
    plan = planned("moss_tts_local_replica2")
    assert processes(plan) == ("preprocessing: preprocessing", "pipeline: tts_engine", "vocoder: vocoder")
    assert (plan.mps, plan.sharing_groups) == ({}, ())


def test_replicas_on_one_gpu_with_mps_and_weight_sharing() -> None:
    plan = planned("moss_tts_local_replica2", "--mps", "on", "--weight-share", "on")
    assert plan.mps == {0: ("preprocessing", "pipeline@r0", "pipeline@r1", "vocoder")}
    [group] = plan.sharing_groups
    assert (group.leader, group.followers) == ("pipeline@r0", ("pipeline@r1",))
    assert plan.spawn_waves == (("preprocessing", "pipeline@r0", "vocoder"), ("pipeline@r1",))


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--preprocessing.process", "tts_frontend", "--audio_encoder.process", "tts_frontend"),
        ("--vocoder.process", "vocoder"),
        ("--max_running_requests", "96", "--cuda_graph_max_bs", "96"),
    ],
)
def test_the_shipped_topology_of_higgs_and_the_flags_that_write_it_out(flags: tuple[str, ...]) -> None:
    assert processes(planned(None, *flags, model="bosonai/higgs-tts-3-4b")) == HIGGS


@pytest.mark.parametrize("name", REGISTRY.names())
def test_a_vocoder_can_be_put_anywhere_where_there_is_one(name: str) -> None:
    cls = REGISTRY.by_name(name)
    last = list(cls.default_stages)[-1]
    plan = planned(None, f"--{last}.process", "apart", model=cls.model_ids[0])
    assert plan.stage(last).process == "apart"


def test_engine_flags_name_the_engines_where_there_are_two() -> None:
    with pytest.raises(PlanError, match="more than one engine stage: thinker, talker_ar"):
        planned("qwen3_omni_speech_replica2", "--max_running_requests", "8")
    plan = planned("qwen3_omni_speech_replica2", "--thinker.engine.max_running_requests", "8")
    engine = plan.stage("thinker").engine
    assert engine is not None
    assert engine["max_running_requests"] == 8


def test_what_cannot_leave_its_process() -> None:
    qwen, ming = (REGISTRY.by_name(name) for name in ("Qwen3TTSPipelineConfig", "MingOmniTTSPipelineConfig"))
    apart = ("--preprocessing.process", "front")
    assert codes("model_path: m", *apart, cls=qwen) == ["PLAN-009"]
    assert codes("model_path: m", *apart, cls=ming) == []
    [violation] = refusals("model_path: m", *apart, cls=qwen)
    assert (str(violation.place), violation.hint) == (
        "--preprocessing.process",
        "stages.preprocessing.process: pipeline",
    )


def test_replicas_placed_by_hand_need_budgets_although_the_class_switches_the_check_off() -> None:
    cls = REGISTRY.by_name("Qwen3OmniSpeechPipelineConfig")
    both = "{num_replicas: 2, replica_devices: [1, 2]}"
    assert codes("model_path: m", cls=cls) == []
    replicas = f"model_path: m\nprocesses:\n  talker_ar: {both}\n  code2wav: {both}"
    assert codes(replicas, cls=cls) == ["PLAN-007", "PLAN-007"]
    assert codes("model_path: m\nplacement: {require_memory_fraction_for_colocation: true}", cls=cls) == [
        "PLAN-007",
        "PLAN-007",
    ]


def test_a_model_path_that_no_file_can_have() -> None:
    with pytest.raises(PlanError, match=r"PLAN-027 --model-path: model_path '9+\.\.\. cannot be looked at: File name"):
        planned("demo_voice", model="9" * 5000)


@pytest.mark.parametrize("name", REGISTRY.names())
def test_model_ids_and_architectures_lead_to_their_class(name: str, tmp_path: Path) -> None:
    cls = REGISTRY.by_name(name)
    for model in cls.model_ids:
        assert REGISTRY.by_model(model) is cls
    for architecture in cls.architectures:
        (tmp_path / "config.json").write_text(f'{{"architectures": ["{architecture}"]}}')
        assert REGISTRY.by_model(str(tmp_path)) is cls


@pytest.mark.parametrize("name", REGISTRY.names())
def test_every_function_that_a_class_names_is_there(name: str) -> None:
    for stage in REGISTRY.by_name(name).default_stages.values():
        for path in (stage[key] for key in ("factory_path", "route_fn", "merge_fn") if key in stage):
            assert callable(load_object(path))


def test_serve_prints_one_line_and_exits_1() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "sgl_omni.cli.main",
            "serve",
            "--config",
            f"{EXAMPLES}/higgs_tts.yaml",
            "--port",
            "8091",
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: model_path 'bosonai/higgs-tts-3-4b' is neither a folder nor a downloaded model")
    assert "Traceback" not in done.stderr


def test_pipeline_classes_import_no_torch() -> None:
    modules = [importlib.import_module(REGISTRY.by_name(name).__module__).__name__ for name in REGISTRY.names()]
    code = f"import sys, {', '.join(modules)}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_the_key_a_fused_pipeline_is_what_it_was() -> None:
    cls = REGISTRY.by_name("MingOmniTTSPipelineConfig")
    shipped = planned(None, "--name", "ming-omni-tts", model=cls.model_ids[0])
    assert processes(planned("ming_omni_tts")) == (
        "preprocessing: preprocessing, reference_encoder",
        "pipeline: tts_engine",
        "vocoder: vocoder",
    )
    assert planned("ming_omni_tts", "--fused_stages", "none") == shipped
