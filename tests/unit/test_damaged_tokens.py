"""What a family's prompts need of a tokenizer, and fields that are no numbers, are looked at before a start."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from tiny_checkpoints import BUILDERS

from sgl_omni.errors import InvalidRequest, StartupError
from sgl_omni.models.fields import check_kinds
from sgl_omni.models.registry import PipelineRegistry, tasks_of
from sgl_omni.text.tokenizer import TextTokenizer
from sgl_omni.text.vocabulary import read_merges, read_vocabulary

FAR = 1 << 20
"""No vocabulary has that many."""
SETTINGS = "tokenizer_config.json"

TOKENS = {
    "csm": ["<|end_of_text|>"],
    "higgs_v2": ["<|AUDIO_OUT|>", "<|audio_out_bos|>", "<|reserved_special_token_6|>"],
    "higgs_v3": ["<|tts|>", "<|ref_audio|>", "<|text|>", "<|audio|>"],
    "ming": ["<audio>", "<|endoftext|>", "<|vision_start|>", "<|vision_pad|>"],
    "ming_experts": ["<audio>", "<|endoftext|>", "<spk>", "<audioPatch>"],
    "moss": ["<|im_start|>", "<|im_end|>"],
    "qwen3_asr": ["<|im_start|>", "<|im_end|>", "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>", "<asr_text>"],
    "qwen3_asr_new": ["<|audio_pad|>", "<asr_text>"],
    "qwen3_omni": ["<|im_start|>", "<|im_end|>", "user", "assistant", "<|audio_pad|>", "<|image_pad|>"],
    "qwen3_tts": ["<|im_start|>", "<|im_end|>"],
    "whisper": ["<|startoftranscript|>", "<|endoftext|>"],
}
IDS = {
    "csm": ["audio_token_id", "audio_eos_token_id", "bos_token_id"],
    "higgs_v2": ["audio_token_id", "audio_delay_token_id", "audio_bos_token_id"],
    "moss": ["im_start_token_id", "audio_start_token_id", "audio_end_token_id", "audio_assistant_gen_slot_token_id"],
    "qwen3_asr": ["thinker_config.audio_token_id"],
    "qwen3_asr_new": ["audio_token_id", "eos_token_id"],
    "qwen3_omni": [
        *("im_start_token_id", "user_token_id", "tts_pad_token_id", "thinker_config.image_token_id"),
        *("talker_config.codec_bos_id", "talker_config.codec_eos_token_id", "talker_config.speaker_id.Ethan"),
    ],
    "qwen3_tts": ["tts_bos_token_id", "talker_config.codec_bos_id", "talker_config.codec_think_id"],
    "text_llm": ["eos_token_id"],
    "whisper": ["eos_token_id", "decoder_start_token_id"],
}


@pytest.fixture
def copied(built: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda family: Path(shutil.copytree(built(family), tmp_path / family))


def start(folder: Path) -> None:
    cls = PipelineRegistry().by_model(str(folder))
    assert cls is not None
    tasks_of(cls, str(folder))


def told(folder: Path) -> str:
    with pytest.raises(StartupError) as caught:
        start(folder)
    assert "\n" not in str(caught.value) and " do not fit " not in str(caught.value)
    return str(caught.value)


def change(file: Path, **fields: Any) -> None:
    """Gives dotted fields other values."""
    config = json.loads(file.read_text())
    for field, value in fields.items():
        *path, last = field.split(".")
        within = config
        for part in path:
            within = within[part]
        within[last] = value
    file.write_text(json.dumps(config))


def rename(folder: Path, token: str, other: str) -> None:
    """In all files of a tokenizer."""
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json"):
        if (folder / name).is_file():
            text = (folder / name).read_text()
            (folder / name).write_text(text.replace(json.dumps(token), json.dumps(other)))


def move(folder: Path, token: str, id: int) -> None:
    file = folder / "tokenizer.json"
    if not file.is_file():  # a tokenizer of two files, which adds its tokens in a third
        config = json.loads((folder / "tokenizer_config.json").read_text())
        found = config["added_tokens_decoder"]
        old = next(key for key, each in found.items() if each["content"] == token)
        found[str(id)] = found.pop(old)
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return
    found = json.loads(file.read_text())
    next(each for each in found["added_tokens"] if each["content"] == token)["id"] = id
    file.write_text(json.dumps(found))


def tokenizer_file(folder: Path) -> Path:
    return folder / ("tokenizer.json" if (folder / "tokenizer.json").is_file() else "vocab.json")


@pytest.mark.parametrize(("family", "token"), [(family, token) for family, all in TOKENS.items() for token in all])
def test_a_token_that_a_prompt_needs_is_there_and_has_an_embedding(
    family: str, token: str, copied: Callable[[str], Path]
) -> None:
    folder = copied(family)
    start(folder)
    move(folder, token, FAR)
    assert f"{tokenizer_file(folder)}: {token!r} has the id {FAR}, and the model's " in told(folder)
    rename(folder, token, "<|another|>")
    assert f"{tokenizer_file(folder)} lacks the token {token!r}, which this model's prompts need" in told(folder)


@pytest.mark.parametrize(("family", "field"), [(family, field) for family, all in IDS.items() for field in all])
def test_an_id_lies_within_the_vocabulary_that_it_is_of(family: str, field: str, copied: Callable[[str], Path]) -> None:
    folder = copied(family)
    change(folder / "config.json", **{field: FAR})
    assert f"{folder / 'config.json'}: {field} is {FAR}" in told(folder)


@pytest.mark.parametrize(
    ("family", "field", "token"),
    [
        ("higgs_v2", "audio_token_id", "<|AUDIO_OUT|>"),
        ("moss", "im_end_token_id", "<|im_end|>"),
        ("qwen3_asr", "thinker_config.audio_token_id", "<|audio_pad|>"),
        ("qwen3_omni", "assistant_token_id", "assistant"),
        ("qwen3_omni", "thinker_config.video_token_id", "<|video_pad|>"),
        ("qwen3_tts", "im_start_token_id", "<|im_start|>"),
        ("whisper", "decoder_start_token_id", "<|startoftranscript|>"),
    ],
)
def test_config_and_tokenizer_name_the_same_id(
    family: str, field: str, token: str, copied: Callable[[str], Path]
) -> None:
    folder = copied(family)
    known = read_vocabulary(folder).id_of(token)
    change(folder / "config.json", **{field: 3})
    assert f"config.json: {field} is 3, and {tokenizer_file(folder)} has {token!r} as {known}" in told(folder)


@pytest.mark.parametrize(
    ("field", "value", "token"),
    [
        ("no_timestamps_token_id", 3, "<|notimestamps|>"),
        ("prev_sot_token_id", 3, "<|startofprev|>"),
        ("lang_to_id.<|de|>", 3, "<|de|>"),
        ("task_to_id.translate", 3, "<|translate|>"),
    ],
)
def test_what_whisper_says_beside_text_is_what_its_tokenizer_knows(
    field: str, value: int, token: str, copied: Callable[[str], Path]
) -> None:
    folder = copied("whisper")
    change(folder / "generation_config.json", **{field: value})
    assert f"generation_config.json: {field} is {value}, and " in told(folder) and repr(token) in told(folder)


@pytest.mark.parametrize("family", ["text_llm", "qwen3_omni", "qwen3_asr"])
def test_an_answer_ends_with_an_id_that_can_be_said(family: str, copied: Callable[[str], Path]) -> None:
    folder = copied(family)
    change(folder / "generation_config.json", eos_token_id=[2, FAR])
    assert f"{folder / 'generation_config.json'}: eos_token_id is {FAR}, not an id below" in told(folder)


@pytest.mark.parametrize("family", [*TOKENS, "text_llm"])
def test_no_word_of_a_tokenizer_is_beyond_the_models_vocabulary(family: str, copied: Callable[[str], Path]) -> None:
    folder = copied(family)
    file = tokenizer_file(folder)
    found = json.loads(file.read_text())
    (found if file.name == "vocab.json" else found["model"]["vocab"])["unheard"] = FAR
    file.write_text(json.dumps(found))
    assert f"{file}: 'unheard' has the id {FAR}, and the model's " in told(folder)


@pytest.mark.parametrize(
    ("files", "words", "added"),
    [
        ({"tokenizer.json": {"model": {"vocab": {"a": 0}}, "added_tokens": [{"content": "<x>", "id": 1}]}}, "a", "<x>"),
        ({"tokenizer.json": {"model": {"vocab": [["a", -1.5], ["b", -2.5]]}, "added_tokens": []}}, "a b", ""),
        ({"vocab.json": {"a": 0}, "added_tokens.json": {"<x>": 1}}, "a", "<x>"),
        ({"vocab.json": {"a": 0}, SETTINGS: {"added_tokens_decoder": {"1": {"content": "<x>"}}}}, "a", "<x>"),
    ],
)
def test_every_kind_of_tokenizers_files_is_read(tmp_path: Path, files: dict[str, Any], words: str, added: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    found = read_vocabulary(tmp_path)
    assert ([*found.words], [*found.added]) == (words.split(), added.split())
    tokens = [*words.split(), *added.split()]
    assert [found.id_of(token) for token in tokens] == list(range(len(tokens)))
    assert found.id_of("<y>") is None


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", {"model": {}}),
        ("tokenizer.json", {"model": {"vocab": {"a": "b"}}}),
        ("tokenizer.json", {"model": {"vocab": {}}, "added_tokens": [1]}),
        ("tokenizer.json", {"model": {"vocab": {}}, "added_tokens": [{"content": "a"}]}),
        ("vocab.json", {"a": -1}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "a"}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"1": 3}}),
    ],
)
def test_a_file_that_lists_no_tokens_is_named(tmp_path: Path, name: str, content: Any) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(StartupError, match=name.replace(".", r"\.")):
        read_vocabulary(tmp_path)


@pytest.mark.parametrize("family", sorted(BUILDERS.keys() - {"demo_voice"}))
@pytest.mark.parametrize(
    ("name", "field", "value", "said"),
    [
        ("generation_config.json", "do_sample", "no", "no true or false"),
        ("generation_config.json", "eos_token_id", [], "no id or list of ids"),
        ("config.json", "eos_token_id", ["x"], "no id or list of ids"),
        ("config.json", "rope_parameters", [], "no object"),
        ("config.json", "rope_scaling", "linear", "no object"),
        ("config.json", "layer_types", "full_attention", "no list of texts"),
        ("config.json", "layer_types", ["full_attention", 5], "no list of texts"),
        ("config.json", "layer_types", ["linear_attention"], "'linear_attention', not one of"),
        ("config.json", "tie_word_embeddings", 5, "no true or false"),
        ("config.json", "attention_bias", "yes", "no true or false"),
        ("config.json", "initializer_range", "x", "no number of 0 or more"),
        ("config.json", "bos_token_id", {}, "no id"),
    ],
)
def test_a_field_that_is_none_of_its_kind_is_told_by_file_and_field(
    family: str, name: str, field: str, value: Any, said: str, copied: Callable[[str], Path]
) -> None:
    folder = copied(family)
    file = folder / name
    if not file.is_file():
        file.write_text("{}")
    change(file, **{field: value})
    message = told(folder)
    assert str(file) in message and field in message and said in message


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"layer_types": [], "num_hidden_layers": 2}, "layer_types has 0 entries for 2 layers"),
        ({"text_config": {"layer_types": {}}}, "text_config.layer_types is '{}', no list of texts"),
        ({"text_config": 5}, "text_config is '5', no object"),
        ({"parts": [{"do_sample": 1}]}, "parts.0.do_sample is '1', no true or false"),
        ({"talker_do_sample": "no"}, "talker_do_sample is 'no', no true or false"),
        ({"subtalker_dosample": 0}, "subtalker_dosample is '0', no true or false"),
        ({"hidden_act": 5}, "hidden_act is '5', no text"),
        ({"padding_side": "up"}, "padding_side is 'up', no side, left or right"),
        ({"support_languages": "English"}, "support_languages is 'English', no list of texts"),
        ({"speaker_id": 5}, "speaker_id is '5', no object"),
        ({"encoder_kwargs": [{}, 5]}, "encoder_kwargs is '[{}, 5]', no list of objects"),
        ({"quantizer_kwargs": {"quantizer_type": []}}, "quantizer_kwargs.quantizer_type is '[]', no text"),
    ],
)
def test_kinds_are_told_wherever_they_stand(config: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_kinds(config, Path("/m/config.json"))
    assert str(caught.value).startswith(f"/m/config.json: {said}")


def test_what_is_null_or_unknown_is_none_of_them() -> None:
    config = {"do_sample": None, "layer_types": None, "rope_scaling": None, "eos_token_id": [1, 2], "pad_token_id": -1}
    check_kinds({**config, "_from_model_config": True, "some_config": 5, "thinker_config": {"x": [[]]}}, Path("c"))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("vocab.json", "{}", "lists no tokens"),
        ("merges.txt", "", "lists no pairs of tokens to merge"),
        ("merges.txt", "#version: 0.2\n", "lists no pairs of tokens to merge"),
        ("merges.txt", "#version: 0.2\na b\nc\n", "lists no pairs of tokens to merge"),
        ("merges.txt", "#version: 0.2\na s\n", "makes no token 'assistant' of its parts"),
    ],
)
def test_a_damaged_list_of_words_or_pairs_is_named_before_the_start(
    name: str, text: str, words: str, copied: Callable[[str], Path]
) -> None:
    folder = copied("qwen3_tts")
    (folder / name).write_text(text)
    assert told(folder).startswith(f"{folder / name} {words}")


def test_words_that_are_no_longer_one_token_are_named(copied: Callable[[str], Path]) -> None:
    folder = copied("qwen3_tts")
    words = json.loads((folder / "vocab.json").read_text())
    del words["assistant"]
    (folder / "vocab.json").write_text(json.dumps(words))
    assert told(folder).startswith(f"{folder / 'vocab.json'} lacks the token 'assistant'")


def test_pairs_are_read_of_either_file(tmp_path: Path) -> None:
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n# #\n")
    assert read_merges(tmp_path) == (tmp_path / "merges.txt", {"ab", "##"})
    for pairs in (["a b", "# #"], [["a", "b"], ["#", "#"]]):
        (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"merges": pairs}}))
        assert read_merges(tmp_path) == (tmp_path / "tokenizer.json", {"ab", "##"})


@pytest.mark.parametrize("family", BUILDERS)
def test_weights_that_are_said_to_be_quantised_are_refused(family: str, copied: Callable[[str], Path]) -> None:
    file = (folder := copied(family)) / "config.json"
    change(file, quantization_config={"quant_method": "fp8"})
    assert told(folder).startswith(f"{file} has a quantization_config; this engine takes")
    change(file, quantization_config=None)
    start(folder)


@pytest.mark.parametrize(("family", "part"), [("qwen3_omni", "thinker_config"), ("qwen3_tts", "talker_config")])
def test_a_part_that_is_said_to_be_quantised_is_named(family: str, part: str, copied: Callable[[str], Path]) -> None:
    file = (folder := copied(family)) / "config.json"
    change(file, **{f"{part}.quantization_config": {"bits": 8}})
    assert told(folder).startswith(f"{file} has a {part}.quantization_config;")


@pytest.mark.parametrize("family", [family for family in BUILDERS if not family.startswith("ming")])
def test_architecture_and_model_type_must_go_together(family: str, copied: Callable[[str], Path]) -> None:
    file = (folder := copied(family)) / "config.json"
    change(file, model_type="llama")
    assert told(folder).startswith(f"{file}: model_type is 'llama' and architectures [")


def test_a_config_that_transformers_cannot_read_is_not_the_tokenizers_fault(copied: Callable[[str], Path]) -> None:
    folder = copied("text_llm")
    change(folder / "config.json", rope_parameters=[])
    with pytest.raises(StartupError) as caught:
        TextTokenizer.load(folder)
    assert str(caught.value).startswith(f"{folder / 'config.json'} cannot be read: ")
    assert "rope_parameters" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("family", ["whisper", "qwen3_asr", "qwen3_omni"])
@pytest.mark.parametrize(
    ("field", "value"), [("n_fft", 512), ("hop_length", 80), ("sampling_rate", 8000), ("feature_size", 20)]
)
def test_a_model_hears_the_frames_that_it_was_trained_with(
    family: str, field: str, value: int, copied: Callable[[str], Path]
) -> None:
    folder = copied(family)
    file = folder / "preprocessor_config.json"
    change(file, **{field: value})
    assert f"{file}: {field} is {value}; the model hears " in told(folder)


def test_frames_that_a_newer_file_describes_are_looked_at_as_well(copied: Callable[[str], Path]) -> None:
    folder = copied("qwen3_asr_new")
    change(folder / "processor_config.json", **{"feature_extractor.hop_length": 161})
    assert f"{folder / 'processor_config.json'}: hop_length is 161; the model hears 160 " in told(folder)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("image_mean", [0.5], "image_mean has 1 numbers, not one a colour"),
        ("image_std", [0.5] * 4, "image_std has 4 numbers, not one a colour"),
        ("size", 224, "size is 224, no object"),
        ("min_pixels", 1 << 30, "pictures have at least 1073741824 pixels and at most "),
    ],
)
def test_what_makes_patches_of_pictures_goes_together(
    field: str, value: Any, said: str, copied: Callable[[str], Path]
) -> None:
    folder = copied("qwen3_omni")
    change(folder / "preprocessor_config.json", **{field: value})
    assert f"{folder / 'preprocessor_config.json'}: {said}" in told(folder)


@pytest.mark.parametrize("family", ["ming", "ming_experts"])
@pytest.mark.parametrize("value", [10**12, 7])
def test_mings_audio_has_a_rate_of_sound(family: str, value: int, copied: Callable[[str], Path]) -> None:
    folder = copied(family)
    change(folder / "config.json", **{"audio_tokenizer_config.sample_rate": value})
    message = told(folder)
    assert str(folder / "config.json") in message and "audio_tokenizer_config.sample_rate " in message
    assert str(value) in message


ENDLESS = "{% for i in range(999999999) %}{{ i }}{% endfor %}"


@pytest.mark.parametrize(("family", "file"), [("text_llm", "jinja"), ("qwen3_omni", "json"), ("higgs_v2", "jinja")])
def test_a_chat_template_without_end_is_refused(family: str, file: str, copied: Callable[[str], Path]) -> None:
    folder = copied(family)
    path = folder / f"chat_template.{file}"
    assert path.is_file()
    path.write_text(ENDLESS if file == "jinja" else json.dumps({"chat_template": ENDLESS}))
    assert f"{path}: chat_template makes too much of a plain question" in told(folder)


@pytest.mark.parametrize("family", ["text_llm", "text_llm_moe"])
def test_a_chat_template_writes_tokens_that_have_embeddings(family: str, copied: Callable[[str], Path]) -> None:
    """One that nobody writes may lie beyond: some tokenizers have such a token for padding."""
    folder = copied(family)
    move(folder, "<|endoftext|>", FAR)
    start(folder)
    move(folder, "<|im_start|>", FAR)
    assert f"{folder / 'tokenizer.json'}: '<|im_start|>' has the id {FAR}, and the model's vocab_size" in told(folder)
