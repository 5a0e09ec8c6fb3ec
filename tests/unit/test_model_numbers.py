"""A number in a model's JSON files that is none, or none that can be, is told by file and field before a start."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from benchmarks.real_size import CONFIGS as REAL_SIZES
from tiny_checkpoints import BUILDERS

from sgl_omni.engine.headers import read_headers
from sgl_omni.errors import InvalidRequest, StartupError
from sgl_omni.models import folder as models_folder
from sgl_omni.models import tokens
from sgl_omni.models.fields import check_kinds
from sgl_omni.models.numbers import check_id, check_numbers
from sgl_omni.models.registry import PipelineRegistry, tasks_of
from sgl_omni.text.template import try_template

ABSENT = object()
VALUES = (0, -1, "x", None, 1e30, [], ABSENT)
FILES = ("config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json")
Place = tuple[str | int, ...]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    """Of all numbers, all lists of numbers, and the first number of each."""
    if is_number(value):
        yield at
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from places(part, (*at, name))
    elif isinstance(value, list) and value and all(map(is_number, value)):
        yield from (at, (*at, 0))
    elif isinstance(value, list):
        for i, part in enumerate(value):
            yield from places(part, (*at, i))


def with_value(config: Any, at: Place, value: Any) -> str:
    changed = within = copy.deepcopy(config)
    *path, last = at
    for part in path:
        within = within[part]
    if value is ABSENT:
        del within[last]
    else:
        within[last] = value
    return json.dumps(changed)


def told(folder: Path) -> str:
    """What a start with the folder says; nothing where it has nothing against it."""
    cls = PipelineRegistry().by_model(str(folder))
    assert cls is not None
    try:
        tasks_of(cls, str(folder))
    except StartupError as error:
        return str(error)
    return ""


def names(message: str, folder: Path, file: Path, at: Place, value: Any) -> bool:
    """Whether a message names file and field. A value that says "none of these", as null, 0 and [] may, or is left to a
    default, makes a model of other shapes: then its file and tensors, or the config that it does not fit, are told."""
    if " do not fit " in message:
        return False
    field = next(part for part in reversed(at) if isinstance(part, str))
    if str(file) in message and field in message:
        return True
    other = any(part in message for part in (".safetensors: ", ": missing: ", "config.json"))
    return str(folder) in message and other and "None" not in message and (value is ABSENT or value in (None, 0, []))


@pytest.fixture(autouse=True)
def _weights_and_templates_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models_folder, "read_headers", cache(read_headers))
    tried = cache(try_template)
    monkeypatch.setattr(tokens, "try_template", lambda folder, messages, is_needed: tried(folder))


@pytest.mark.parametrize("family", BUILDERS)
def test_whatever_stands_in_place_of_a_number_is_told_by_file_and_field(
    family: str, built: Callable[[str], Path]
) -> None:
    folder = built(family)
    files = sorted(file for file in folder.rglob("*.json") if file.name in FILES)
    tried, refused, unnamed = 0, 0, []
    for file in files:
        text = file.read_text()
        config = json.loads(text)
        for at in places(config):
            for value in VALUES:
                file.write_text(with_value(config, at, value))
                message = told(folder)
                tried, refused = tried + 1, refused + bool(message)
                if message and not names(message, folder, file, at, value):
                    unnamed.append((file.name, at, value, message))
        file.write_text(text)
    assert not unnamed
    assert told(folder) == ""
    assert refused > tried / 4  # that a good half of the numbers is not read at all is as published


CODECS = {
    "csm": ("config.json", "codec_config."),
    "demo_voice": ("codec/config.json", ""),
    "higgs_v2": ("audio_tokenizer/config.json", ""),
    "moss": ("codec/config.json", ""),
    "qwen3_omni": ("config.json", "code2wav_config."),
    "qwen3_tts": ("speech_tokenizer/config.json", "encoder_config."),
}
FIELDS = {
    "csm": ("sampling_rate", "sliding_window", "upsampling_ratios", "compress", "kernel_size"),
    "demo_voice": ("sampling_rate", "samples_per_frame", "upsample", "hop_length", "dim"),
    "higgs_v2": ("sample_rate", "semantic_sample_rate", "downsample_factor", "strides", "codebook_size"),
    "moss": ("sampling_rate", "downsample_rate", "encoder_kwargs.1.num_heads", "decoder_kwargs.0.num_layers"),
    "qwen3_omni": ("sliding_window", "upsample_rates", "codebook_size", "decoder_dim"),
    "qwen3_tts": ("sampling_rate", "frame_rate", "upsampling_ratios", "num_filters", "upsample_groups"),
}


@pytest.mark.parametrize("family", CODECS)
@pytest.mark.parametrize("value", [0, -1, "x", [], 1e30])
def test_no_rate_stride_or_width_of_a_codec_is_taken_as_it_comes(
    family: str, value: Any, built: Callable[[str], Path]
) -> None:
    """Those that the weights' shapes do not show as well: a stage would divide by them."""
    name, within = CODECS[family]
    file = built(family) / name
    text = file.read_text()
    for field in FIELDS[family]:
        at = [int(part) if part.isdecimal() else part for part in (within + field).split(".")]
        file.write_text(with_value(json.loads(text), tuple(at), value))
        message = told(built(family))
        file.write_text(text)
        assert message.startswith(f"{file}: {within}{field} is {value!r}, ")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"hop_length": True}, "hop_length is True, no whole number above 0"),
        ({"rate": {"sampling_rate": 24000.5}}, "rate.sampling_rate is 24000.5, no whole number of 4000 or more"),
        ({"output_sample_rate": 7}, "output_sample_rate is 7, no whole number of 4000 or more"),
        ({"hidden_size": {}}, "hidden_size is {}, no whole number above 0"),
        ({"padding_value": "x"}, "padding_value is 'x', no number"),
        ({"layers": [{"num_heads": 0}]}, "layers.0.num_heads is 0, no whole number above 0"),
        ({"strides": [2, 0]}, "strides.1 is 0, no whole number above 0"),
        ({"strides": 2}, "strides is 2, no list of numbers"),
        ({"strides": []}, "strides is [], no list of numbers"),
        ({"channel_ratios": [1, "x"]}, "channel_ratios.1 is 'x', no number above 0"),
        ({"rope_theta": float("nan")}, "rope_theta is nan, no number above 0"),
        ({"rope_theta": float("inf")}, "rope_theta is inf, more than"),
        ({"sampling_rate": 1 << 50}, "sampling_rate is 1125899906842624, more than 192000"),
        ({"hop_length": 1 << 50}, "hop_length is 1125899906842624, more than 1.09951e+12"),
        ({"sampling_rate": None}, "sampling_rate is null, no number"),
        ({"codec_config": {"compress": None}}, "codec_config.compress is null, no number"),
        ({"talker_top_k": -2}, "talker_top_k is -2, no whole number of -1 or more"),
        ({"top_p": 0}, "top_p is 0, no number above 0 and at most 1"),
        ({"subtalker_top_p": 7.0}, "subtalker_top_p is 7.0, more than 1"),
        ({"n_vq": 5000}, "n_vq is 5000, more than 4096"),
    ],
)
def test_the_first_number_that_cannot_be_is_named(config: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_numbers(config, Path("/m/config.json"))
    assert str(caught.value).startswith(f"/m/config.json: {said}")


@pytest.mark.parametrize("family", REAL_SIZES)
def test_what_published_checkpoints_say_passes(family: str) -> None:
    for path, config in REAL_SIZES[family](None, False).items():
        check_numbers(config, Path(path))
        check_kinds(config, Path(path))


@pytest.mark.parametrize(
    "name",
    [
        *("Qwen3Config", "Qwen3MoeConfig", "Qwen2Config", "LlamaConfig", "MistralConfig", "Qwen3OmniMoeConfig"),
        *("WhisperConfig", "CsmConfig", "MimiConfig", "DacConfig", "HubertConfig", "HiggsAudioV2Config"),
        *("HiggsAudioV2TokenizerConfig", "GenerationConfig"),
    ],
)
def test_what_transformers_writes_by_default_passes(name: str) -> None:
    import transformers

    config = json.loads(getattr(transformers, name)().to_json_string(use_diff=False))
    assert len(config) > 10
    check_numbers(config, Path("config.json"))
    check_kinds(config, Path("config.json"))


def test_what_may_be_null_empty_or_unknown_passes() -> None:
    codec = {"frame_rate": None, "temperature": None, "top_k": None}
    config = {"head_dim": None, "sliding_window": None, "codec_config": codec, "compress": None, "max_length": 0}
    others = {"mlp_only_layers": [], "deepstack_visual_indexes": [], "top_k": -1, "anything": -5, "x": [[], "y"]}
    check_numbers({**config, **others, "audio_tokenizer_config": {"patch_size": -1}}, Path("config.json"))


@pytest.mark.parametrize("value", [-1, 10, 1.0, "x", True])
def test_an_id_lies_within_its_vocabulary(value: Any) -> None:
    check_id(9, "spk_id.eric", Path("config.json"), 10)
    with pytest.raises(InvalidRequest, match=r"config\.json: spk_id\.eric is "):
        check_id(value, "spk_id.eric", Path("config.json"), 10)
