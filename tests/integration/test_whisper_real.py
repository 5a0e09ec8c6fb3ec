"""A real Whisper (tiny.en) hears what the demo voice says: tokens as transformers has them, and the words said."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile
import torch

from listening import SENTENCES, edits, hear, words
from servers import Server, serving
from sgl_omni.audio.windows import cut_at_quiet_places

pytest.importorskip("transformers")

import real_whisper
import tiny_whisper
import transformers

NAME, RATE = "whisper-tiny.en", 16_000
SAID = SENTENCES[20:30]


@dataclass(frozen=True)
class Real:
    """transformers' own model, tokenizer and features of the same folder."""

    folder: Path
    model: Any
    tokenizer: Any
    extractor: Any

    def features(self, samples: np.ndarray) -> torch.Tensor:
        found: torch.Tensor = self.extractor(samples, sampling_rate=RATE, return_tensors="pt").input_features
        return found


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """One WAV file a sentence."""
    with serving("--model-path", "demo-voice", run_folder=tmp_path_factory.mktemp("run")) as voice:
        body = {"model": "demo-voice", "voice": "rms", "response_format": "wav", "stream": False}
        asked = [{**body, "input": text} for text in SAID]
        return [httpx.post(f"{voice.url}/v1/audio/speech", json=each, timeout=120).content for each in asked]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Real:
    folder = tmp_path_factory.mktemp("whisper")
    real_whisper.convert(folder)
    return Real(
        folder,
        transformers.WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval(),
        transformers.AutoTokenizer.from_pretrained(folder),
        transformers.WhisperFeatureExtractor.from_pretrained(folder),
    )


@pytest.fixture(scope="module")
def server(real: Real, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = ("--model-path", str(real.folder), "--name", NAME, "--platform", "cpu")
    with serving(*arguments, run_folder=tmp_path_factory.mktemp("run")) as found:
        yield found


def transcribe(server: Server, audio: bytes, **fields: str) -> dict[str, Any]:
    response = httpx.post(
        f"{server.url}/v1/audio/transcriptions",
        data={"model": NAME, **fields},
        files={"file": ("a.wav", audio)},
        timeout=300,
    )
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def samples_of(wav: bytes) -> np.ndarray:
    samples, rate = soundfile.read(io.BytesIO(wav), dtype="float32")
    assert rate == RATE
    return np.asarray(samples)


def joined(recordings: list[bytes]) -> np.ndarray:
    """One after another, with pauses."""
    pause = np.zeros(RATE // 3, np.float32)
    return np.concatenate([part for wav in recordings for part in (samples_of(wav), pause)])


def word_errors(said: str, heard: str) -> float:
    return edits(words(said), words(heard)) / len(words(said))


def test_tokens_and_times_are_those_of_transformers(server: Server, real: Real, recordings: list[bytes]) -> None:
    for wav in recordings[:4]:
        features = real.features(samples_of(wav))
        plain = real.model.generate(features)[0].tolist()
        answer = transcribe(server, wav)
        assert answer["text"] == real.tokenizer.decode(plain, skip_special_tokens=True).strip()
        ids = real.tokenizer.encode(real.tokenizer.decode(plain, skip_special_tokens=True), add_special_tokens=False)
        assert answer["usage"]["output_tokens"] == len(ids)
        timed = real.model.generate(features, return_timestamps=True)[0].tolist()
        segments = transcribe(server, wav, response_format="verbose_json")["segments"]
        first_time = real_whisper.NO_TIMESTAMPS + 1
        assert [token for each in segments for token in each["tokens"]] == [t for t in timed if t < real_whisper.EOS]
        edges = [(token - first_time) * 0.02 for token in timed if token >= first_time]
        found = [edge for each in segments for edge in (each["start"], each["end"])]
        end = len(samples_of(wav)) / RATE
        assert np.allclose(found, np.minimum(edges, end)), (found, edges)


def test_words_are_those_that_were_said_and_that_another_runtime_hears(server: Server, recordings: list[bytes]) -> None:
    texts = [transcribe(server, wav)["text"] for wav in recordings]
    assert word_errors(" ".join(SAID), " ".join(texts)) < 0.08
    assert word_errors(" ".join(map(hear, recordings)), " ".join(texts)) < 0.06


def test_more_than_a_window_is_heard_to_its_end(server: Server, real: Real, recordings: list[bytes]) -> None:
    samples = joined(recordings)
    windows = cut_at_quiet_places(samples, RATE, 30)
    assert len(windows) == 2
    file = io.BytesIO()
    soundfile.write(file, samples, RATE, format="FLAC")
    answer = transcribe(server, file.getvalue(), response_format="verbose_json")
    states = [tiny_whisper.states_of(real.model, real.features(samples[a:b])[0]) for a, b in windows]
    seconds = [(b - a) / RATE for a, b in windows]
    said = tiny_whisper.transcribe(real.model, states, timestamps=True, seconds=seconds)
    letters = [token for window in said for token in window if token < real_whisper.EOS]
    assert [token for each in answer["segments"] for token in each["tokens"]] == letters
    assert word_errors(" ".join(SAID), answer["text"]) < 0.08
    starts = [each["start"] for each in answer["segments"]]
    assert starts == sorted(starts)
    assert answer["segments"][-1]["end"] > len(samples) / RATE - 3
    text = "".join(each["text"] for each in answer["segments"]).strip()
    assert text == answer["text"]
