"""Whisper's stages beside the decoder: audio to windows, windows to states, tokens to text and segments."""

from __future__ import annotations

import importlib
import io
import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from sgl_omni.audio.windows import cut_at_quiet_places
from sgl_omni.config.tasks import TranscriptionTask
from sgl_omni.engine.checkpoint import CheckpointError
from sgl_omni.errors import InvalidRequest, StartupError
from sgl_omni.models.whisper.pipeline import WhisperPipelineConfig
from sgl_omni.models.whisper.spec import WhisperSpec

pytest.importorskip("transformers")

import tiny_whisper as tiny

from sgl_omni.models.whisper.encoder import WhisperEncoder, WindowEncoding
from sgl_omni.models.whisper.preprocess import WhisperPreprocessor
from sgl_omni.models.whisper.stages import create_engine
from sgl_omni.models.whisper.text import WhisperText, cut_at_timestamps
from sgl_omni.text.tokenizer import TextTokenizer

RATE = tiny.RATE


class Asked:
    id = "a"
    aborted = False

    async def emit(self, chunk: dict[str, Any]) -> None:
        raise AssertionError("not asked for")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("whisper")
    return folder, tiny.build(folder)


@pytest.fixture
def copy(checkpoint: tuple[Path, Any], tmp_path: Path) -> Path:
    """The checkpoint's folder again, to be damaged."""
    for file in checkpoint[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def wav(samples: np.ndarray, rate: int = RATE) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="WAV", subtype="FLOAT")
    return file.getvalue()


def test_short_audio_is_one_window() -> None:
    for length in (1, 100, 30 * RATE):
        assert cut_at_quiet_places(np.ones(length, np.float32), RATE, 30) == [(0, length)]


def test_windows_end_where_it_is_quiet() -> None:
    rng = np.random.default_rng(0)
    samples = rng.normal(0, 0.2, 100 * RATE).astype(np.float32)
    pauses = [(24.0, 24.4), (47.0, 47.3), (70.0, 71.0)]
    for start, end in pauses:
        samples[int(start * RATE) : int(end * RATE)] *= 0.01
    windows = cut_at_quiet_places(samples, RATE, 30)
    assert windows[0][0] == 0
    assert windows[-1][1] == len(samples)
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(windows))
    for (_, end), (start, stop) in zip(windows, pauses, strict=False):
        assert start < end / RATE < stop
    assert len(windows) == 4


def test_windows_are_never_too_long_and_cover_everything() -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        samples = rng.normal(0, 1, int(rng.integers(1, 40_000))).astype(np.float32)
        windows = cut_at_quiet_places(samples, 1000, 1.0)
        assert [start for start, _ in windows] == [0, *(end for _, end in windows[:-1])]
        assert windows[-1][1] == len(samples)
        assert all(0 < end - start <= 1000 for start, end in windows)
        assert all(end - start > 600 for start, end in windows[:-1])


def test_silence_is_cut_as_late_as_it_can_be() -> None:
    windows = cut_at_quiet_places(np.zeros(65 * RATE, np.float32), RATE, 30)
    assert [round(end / RATE, 1) for _, end in windows] == [29.9, 59.8, 65.0]


def test_each_window_becomes_the_features_that_transformers_makes(checkpoint: tuple[Path, Any]) -> None:
    folder, _ = checkpoint
    samples = tiny.noise(3, 2.5)
    found = WhisperPreprocessor.load(folder, 60.0)({"audio": wav(samples), "task": "transcribe"}, Asked())
    assert found["duration"] == 2.5
    assert found["task"] == "transcribe"
    assert found["history"] == []
    assert len(found["windows"]) > 2
    for window in found["windows"]:
        part = samples[round(window["start"] * RATE) : round(window["end"] * RATE)]
        expected = tiny.extractor()(part, sampling_rate=RATE, return_tensors="np").input_features[0]
        assert window["features"].shape == (tiny.MELS, 2 * tiny.FRAMES)
        assert np.array_equal(window["features"], expected)


def test_another_rate_and_channels_are_the_same_sound(checkpoint: tuple[Path, Any]) -> None:
    time = np.arange(48_000) / 48_000
    tone = np.sin(2 * np.pi * 440 * time).astype(np.float32) * 0.3
    preprocess = WhisperPreprocessor.load(checkpoint[0], 60.0)
    stereo = preprocess({"audio": memoryview(wav(np.stack([tone, tone], 1), 48_000))}, Asked())
    plain = preprocess({"audio": wav(tone[::3].copy())}, Asked())
    assert np.abs(stereo["windows"][0]["features"] - plain["windows"][0]["features"]).max() < 0.1


def test_a_prompt_becomes_tokens_and_no_special_ones(checkpoint: tuple[Path, Any]) -> None:
    preprocess = WhisperPreprocessor.load(checkpoint[0], 60.0)
    audio = wav(tiny.noise(0, 0.5))
    tokens = preprocess({"audio": audio, "prompt": " Ada "}, Asked())["history"]
    assert TextTokenizer.load(checkpoint[0]).decode(tokens) == " Ada"
    sly = preprocess({"audio": audio, "prompt": "<|de|><|0.00|>"}, Asked())["history"]
    assert max(sly) < tiny.EOS
    long = preprocess({"audio": audio, "prompt": "x" * 500}, Asked())["history"]
    assert len(long) == tiny.POSITIONS // 2 - 1


def test_bad_audio_is_the_callers_mistake(checkpoint: tuple[Path, Any]) -> None:
    preprocess = WhisperPreprocessor.load(checkpoint[0], 3.0)
    for payload, words in (
        ({}, "missing"),
        ({"audio": b"nothing"}, "cannot be read"),
        ({"audio": wav(np.zeros(0, np.float32))}, "empty"),
        ({"audio": wav(np.zeros(4 * RATE, np.float32))}, "the limit is 3 s"),
    ):
        with pytest.raises(InvalidRequest, match=words) as refused:
            preprocess(payload, Asked())
        assert refused.value.param == "file"


def test_states_are_those_of_transformers(checkpoint: tuple[Path, Any]) -> None:
    folder, reference = checkpoint
    encoding = WindowEncoding(WhisperEncoder.load(folder))
    given = WhisperPreprocessor.load(folder, 60.0)({"audio": wav(tiny.noise(5, 2.0))}, Asked())
    found = encoding(given, Asked())
    assert found["duration"] == 2.0
    for window, before in zip(found["windows"], given["windows"], strict=True):
        expected = tiny.states_of(reference, before["features"])
        assert (window["encoder_states"] - expected).abs().max() < 1e-5
        assert (window["start"], window["end"]) == (before["start"], before["end"])


def test_an_abort_stops_between_windows(checkpoint: tuple[Path, Any]) -> None:
    class Encoder:
        calls = 0

        def encode(self, features: Any) -> torch.Tensor:
            self.calls += 1
            asked.aborted = True
            return torch.zeros(1, 1)

    asked, encoder = Asked(), Encoder()
    windows = [{"features": None, "start": 0.0, "end": 1.0}] * 5
    assert WindowEncoding(encoder)({"windows": windows}, asked) == {}  # type: ignore[arg-type]
    assert encoder.calls == 1


def times(*parts: float | str) -> list[int]:
    """Seconds to timestamps, letters to tokens."""
    tokens: list[int] = []
    for part in parts:
        if isinstance(part, str):
            tokens += [tiny.IDS[letter] for letter in part]
        else:
            tokens.append(tiny.FIRST_TIME + round(part / 0.02))
    return tokens


SEGMENTED: dict[str, tuple[list[int], list[tuple[float, float, str]]]] = {
    "pairs": (times(0.0, "ab", 0.3, 0.3, "c", 0.5), [(10.0, 10.3, "ab"), (10.3, 10.5, "c")]),
    "a gap": (times(0.1, "ab", 0.3, 0.4, "c", 0.5), [(10.1, 10.3, "ab"), (10.4, 10.5, "c")]),
    "no last time": (times(0.0, "ab", 0.3, 0.3, "cd"), [(10.0, 10.3, "ab"), (10.3, 10.8, "cd")]),
    "no times": (times("abc"), [(10.0, 10.8, "abc")]),
    "no first time": (times("a", 0.2), [(10.0, 10.2, "a")]),
    "beyond the audio": (times(0.0, "a", 0.9, 0.9, "b", 1.0), [(10.0, 10.8, "a"), (10.8, 10.8, "b")]),
    "nothing": ([], []),
    "times alone": (times(0.0, 0.5), []),
    "one time": (times(0.4), []),
}


@pytest.mark.parametrize("case", SEGMENTED)
def test_segments_lie_between_times(checkpoint: tuple[Path, Any], case: str) -> None:
    tokens, expected = SEGMENTED[case]
    spec, tokenizer = WhisperSpec.load(checkpoint[0]), TextTokenizer.load(checkpoint[0])
    found = cut_at_timestamps(tokens, 10.0, 10.8, spec)
    assert [(round(s.start, 6), round(s.end, 6), tokenizer.decode(s.tokens)) for s in found] == expected


def write(folder: Path, windows: Sequence[Sequence[list[int]]]) -> tuple[list[str], dict[str, Any]]:
    """What is streamed, and the result; each window comes in pieces."""
    stage = WhisperText(WhisperSpec.load(folder), TextTokenizer.load(folder))
    state = stage.open(Asked())
    streamed: list[str] = []
    for i, pieces in enumerate(windows):
        for piece in pieces:
            chunk = {"token_ids": piece, "start": float(i), "end": i + 1.0, "ended": False}
            streamed += [out["text"] for out in stage.feed(state, chunk)]
        last = {"token_ids": [], "start": float(i), "end": i + 1.0, "ended": True}
        streamed += [out["text"] for out in stage.feed(state, last)]
    streamed += [out["text"] for out in stage.flush(state)]
    return streamed, stage.result(state, {"finish_reason": "stop"})


def test_what_is_streamed_is_the_text(checkpoint: tuple[Path, Any]) -> None:
    folder = checkpoint[0]
    encode = TextTokenizer.load(folder).encode
    text = " Grüße, 日本語 and 🎈! "
    for size in (1, 2, 5, 100):
        tokens = encode(text)
        pieces = [tokens[i : i + size] for i in range(0, len(tokens), size)]
        streamed, result = write(folder, [pieces, [encode("  ")], [times(0.1), encode(" more"), times(0.4)]])
        assert "".join(streamed) == result["text"] == "Grüße, 日本語 and 🎈!    more"
        assert "\ufffd" not in "".join(streamed)
        assert all(streamed)
        assert [s["text"] for s in result["segments"]] == [text, "  ", " more"]
        assert result["finish_reason"] == "stop"
        assert result["output_tokens"] == sum(map(len, [tokens, encode("  "), encode(" more")])), "no times, no ends"


def test_a_character_that_breaks_off_shows_as_one(checkpoint: tuple[Path, Any]) -> None:
    tokens = TextTokenizer.load(checkpoint[0]).encode(" 🎈")
    streamed, result = write(checkpoint[0], [[tokens[:-1]]])
    assert "".join(streamed) == result["text"] == "\ufffd"


def test_silence_has_no_text(checkpoint: tuple[Path, Any]) -> None:
    nothing = {"finish_reason": "stop", "text": "", "segments": [], "output_tokens": 0}
    assert write(checkpoint[0], [[], []]) == ([], nothing)


def test_the_task_tells_languages_and_translation(checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    task = WhisperPipelineConfig.tasks(str(checkpoint[0])).transcription
    assert task == TranscriptionTask(languages=("de", "en", "fr"), translates=True, timestamps=True, max_seconds=7200)
    tiny.build(tmp_path, multilingual=False)
    task = WhisperPipelineConfig.tasks(str(tmp_path)).transcription
    assert task == TranscriptionTask(languages=("en",), translates=False, timestamps=True, max_seconds=7200)


def test_every_factory_exists() -> None:
    for stage in WhisperPipelineConfig.default_stages.values():
        module, _, name = stage["factory_path"].rpartition(".")
        assert callable(getattr(importlib.import_module(module), name))


def test_declaring_the_pipeline_imports_no_torch() -> None:
    code = "import sys, sgl_omni.models.whisper.stages; print({'torch', 'transformers'} & set(sys.modules))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "set()"


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("config.json", None, "neither a folder nor a downloaded model|holds no config.json"),
        ("config.json", {"architectures": ["LlamaForCausalLM"]}, r"config.json: architectures is \['LlamaForC"),
        ("config.json", {"d_model": ...}, r"config.json lacks the field d_model"),
        ("config.json", {"num_mel_bins": ...}, r"config.json lacks the field num_mel_bins"),
        ("config.json", {"model_type": "bart"}, "model_type is .bart. and architectures"),
        ("generation_config.json", None, r"generation_config.json cannot be read"),
        ("generation_config.json", {"no_timestamps_token_id": ...}, r"lacks the field no_timestamps_token_id"),
        ("preprocessor_config.json", None, r"preprocessor_config.json cannot be read"),
        ("tokenizer.json", None, "holds no tokenizer"),
        ("model-00002-of-00006.safetensors", None, r"model-00002-of-00006.safetensors is missing"),
    ],
)
def test_a_bad_folder_is_refused_by_file_and_field(
    copy: Path, file: str, change: dict[str, Any] | None, words: str
) -> None:
    if change is None:
        (copy / file).unlink()
    else:
        fields = json.loads((copy / file).read_text()) | change
        (copy / file).write_text(json.dumps({key: value for key, value in fields.items() if value is not ...}))
    with pytest.raises(InvalidRequest, match=words):
        WhisperPipelineConfig.tasks(str(copy))


def test_truncated_weights_are_refused(copy: Path) -> None:
    file = copy / "model-00003-of-00006.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InvalidRequest, match=r"model-00003-of-00006.safetensors has .* truncated or damaged"):
        WhisperPipelineConfig.tasks(str(copy))


def test_weights_of_another_shape_are_refused(copy: Path) -> None:
    fields = json.loads((copy / "config.json").read_text()) | {"encoder_ffn_dim": 64}
    (copy / "config.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=r"encoder.layers.0.fc1.bias is \[48\], not \[64\]"):
        WhisperEncoder.load(copy)


def test_windows_of_another_length_are_refused(copy: Path) -> None:
    fields = json.loads((copy / "preprocessor_config.json").read_text())
    changed = {"chunk_length": 2, "n_samples": 2 * RATE, "nb_max_frames": 4 * tiny.FRAMES}
    (copy / "preprocessor_config.json").write_text(json.dumps(fields | changed))
    told = r"preprocessor_config\.json: chunk_length is 2, which makes windows of 200 frames; the encoder takes 100"
    with pytest.raises(InvalidRequest, match=told):
        WhisperPipelineConfig.tasks(str(copy))


def test_the_pool_is_as_large_as_requests_need(checkpoint: tuple[Path, Any]) -> None:
    folder = str(checkpoint[0])
    assert create_engine(folder, engine={"max_running_requests": 3}).engine.stats()["kv_capacity_tokens"] == 192
    assert create_engine(folder, engine={"max_total_tokens": 100}).engine.stats()["kv_capacity_tokens"] == 96
    with pytest.raises(StartupError, match="give max_total_tokens of at least 64"):
        create_engine(folder, engine={"max_total_tokens": 40})
    with pytest.raises(StartupError, match="dtype 'int4' is not one of float32, bfloat16, float16"):
        create_engine(folder, engine={"dtype": "int4"})
