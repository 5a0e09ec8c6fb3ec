"""A model's folder is checked before anything starts, and what is wrong is named by file and field."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from sgl_omni.config.schema import PipelineConfig
from sgl_omni.config.tasks import Tasks
from sgl_omni.errors import InvalidRequest, StartupError
from sgl_omni.models.folder import check_folder, find_folder
from sgl_omni.models.registry import PipelineRegistry, tasks_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = {"architectures": ["TinyModel"], "audio": {"rate": 16000}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [], "model": {"type": "BPE"}}')
    save_file({"a": np.zeros(100, np.float32)}, tmp_path / "model.safetensors")
    return tmp_path


def refused(folder: Path, **options: object) -> str:
    with pytest.raises(InvalidRequest) as caught:
        check_folder(folder, ["TinyModel"], **options)  # type: ignore[arg-type]
    return str(caught.value)


def test_a_whole_folder_passes(folder: Path) -> None:
    assert find_folder(str(folder)) == folder
    assert check_folder(folder, ["TinyModel", "Other"], fields=["audio.rate"])["audio"] == {"rate": 16000}


def test_what_is_absent_is_named(folder: Path, tmp_path: Path) -> None:
    assert "config.json lacks the field audio.width" in refused(folder, fields=["audio.rate", "audio.width"])
    assert "codec/model.safetensors is missing" in refused(folder, weights=["", "codec"])
    (folder / "tokenizer.json").unlink()
    assert "tokenizer.json" in refused(folder)
    check_folder(folder, ["TinyModel"], tokenizer=False)
    with pytest.raises(InvalidRequest, match="hf download org/name"):
        find_folder("org/name")
    (folder / "config.json").unlink()
    with pytest.raises(InvalidRequest, match=r"holds no config\.json"):
        find_folder(str(folder))


@pytest.mark.parametrize("text", ["{", "[]", "null", "\udcff"])
def test_a_config_that_is_no_object_is_named(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    assert str(folder / "config.json") in refused(folder)


@pytest.mark.parametrize("found", [["Llama"], [], None, "TinyModel", [1]])
def test_another_architecture_is_named(folder: Path, found: object) -> None:
    (folder / "config.json").write_text(json.dumps({"architectures": found}))
    assert "TinyModel" in refused(folder) and str(found) in refused(folder)


@pytest.mark.parametrize("cut", [0, 4, 20, 200])
def test_a_truncated_file_is_named(folder: Path, cut: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    assert str(file) in refused(folder)


@pytest.mark.parametrize(
    "data", [b"x" * 500, (8).to_bytes(8, "little") + b"[1,2,3] ", (2).to_bytes(8, "little") + b"{}x"]
)
def test_a_file_of_something_else_is_named(folder: Path, data: bytes) -> None:
    (folder / "model.safetensors").write_bytes(data)
    assert str(folder / "model.safetensors") in refused(folder)


def test_shards_are_checked_by_their_index(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    save_file({"a": np.zeros(1, np.float32)}, folder / "one.safetensors")
    assert "two.safetensors is missing" in refused(folder)
    index.write_text("{}")
    assert "weight_map" in refused(folder)


def test_tensors_of_another_type_are_named(folder: Path) -> None:
    check_folder(folder, ["TinyModel"], dtypes=["F32", "BF16"])
    save_file({"a": np.zeros(4, np.float32), "b": np.zeros(4, np.int64)}, folder / "model.safetensors")
    check_folder(folder, ["TinyModel"])
    save_file({"a": np.zeros(4, np.float32), "b": np.zeros(4, np.int8)}, folder / "model.safetensors")
    assert "model.safetensors: b is I8, not one of" in refused(folder)
    assert "model.safetensors: b is I8, not one of BF16, F32" in refused(folder, dtypes=["F32", "BF16"])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"hidden_size": "64"}, "hidden_size is '64', no whole number above 0"),
        ({"text": {"num_hidden_layers": 2.5}}, "text.num_hidden_layers is 2.5"),
        ({"audio": {"d_model": -64}}, "audio.d_model is -64"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x', no number above 0"),
    ],
)
def test_a_size_that_is_no_number_is_named(folder: Path, change: dict[str, object], told: str) -> None:
    config = {"architectures": ["TinyModel"], "head_dim": None, "rope_theta": 10000, **change}
    (folder / "config.json").write_text(json.dumps(config))
    assert f"config.json: {told}" in refused(folder)


def test_a_broken_tokenizer_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": ')
    assert "tokenizer.json cannot be read" in refused(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json", "tokenizer_config.json"])
def test_a_file_that_is_nested_without_end_is_named(folder: Path, name: str) -> None:
    (folder / name).write_text("[" * 100_000)
    assert f"{name} cannot be read" in refused(folder)


def test_tensors_and_an_index_that_are_nested_without_end_are_named(folder: Path) -> None:
    nested = b"[" * 100_000
    (folder / "model.safetensors").write_bytes(len(nested).to_bytes(8, "little") + nested)
    assert "model.safetensors cannot be read as safetensors" in refused(folder)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_bytes(nested)
    assert "model.safetensors.index.json cannot be read" in refused(folder)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (None, "holds no config.json"),
        ("{", "config.json cannot be read"),
        ("[]", "config.json is not a JSON object"),
        ('{"architectures": "Qwen3ForCausalLM"}', "architectures is 'Qwen3ForCausalLM', not a list of names"),
        ('{"architectures": ["Unheard"]}', "its architecture is Unheard"),
    ],
)
def test_why_no_class_serves_a_folder_is_told(tmp_path: Path, config: str | None, told: str) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    registry = PipelineRegistry()
    assert registry.by_model(str(tmp_path)) is None and told in registry.why_unknown(str(tmp_path))


def test_a_folder_that_is_not_there_is_told() -> None:
    assert "there is no such folder" in PipelineRegistry().why_unknown("/nowhere/at/all")
    assert "neither a folder nor a downloaded model" in PipelineRegistry().why_unknown("org/unheard-of.1")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, more than 4096"),
        ({"thinker": {"text": {"num_experts": 5000}}}, "thinker.text.num_experts is 5000, more than"),
        ({"flow": {"depth": 10**6}}, "flow.depth is 1000000, more than"),
    ],
)
def test_parts_without_end_are_refused_before_they_are_counted_out(
    folder: Path, change: dict[str, object], told: str
) -> None:
    (folder / "config.json").write_text(json.dumps({"architectures": ["TinyModel"], **change}))
    assert told in refused(folder)


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"tokenizer.json": '{"model": {}}'}, "tokenizer.json lacks the field added_tokens"),
        ({"tokenizer.json": '{"added_tokens": [], "model": 3}'}, "tokenizer.json: model is no object"),
        ({"tokenizer_config.json": "[1"}, "tokenizer_config.json cannot be read"),
        (
            {
                "tokenizer.json": None,
                "vocab.json": "{}",
                "tokenizer_config.json": '{"tokenizer_class": "Qwen2Tokenizer"}',
            },
            "vocab.json and no merges.txt, which a Qwen2Tokenizer needs",
        ),
        ({"tokenizer.json": None, "vocab.json": '{"a"', "merges.txt": ""}, "vocab.json cannot be read"),
        ({"generation_config.json": "["}, "generation_config.json cannot be read"),
        ({"generation_config.json": '{"temperature": "hot"}'}, "temperature is 'hot', no number"),
        ({"generation_config.json": '{"talker_top_k": true}'}, "talker_top_k is True, no whole number of -1 or more"),
    ],
)
def test_files_beside_the_weights_are_read_before_a_start(
    folder: Path, files: dict[str, str | None], told: str
) -> None:
    for name, text in files.items():
        if text is None:
            (folder / name).unlink()
        else:
            (folder / name).write_text(text)
    assert told in refused(folder)


def test_what_a_family_trips_over_is_told_as_the_files_fault() -> None:
    class Careless(PipelineConfig):
        @classmethod
        def tasks(cls, model_path: str) -> Tasks:
            return {"x": model_path.items()}  # type: ignore[attr-defined,return-value]

    told = (
        r"the files of /m do not fit Careless: AttributeError: 'str' object .*\(test_model_folder.py, line \d+: return"
    )
    with pytest.raises(StartupError, match=told):
        tasks_of(Careless, "/m")
