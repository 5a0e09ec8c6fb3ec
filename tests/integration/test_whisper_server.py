"""Whisper over HTTP in real processes: a tiny multilingual checkpoint, held against transformers."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile

from servers import Server, fetch, serving
from sgl_omni.audio.windows import cut_at_quiet_places
from sgl_omni.models.whisper.spec import WhisperSpec
from sgl_omni.models.whisper.text import cut_at_timestamps
from sgl_omni.text.tokenizer import TextTokenizer

pytest.importorskip("transformers")

import tiny_whisper as tiny

NAME = "tiny-whisper"
SOUNDS = {"short": (1, 0.6), "one window": (3, 1.0), "two windows": (5, 1.7), "long": (7, 6.3)}
WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "in German": {"language": "de"},
    "translated": {"language": "fr", "task": "translate"},
    "with times": {"timestamps": True},
    "translated, with times": {"task": "translate", "timestamps": True},
}


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    reference: Any

    def expected(self, samples: np.ndarray, **way: Any) -> tuple[str, list[tuple[float, float, str]]]:
        """Text and segments, by transformers' model and the windows' places."""
        tokenizer, spec, extractor = TextTokenizer.load(self.folder), WhisperSpec.load(self.folder), tiny.extractor()
        windows = cut_at_quiet_places(samples, tiny.RATE, 1)
        heard = [extractor(samples[a:b], sampling_rate=tiny.RATE, return_tensors="np") for a, b in windows]
        states = [tiny.states_of(self.reference, each.input_features[0]) for each in heard]
        said = tiny.transcribe(self.reference, states, seconds=[(b - a) / tiny.RATE for a, b in windows], **way)
        segments = [
            (segment.start, segment.end, tokenizer.decode(segment.tokens))
            for (a, b), tokens in zip(windows, said, strict=True)
            for segment in cut_at_timestamps(tokens, a / tiny.RATE, b / tiny.RATE, spec)
        ]
        letters = [[token for token in tokens if token < tiny.EOS] for tokens in said]
        return "".join(map(tokenizer.decode, letters)).strip(), segments


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("whisper")
    return Checkpoint(folder, tiny.build(folder))


@pytest.fixture(scope="module")
def server(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = ("--model-path", str(checkpoint.folder), "--name", NAME, "--platform", "cpu")
    with serving(*arguments, run_folder=tmp_path_factory.mktemp("run")) as found:
        yield found


def wav(samples: np.ndarray) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, tiny.RATE, format="WAV", subtype="FLOAT")
    return file.getvalue()


def ask(server: Server, audio: bytes, **way: Any) -> httpx.Response:
    way = dict(way)
    route = "translations" if way.pop("task", None) == "translate" else "transcriptions"
    fields = {"model": NAME, "response_format": "verbose_json" if way.pop("timestamps", False) else "json", **way}
    files = {"file": ("a.wav", audio)}
    return httpx.post(f"{server.url}/v1/audio/{route}", data=fields, files=files, timeout=120)


def streamed(server: Server, audio: bytes, **fields: Any) -> tuple[list[str], dict[str, Any]]:
    response = ask(server, audio, stream="true", **fields)
    assert response.status_code == 200, response.text
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
    assert [each["type"] for each in events[:-1]] == ["transcript.text.delta"] * (len(events) - 1)
    return [each["delta"] for each in events[:-1]], events[-1]


@pytest.mark.parametrize("way", WAYS)
def test_answers_are_what_transformers_says(server: Server, checkpoint: Checkpoint, way: str) -> None:
    for seed, seconds in SOUNDS.values():
        samples = tiny.noise(seed, seconds)
        text, segments = checkpoint.expected(samples, **WAYS[way])
        response = ask(server, wav(samples), **WAYS[way])
        assert response.status_code == 200, response.text
        answer = response.json()
        assert answer["text"] == text
        if "segments" in answer:
            found = [(each["start"], each["end"], each["text"]) for each in answer["segments"]]
            assert [each[2] for each in found] == [each[2] for each in segments]
            assert np.allclose([each[:2] for each in found], [each[:2] for each in segments])
            assert answer["duration"] == len(samples) / tiny.RATE
            assert answer["task"] == WAYS[way].get("task", "transcribe")


def test_answers_differ_by_sound_and_by_way(checkpoint: Checkpoint) -> None:
    sounds = [tiny.noise(seed, seconds) for seed, seconds in SOUNDS.values()]
    texts = [[checkpoint.expected(samples, **way)[0] for samples in sounds] for way in WAYS.values()]
    assert len({str(each) for each in texts}) == len(WAYS)
    assert all(len(set(each)) == len(SOUNDS) for each in texts[:3])
    assert any(len(text) > 20 for each in texts for text in each)


def test_what_is_streamed_is_what_is_answered(server: Server) -> None:
    for seed, seconds in SOUNDS.values():
        audio = wav(tiny.noise(seed, seconds))
        pieces, done = streamed(server, audio)
        answer = ask(server, audio).json()
        assert "".join(pieces) == done["text"] == answer["text"]
        assert done["usage"] == answer["usage"]
        assert len(pieces) > 1 or len(done["text"]) < 5


def test_requests_at_once_are_answered_as_alone(server: Server) -> None:
    asked = [(wav(tiny.noise(seed, seconds)), way) for seed, seconds in SOUNDS.values() for way in WAYS.values()]
    alone = [ask(server, audio, **way).json() for audio, way in asked]
    with ThreadPoolExecutor(len(asked)) as pool:
        together = list(pool.map(lambda each: ask(server, each[0], **each[1]).json(), asked))
    assert together == alone


def test_a_caller_that_goes_away_frees_its_request(server: Server) -> None:
    """Whatever stage it is in: the first waits for its answer, the second has begun to get it."""
    audio = wav(tiny.noise(11, 120.0))
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{server.url}/v1/audio/transcriptions",
            data={"model": NAME},
            files={"file": ("a.wav", audio)},
            timeout=httpx.Timeout(60, read=1.0),
        )
    wait_for_rest(server)
    fields = {"model": NAME, "stream": "true"}
    address = f"{server.url}/v1/audio/transcriptions"
    with httpx.stream("POST", address, data=fields, files={"file": ("a.wav", audio)}, timeout=60) as response:
        lines = response.iter_lines()
        assert "transcript.text.delta" in next(lines)
        assert server.gauges()["sgl_omni_requests_in_flight"] == 1
    wait_for_rest(server)
    assert ask(server, wav(tiny.noise(3, 1.0))).status_code == 200


def wait_for_rest(server: Server, seconds: float = 20.0) -> None:
    """Until no stage holds anything of any request."""
    end = time.monotonic() + seconds
    while True:
        gauges = server.gauges()
        held = ("requests_in_flight", "instance_asr_engine_running", "instance_asr_engine_kv_used_tokens")
        if not any(gauges[f"sgl_omni_{name}"] for name in (*held, "instance_asr_engine_source_places_used")):
            return
        assert time.monotonic() < end, gauges
        time.sleep(0.05)


def test_subtitles_are_made_of_the_segments(server: Server) -> None:
    audio = wav(tiny.noise(7, 6.3))
    segments = ask(server, audio, timestamps=True).json()["segments"]
    shown = [" ".join(each["text"].split()) for each in segments]
    blocks = ask(server, audio, response_format="srt").text.strip().split("\n\n")
    assert [block.split("\n", 2)[2] for block in blocks] == shown
    cues = ask(server, audio, response_format="vtt").text.strip().split("\n\n")[1:]
    assert len(cues) == len(blocks)
    assert ask(server, audio, response_format="text").text.strip() == ask(server, audio).json()["text"]


def test_a_prompt_and_a_limit_reach_the_model(server: Server, checkpoint: Checkpoint) -> None:
    samples = tiny.noise(3, 1.0)
    history = TextTokenizer.load(checkpoint.folder).encode(" Ada Lovelace")
    text, _ = checkpoint.expected(samples, language="en", history=history)
    assert ask(server, wav(samples), language="en", prompt="Ada Lovelace").json()["text"] == text
    cut = ask(server, wav(samples), language="en", max_new_tokens=3, prompt="Ada Lovelace").json()
    assert cut["usage"]["output_tokens"] <= 3
    assert cut["usage"]["input_token_details"] == {"audio_tokens": 50, "text_tokens": len(history)}
    assert cut["usage"]["input_tokens"] == 50 + len(history)


def test_a_seed_repeats_what_a_temperature_draws(server: Server) -> None:
    audio = wav(tiny.noise(5, 1.7))
    drawn = [ask(server, audio, temperature=1.0, seed=seed).json()["text"] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


BROKEN: dict[str, tuple[bytes, str]] = {
    "text": (b"this is no sound", "cannot be read"),
    "empty": (wav(np.zeros(0, np.float32)), "the audio is empty"),
    "not finite": (wav(np.full(100, np.nan, np.float32)), "not finite"),
    "a header": (wav(tiny.noise(0, 0.1))[:20], "cannot be read"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_no_audio_is_the_callers_mistake(server: Server, kind: str) -> None:
    audio, words = BROKEN[kind]
    for fields in ({}, {"stream": "true"}):
        response = ask(server, audio, **fields)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "file")
        assert words in error["message"]


def test_ten_hours_are_refused_and_nothing_is_lost(server: Server) -> None:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(36_000 * 1000, np.float32), 1000, format="FLAC")
    response = ask(server, file.getvalue())
    assert response.status_code == 400
    assert "36000.0 s; the limit is 7200 s" in response.json()["error"]["message"]
    wait_for_rest(server)
    assert fetch(f"{server.url}/health").json()["status"] == "ready"


def test_the_official_client_works_unchanged(server: Server, checkpoint: Checkpoint) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    samples = tiny.noise(5, 1.7)
    text, segments = checkpoint.expected(samples, timestamps=True)
    file = ("a.wav", wav(samples))
    verbose = client.audio.transcriptions.create(model=NAME, file=file, response_format="verbose_json")
    assert verbose.text == text
    assert verbose.segments is not None
    assert [each.text for each in verbose.segments] == [each[2] for each in segments]
    events = list(client.audio.transcriptions.create(model=NAME, file=file, stream=True))
    assert events[-1].text == checkpoint.expected(samples)[0]
    with pytest.raises(openai.BadRequestError, match="choose from de, en, fr"):
        client.audio.transcriptions.create(model=NAME, file=file, language="ja")


def test_two_replicas_answer_the_same_and_share_the_work(
    server: Server, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    sounds = [wav(tiny.noise(seed, 2.2)) for seed in range(8)]
    alone = [ask(server, audio, timestamps=True).json() for audio in sounds]
    flags = ("--processes.asr.num_replicas", "2", "--processes.asr.replica_devices", "[0, 0]")
    arguments = ("--model-path", str(checkpoint.folder), "--name", NAME, "--platform", "cpu", *flags)
    with serving(*arguments, run_folder=tmp_path) as replicas, ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda audio: ask(replicas, audio, timestamps=True).json(), sounds))
        rows = [generated(replicas, f"asr@r{i}") for i in range(2)]
    assert together == alone
    assert min(rows) > 0


def generated(server: Server, instance: str) -> float:
    lines = fetch(f"{server.url}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if "generated_rows" in line and instance in line)


def test_replicas_share_their_decoder(server: Server, checkpoint: Checkpoint, tmp_path: Path) -> None:
    sounds: Sequence[bytes] = [wav(tiny.noise(seed, 1.5)) for seed in range(4)]
    flags = ("--processes.asr.num_replicas", "2", "--processes.asr.replica_devices", "[0, 0]", "--weight_share", "on")
    pool = ("--asr_engine.engine.max_total_tokens", "1024")
    arguments = ("--model-path", str(checkpoint.folder), "--name", NAME, "--platform", "cpu", *flags, *pool)
    with serving(*arguments, run_folder=tmp_path) as replicas:
        shared = [ask(replicas, audio).json() for audio in sounds]
        roles = {name: replicas.instance(name)["weights"]["role"] for name in ("asr@r0", "asr@r1", "text")}
    assert shared == [ask(server, audio).json() for audio in sounds]
    assert roles == {"asr@r0": "leader", "asr@r1": "follower", "text": "own"}
