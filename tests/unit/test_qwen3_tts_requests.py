"""What Qwen3-TTS makes of checkpoints and requests before any weight is read, and what it refuses."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sgl_omni.engine.checkpoint import CheckpointError
from sgl_omni.errors import InvalidRequest, OmniError, StartupError
from sgl_omni.models.qwen3_tts.facts import ModelFacts
from sgl_omni.models.qwen3_tts.pipeline import Qwen3TTSPipelineConfig
from sgl_omni.models.qwen3_tts.preprocess import SpeechPreprocessor, Voice
from sgl_omni.models.qwen3_tts.references import References
from sgl_omni.models.qwen3_tts.stages import create_engine, create_preprocessing, create_vocoder
from sgl_omni.models.registry import PipelineRegistry
from sgl_omni.text.tokenizer import TextTokenizer

sys.path.append(str(Path(__file__).parents[1]))

import tiny_qwen3_tts as tiny

pytest.importorskip("transformers")

REQUEST: Any = SimpleNamespace(id="r", aborted=False)


class Heard:
    """Every recording is the same voice here; notes whether frames were asked for."""

    def __init__(self) -> None:
        self.asked: list[bool] = []

    def read(self, audio: bytes | memoryview, *, with_codes: bool) -> Voice:
        self.asked.append(with_codes)
        return Voice(np.zeros(32, np.float32), np.zeros((3, tiny.GROUPS), np.int16) if with_codes else None)


def preprocessor(folder: Path, kind: str, **changes: Any) -> SpeechPreprocessor:
    changed(tiny.build(folder, kind), "config.json", changes)
    return SpeechPreprocessor(ModelFacts.load(str(folder)), TextTokenizer.load(folder), Heard())


def changed(folder: Path, name: str, changes: dict[str, Any]) -> Path:
    """The folder, with fields at dotted paths set, or removed where a value is ``...``."""
    tree = json.loads((folder / name).read_text())
    for path, value in changes.items():
        *parents, last = path.split(".")
        place = tree
        for part in parents:
            place = place[part]
        if value is ...:
            del place[last]
        else:
            place[last] = value
    (folder / name).write_text(json.dumps(tree))
    return folder


def test_a_task_says_what_a_checkpoint_serves(tmp_path: Path) -> None:
    tasks = {kind: Qwen3TTSPipelineConfig.tasks(str(tiny.build(tmp_path / kind, kind))).speech for kind in tiny.KINDS}
    preset, design, base = (tasks[kind] for kind in tiny.KINDS)
    assert preset is not None and design is not None and base is not None
    assert (preset.voices, preset.default_voice) == (("vivian", "eric"), "vivian")
    assert (design.voices, design.default_voice) == (base.voices, base.default_voice) == ((), None)
    assert [task.max_references for task in (preset, design, base)] == [0, 0, 1]
    assert [task.takes_instructions for task in (preset, design, base)] == [True, True, False]
    assert {task.languages for task in (preset, design, base)} == {("auto", "chinese", "english")}
    assert {task.sample_rate for task in (preset, design, base)} == {tiny.SAMPLE_RATE}
    assert PipelineRegistry().by_model(str(tmp_path / "base")) is Qwen3TTSPipelineConfig


def test_options_come_from_the_request_else_from_the_checkpoint(tmp_path: Path) -> None:
    preprocess = preprocessor(tmp_path, "custom_voice")
    plain = preprocess({"input": "Hi", "voice": None, "speed": 1.0}, REQUEST)
    chosen = {"temperature": 0.2, "top_k": 3, "top_p": 0.8, "repetition_penalty": 1.2, "seed": 4, "speed": 2.0}
    own = preprocess({"input": "Hi", "voice": "eric", "max_new_tokens": 7, **chosen}, REQUEST)
    expected = {"temperature": 0.9, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.05, "seed": None, "speed": 1.0}
    assert {key: plain[key] for key in expected} == expected
    assert {key: own[key] for key in chosen} == chosen
    assert (plain["max_frames"], own["max_frames"]) == (40, 7)
    assert (plain["speaker_id"], own["speaker_id"]) == (tiny.CODES + 30, tiny.CODES + 31)
    greedy = changed(tmp_path, "generation_config.json", {"do_sample": False})
    again = SpeechPreprocessor(ModelFacts.load(str(greedy)), TextTokenizer.load(greedy), None)
    assert again({"input": "Hi", "voice": None, "speed": 1.0}, REQUEST)["temperature"] == 0.0


def test_a_caller_cannot_write_special_tokens(tmp_path: Path) -> None:
    made = preprocessor(tmp_path, "custom_voice")({"input": "<|im_end|> \n", "voice": None}, REQUEST)
    assert max(made["text_ids"]) < tiny.FIRST_SPECIAL
    assert len(made["text_ids"]) == len("<|im_end|>")


def test_frames_of_a_recording_are_taken_only_with_its_words(tmp_path: Path) -> None:
    preprocess = preprocessor(tmp_path, "base")
    heard: Any = preprocess._voices
    for text, with_codes in (("What it says.", True), (None, False), (" ", False)):
        made = preprocess({"input": "a", "voice": None, "references": [{"audio": b"x", "text": text}]}, REQUEST)
        assert heard.asked.pop() is with_codes
        assert (made["reference_codes"] is not None, made["reference_ids"] is not None) == (with_codes, with_codes)
        assert not made["whole_text"]


@pytest.mark.parametrize(
    ("kind", "payload", "param"),
    [
        ("custom_voice", {"input": 3}, "input"),
        ("custom_voice", {"input": "\n "}, "input"),
        ("custom_voice", {"voice": "nobody"}, "voice"),
        ("custom_voice", {"language": "sichuan_dialect"}, "language"),
        ("custom_voice", {"speed": float("nan")}, "speed"),
        ("custom_voice", {"references": [{"audio": b"x", "text": None}]}, "references"),
        ("base", {}, "references"),
        ("base", {"references": [{"audio": b"x", "text": None}] * 2}, "references"),
        ("base", {"references": [{"audio": b"x", "text": None}], "instructions": "Calm."}, "instructions"),
    ],
)
def test_what_a_checkpoint_cannot_speak(tmp_path: Path, kind: str, payload: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        preprocessor(tmp_path, kind)({"input": "Hi", "voice": None, "speed": 1.0, **payload}, REQUEST)
    assert caught.value.param == param


def test_a_small_preset_model_takes_no_instructions(tmp_path: Path) -> None:
    preprocess = preprocessor(tmp_path, "custom_voice", tts_model_size="0b6")
    with pytest.raises(InvalidRequest, match="no instructions"):
        preprocess({"input": "Hi", "instructions": "Calm."}, REQUEST)


@pytest.mark.parametrize(
    ("audio", "message"), [(b"no audio", "cannot be read"), (None, "lasts 0.10 s; at least 0.5 s")]
)
def test_recordings_that_are_none(tmp_path: Path, audio: bytes | None, message: str) -> None:
    import io

    import soundfile

    if audio is None:
        file = io.BytesIO()
        soundfile.write(file, tiny.recording(0.1), tiny.SAMPLE_RATE, format="WAV")
        audio = file.getvalue()
    references = References.load(tiny.build(tmp_path, "base"))
    with pytest.raises(InvalidRequest, match=message) as caught:
        references.read(audio, with_codes=True)
    assert caught.value.param == "references[0].audio"


def without(*parts: str) -> Callable[[Path], object]:
    return lambda folder: folder.joinpath(*parts).unlink()


def cut(*parts: str) -> Callable[[Path], object]:
    return lambda folder: folder.joinpath(*parts).write_bytes(folder.joinpath(*parts).read_bytes()[:-9])


def with_fields(name: str, **changes: Any) -> Callable[[Path], object]:
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    return lambda folder: changed(folder, name, dotted)


CODEC = "speech_tokenizer/config.json"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without("config.json"), "holds no config.json"),
        (without("model.safetensors"), "model.safetensors is missing"),
        (without("speech_tokenizer", "model.safetensors"), "speech_tokenizer/model.safetensors is missing"),
        (without("speech_tokenizer", "config.json"), "speech_tokenizer/config.json cannot be read"),
        (without("vocab.json"), "holds no tokenizer"),
        (cut("model.safetensors"), "model.safetensors has .* truncated"),
        (with_fields("config.json", architectures=["LlamaForCausalLM"]), "architectures is .*LlamaForCausalLM"),
        (with_fields("config.json", tts_model_type="sung"), "config.json: tts_model_type is 'sung'"),
        (with_fields("config.json", talker_config__codec_eos_token_id=...), "lacks the field talker_config.codec_eos"),
        (with_fields("config.json", talker_config__codec_think_id=...), "lacks the field talker_config.codec_think_id"),
        (with_fields(CODEC, encode_downsample_rate=...), "lacks the field encode_downsample_rate"),
        (with_fields("config.json", speaker_encoder_config=...), "lacks the field speaker_encoder_config"),
        (with_fields(CODEC, model_type="qwen3_tts_tokenizer_25hz"), "model_type is 'qwen3_tts_tokenizer_25hz'"),
        (with_fields(CODEC, decoder_config__num_quantizers=9), "num_quantizers is 9, not the talker's 5"),
    ],
)
def test_damaged_checkpoints_are_refused_by_name(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(tiny.build(tmp_path, "base"))
    with pytest.raises(InvalidRequest, match=message) as caught:
        Qwen3TTSPipelineConfig.tasks(str(tmp_path))
    assert caught.value.param == "model_path"


@pytest.mark.parametrize(
    ("file", "changes", "factory", "message"),
    [
        ("config.json", {"talker_config.num_hidden_layers": 3}, create_engine, "missing: talker.model.layers.2"),
        (CODEC, {"decoder_config.latent_dim": ...}, create_vocoder, "lacks the field decoder_config.latent_dim"),
        (
            CODEC,
            {"decoder_config.num_hidden_layers": 1},
            create_vocoder,
            "unknown to this model: decoder.pre_transformer.layers.1",
        ),
        (CODEC, {"encode_downsample_rate": ...}, create_preprocessing, "lacks the field encode_downsample_rate"),
    ],
)
def test_what_only_a_stage_can_know_is_named_too(
    tmp_path: Path, file: str, changes: dict[str, Any], factory: Callable[[str], object], message: str
) -> None:
    changed(tiny.build(tmp_path, "base"), file, changes)
    with pytest.raises((StartupError, CheckpointError), match=message):
        factory(str(tmp_path))


def test_a_type_of_numbers_that_the_engine_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(OmniError, match=r"engine\.dtype is 'int8'"):
        create_engine(str(tiny.build(tmp_path, "base")), engine={"max_total_tokens": 64, "dtype": "int8"})
