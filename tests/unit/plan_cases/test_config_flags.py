"""Dotted flags."""

from typing import Any, ClassVar

import pytest
from planning import SpeechPipelineConfig, load, refusals


class TwoEngines(SpeechPipelineConfig):
    engine_stages: ClassVar[tuple[str, ...]] = ("tts_engine", "vocoder")


class NoEngine(SpeechPipelineConfig):
    engine_stages: ClassVar[tuple[str, ...]] = ()


def stage(name: str, *flags: str, **options: Any) -> Any:
    resolved = load("", *flags, **options)
    assert resolved.violations == ()
    return resolved.config.stages[name]


@pytest.mark.parametrize(
    "flags",
    [
        ("--tts_engine.engine.max_total_tokens", "30000"),
        ("--tts-engine.engine.max-total-tokens=30000",),
        ("--stages.tts_engine.engine.max_total_tokens", "30000"),
        ("--max-total-tokens", "30000"),
        ("--max_total_tokens=30000",),
    ],
)
def test_the_ways_to_write_one_key(flags: tuple[str, ...]) -> None:
    assert stage("tts_engine", *flags).engine.max_total_tokens == 30000


def test_an_explicit_path_beats_a_broadcast_in_any_order() -> None:
    explicit, broadcast = ("--tts_engine.engine.max_total_tokens", "1"), ("--max-total-tokens", "2")
    assert stage("tts_engine", *explicit, *broadcast).engine.max_total_tokens == 1
    assert stage("tts_engine", *broadcast, *explicit).engine.max_total_tokens == 1


def test_a_bare_engine_flag_needs_exactly_one_engine() -> None:
    [violation] = refusals("", "--max-total-tokens", "5", cls=TwoEngines)
    assert violation.code == "PLAN-025"
    assert "tts_engine, vocoder" in violation.message
    assert "--tts_engine.engine.max_total_tokens VALUE" in (violation.hint or "")
    [violation] = refusals("", "--max-total-tokens", "5", cls=NoEngine)
    assert "no engine stage" in violation.message


def test_the_same_leaf_twice() -> None:
    assert stage("vocoder", "--vocoder.gpu", "3", "--stages.vocoder.gpu=3").gpu == (3,)
    [violation] = refusals("", "--vocoder.gpu", "3", "--vocoder.gpu", "4")
    assert violation.code == "PLAN-026"
    assert "'3'" in violation.message
    assert "'4'" in violation.message


def test_lists_processes_and_pipeline_keys() -> None:
    flags = ("--processes.engine.num_replicas", "2", "--processes.engine.replica_devices", "2,3", "--mps", "auto")
    config = load(
        "",
        *flags,
        "--processes.engine.cpu-cores",
        "0-3 4-7",
        "--placement.max_total_gpu_memory_fraction_per_gpu",
        "0.9",
    ).config
    assert config.processes["engine"].replica_devices == (2, 3)
    assert config.processes["engine"].cpu_cores == ("0-3", "4-7")
    assert config.mps == "auto"
    assert config.placement.max_total_gpu_memory_fraction_per_gpu == 0.9
    assert load("", "--tts_engine.gpu", "[4, 5]").config.stages["tts_engine"].gpu == (4, 5)


def test_factory_arguments_are_read_like_yaml() -> None:
    factory = stage("vocoder", "--vocoder.factory.max_batch_size", "4", "--vocoder.factory.device", "cuda").factory
    assert factory == {"max_batch_size": 4, "device": "cuda"}


def test_a_process_that_another_flag_makes() -> None:
    config = load("", "--vocoder.process", "late", "--processes.late.num_replicas", "1").config
    assert config.processes["late"].num_replicas == 1


@pytest.mark.parametrize(
    ("flags", "says", "hint"),
    [
        (("--vocoder.gpus", "1"), "no key 'stages.vocoder.gpus'", "gpu"),
        (("--vocodr.gpu", "1"), "no stage 'vocodr'", "vocoder"),
        (("--processes.motor.num_replicas", "1"), "no Process 'motor'", None),
        (("--vocoder.factory", "3"), "names the group", "--vocoder.factory.<name> VALUE"),
        (("--vocoder", "3"), "unknown flag", "--vocoder.<key> VALUE, as in --vocoder.process vocoder"),
        (("--engine", "3"), "unknown flag", "--processes.engine.<key> VALUE, as in --processes.engine.num_replicas 2"),
        (("--num-replicas", "3"), "unknown flag", "--processes.<process>.num_replicas VALUE"),
        (("--gpu", "3"), "unknown flag", "--<stage>.gpu VALUE"),
        (("--engine.num_replicas", "3"), "no stage 'engine'", "--processes.engine.num_replicas VALUE"),
        (("--mps",), "has no value", "--mps off or auto or on"),
        (("--vocoder.gpu",), "has no value", "--vocoder.gpu VALUE"),
        (("--vocoder.gpu", "--mps", "off"), "has no value", None),
        (("stray",), "unexpected argument", None),
        (("--weight-shar", "on"), "unknown flag", "weight_share"),
        (("--vocoder.gpu", "-1"), "not '-1'", None),
        (("--tts_engine.tp_size", "2.0"), "not '2.0'", None),
        (("--tts_engine.factory.x", "[1"), "not YAML", None),
    ],
)
def test_refusals(flags: tuple[str, ...], says: str, hint: str | None) -> None:
    [violation] = refusals("", *flags)
    assert says in str(violation)
    assert violation.code in ("PLAN-023", "PLAN-025")
    if hint is not None:
        assert violation.hint == hint
