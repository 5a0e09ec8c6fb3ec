"""Class, file and flags laid over each other; what is refused, and where it says so."""

import pytest
from planning import FULL, codes, load, plan, refusals

from sgl_omni.config.load import load_config
from sgl_omni.config.violations import PlanError
from sgl_omni.models.registry import PipelineRegistry


def test_class_then_file_then_flag() -> None:
    text = "stages:\n  vocoder: {gpu: 2}\n"
    assert load("").config.stages["vocoder"].gpu == (1,)
    assert load(text).config.stages["vocoder"].gpu == (2,)
    assert load(text, "--vocoder.gpu", "3").config.stages["vocoder"].gpu == (3,)


def test_each_value_says_where_it_came_from() -> None:
    resolved = load("stages:\n  vocoder:\n    gpu: 2\n", "--tts-engine.gpu=4")
    assert str(resolved.value_origin("stages", "vocoder", "gpu")) == "f.yaml:3"
    assert str(resolved.value_origin("stages", "tts_engine", "gpu")) == "--tts-engine.gpu"
    assert str(resolved.value_origin("stages", "vocoder", "process")) == "default of SpeechPipelineConfig"
    assert str(resolved.value_origin("stages", "vocoder", "tp_size")) == "default"


def test_null_and_none_take_a_default_away() -> None:
    text = "stages:\n  vocoder: {gpu_memory_fraction: null}\n"
    assert load(text).config.stages["vocoder"].gpu_memory_fraction is None
    assert load("", "--vocoder.gpu_memory_fraction", "none").config.stages["vocoder"].gpu_memory_fraction is None
    assert load("stages:\n  vocoder:\n").config.stages["vocoder"].gpu == (1,)


@pytest.mark.parametrize(
    ("value", "problem"),
    [("true", "true"), ("2.0", "2.0"), ("two", "two"), ("0", "from 1 to 256"), ("[2]", "[2]"), ("'2.5'", "2.5")],
)
def test_a_count_takes_whole_numbers_only(value: str, problem: str) -> None:
    text = f"processes:\n  front: {{num_replicas: {value}}}\n"
    [violation] = refusals(text)
    assert violation.code == "PLAN-023"
    assert "processes.front.num_replicas" in violation.message
    assert problem.lower() in violation.message.lower()


def test_numeral_text_is_a_number() -> None:
    resolved = load("processes:\n  front: {num_replicas: '2'}\nstages:\n  vocoder: {gpu_memory_fraction: '0.5'}\n")
    assert resolved.config.processes["front"].num_replicas == 2
    assert resolved.config.stages["vocoder"].gpu_memory_fraction == 0.5


@pytest.mark.parametrize("size", ["1.5GiB", "4GB", "4 GiB", "4gib", "0", "-1", "true", "0GiB"])
def test_sizes_are_exact(size: str) -> None:
    assert codes(f"stages:\n  vocoder: {{gpu_memory_fraction: null, total_reserve_bytes: {size}}}\n") == ["PLAN-023"]


def test_unknown_keys_are_refused_with_the_nearest() -> None:
    [violation] = refusals("stages:\n  vocoder:\n    gpus: 1\n")
    assert (violation.code, str(violation.place), violation.hint) == ("PLAN-022", "f.yaml:3", "gpu")
    [violation] = refusals("stage: {}\n")
    assert (violation.code, violation.hint) == ("PLAN-022", "stages")
    [violation] = refusals("stages:\n  tts_engine: {max_total_tokens: 5}\n")
    assert violation.hint == "stages.tts_engine.engine.max_total_tokens"
    [violation] = refusals("stages:\n  vocodr: {gpu: 1}\n")
    assert (violation.code, violation.hint) == ("PLAN-001", "vocoder")


def test_the_wiring_belongs_to_the_class() -> None:
    [violation] = refusals("stages:\n  vocoder: {terminal: false}\n")
    assert violation.code == "PLAN-022"
    assert "SpeechPipelineConfig" in violation.message


def test_everything_wrong_is_reported_at_once() -> None:
    text = """
    stages:
      vocoder: {gpu: -1}
      tts_engine: {gpus: 1, engine: {kv_cache_bytes: 1GiB, max_total_tokens: 10}}
    processes:
      motor: {num_replicas: 2}
      front: {num_replicas: 2.0}
    mps: always
    """
    assert codes(text) == ["PLAN-001", "PLAN-008", "PLAN-022", "PLAN-023", "PLAN-023", "PLAN-023"]


def test_a_value_that_cannot_be_read_is_not_blamed_twice() -> None:
    assert codes("stages:\n  vocoder: {gpu: x}\n") == ["PLAN-023"]
    assert codes("stages:\n  vocoder: {process: 5}\n") == ["PLAN-023"]


def test_bare_on_and_off_are_words() -> None:
    assert load("mps: on").config.mps == "on"
    assert load("weight_share: off").config.weight_share == "off"


def test_a_full_list_of_stages_needs_no_class() -> None:
    resolved = load(FULL, cls=None)
    assert list(resolved.config.stages) == ["a", "b", "c"]
    assert resolved.engine_stages == ("b",)
    assert plan(FULL, cls=None).plan.entry == "a"


def test_list_entries_need_distinct_names() -> None:
    text = "stages:\n  - {factory_path: dummy.cpu_stage}\n  - {name: a}\n  - {name: a}\n"
    assert {"PLAN-023", "PLAN-021"} <= set(codes(text, cls=None))


def test_a_class_takes_stages_as_a_mapping() -> None:
    [violation] = refusals("stages:\n  - {name: vocoder, gpu: 2}\n")
    assert "mapping" in (violation.hint or "")


def test_the_class_follows_from_the_model() -> None:
    resolved = load_config(None, registry=PipelineRegistry(), model_path="demo-voice")
    assert resolved.class_name == "DemoVoicePipelineConfig"
    assert resolved.model_path is not None
    folder = load_config(None, registry=PipelineRegistry(), model_path=resolved.model_path)
    assert folder.class_name == "DemoVoicePipelineConfig"  # by the architecture in its config.json


def test_a_class_may_be_an_import_path() -> None:
    assert load("config_cls: planning.SpeechPipelineConfig\n", cls=None).class_name == "SpeechPipelineConfig"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("config_cls: DemoVoicePipelineConfg", "unknown pipeline class"),
        ("config_cls: no.such.Class", "cannot be imported"),
        ("config_cls: planning.GIB", "is no pipeline class"),
        ("config_cls: 5", "must be the name"),
        ("name: x", "there is no pipeline"),
        ("model_path: nobody/nothing", "no pipeline class serves"),
        ("- 1", "a mapping"),
    ],
)
def test_without_a_pipeline_there_is_nothing_to_plan(text: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        load(text, cls=None)


def test_a_file_that_is_not_there(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(PlanError, match="cannot read"):
        load_config(tmp_path / "none.yaml", registry=PipelineRegistry())
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    with pytest.raises(PlanError, match="not UTF-8"):
        load_config(tmp_path / "latin.yaml", registry=PipelineRegistry())


@pytest.mark.parametrize(("written", "quoted"), [("true", "true"), ("2.0", "2.0"), ("two", "'two'"), ("[1]", "[1]")])
def test_a_refused_value_is_quoted_as_it_is_written(written: str, quoted: str) -> None:
    [violation] = refusals(f"processes:\n  engine: {{num_replicas: {written}}}")
    assert violation.message == f"'processes.engine.num_replicas' must be a whole number, not {quoted}"


@pytest.mark.parametrize("number", ["257", "100000", "999999999999999999"])
@pytest.mark.parametrize("key", ["processes.front.num_replicas", "stages.vocoder.tp_size"])
def test_a_number_of_processes_that_no_host_has_is_refused(key: str, number: str) -> None:
    section, name, leaf = key.split(".")
    [violation] = refusals(f"{section}:\n  {name}:\n    {leaf}: {number}\n")
    assert (violation.code, str(violation.place)) == ("PLAN-023", "f.yaml:3")
    assert f"must be a whole number from 1 to 256, not {number}" in violation.message


def test_as_many_replicas_as_there_may_be() -> None:
    processes = plan("processes:\n  front: {num_replicas: 256}\n").plan.processes
    assert [p.num_replicas for p in processes if p.name == "front"] == [256]
