"""Qwen3-ASR over HTTP in real processes: a tiny checkpoint in its authors' layout, held against transformers."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile

from servers import Server, fetch, serving

pytest.importorskip("transformers.models.qwen3_asr")

import tiny_qwen3_asr as tiny

from sgl_omni.audio.windows import cut_at_quiet_places

NAME = "tiny-asr"
SOUNDS = {"short": (1, 0.3), "one window": (3, 1.4), "long": (5, 4.0)}
WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "in German": {"language": "de"},
    "with context": {"prompt": "Ada Lovelace"},
}
FLAGS = ("--preprocessing.factory.window_seconds", str(tiny.WINDOW), "--name", NAME, "--platform", "cpu")
REPLICAS = ("--processes.asr.num_replicas", "2", "--processes.asr.replica_devices", "[0, 0]", "--weight_share", "on")
POOL = ("--asr_engine.engine.max_total_tokens", "4096")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tiny.Reference:
    return tiny.build(tmp_path_factory.mktemp("qwen3_asr"))


@pytest.fixture(scope="module")
def server(reference: tiny.Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = ("--model-path", str(reference.folder), *FLAGS)
    with serving(*arguments, run_folder=tmp_path_factory.mktemp("run")) as found:
        yield found


def wav(samples: np.ndarray) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, tiny.RATE, format="WAV", subtype="FLOAT")
    return file.getvalue()


def ask(server: Server, samples: np.ndarray, **fields: Any) -> httpx.Response:
    files = {"file": ("a.wav", wav(samples))}
    return httpx.post(f"{server.url}/v1/audio/transcriptions", data={"model": NAME, **fields}, files=files, timeout=120)


def test_answers_are_what_transformers_says(server: Server, reference: tiny.Reference) -> None:
    for (seed, seconds), way in ((sound, way) for sound in SOUNDS.values() for way in WAYS.values()):
        samples = tiny.noise(seed, seconds)
        response = ask(server, samples, response_format="verbose_json", **way)
        assert response.status_code == 200, response.text
        answer = response.json()
        spans = [(a / tiny.RATE, b / tiny.RATE) for a, b in cut_at_quiet_places(samples, tiny.RATE, tiny.WINDOW)]
        windows = reference.windows(samples, **way)
        texts = [text_of(reference, ids, way) for ids in windows]
        found = [(each["start"], each["end"], each["text"]) for each in answer["segments"]]
        assert found == [(*span, text) for span, text in zip(spans, texts, strict=True) if text]
        assert answer["text"] == " ".join(text for text in texts if text)
        assert answer["duration"] == len(samples) / tiny.RATE
        assert "language" not in way or answer["language"] == way["language"]
        usage = ask(server, samples, **way).json()["usage"]
        details = usage["input_token_details"]
        assert usage["output_tokens"] == sum(len(each["tokens"]) for each in answer["segments"])
        assert usage["input_tokens"] == details["audio_tokens"] + details["text_tokens"]
        assert details["audio_tokens"] > 0 and (details["text_tokens"] > 0) == ("prompt" in way)


def text_of(reference: tiny.Reference, ids: list[int], way: dict[str, Any]) -> str:
    said = reference.decode(ids)
    mark = reference.processor.tokenizer.convert_tokens_to_ids(tiny.MARK)
    if "language" not in way and mark in ids[:25]:
        said = said.split(tiny.MARK, 1)[1]
    return said.strip()


def test_what_is_streamed_is_what_is_answered(server: Server) -> None:
    for seed, seconds in SOUNDS.values():
        samples = tiny.noise(seed, seconds)
        for way in WAYS.values():
            response = ask(server, samples, stream="true", **way)
            events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
            answer = ask(server, samples, **way).json()
            assert "".join(each["delta"] for each in events[:-1]) == events[-1]["text"] == answer["text"]
            assert events[-1]["usage"] == answer["usage"]
            if way.get("language") and seconds > 1:
                assert len(events) > 3, "without a header to wait for, text comes as it is said"


def test_requests_at_once_are_answered_as_alone(server: Server) -> None:
    asked = [(tiny.noise(seed, seconds), way) for seed, seconds in SOUNDS.values() for way in WAYS.values()]
    alone = [ask(server, samples, **way).json() for samples, way in asked]
    with ThreadPoolExecutor(len(asked)) as pool:
        together = list(pool.map(lambda each: ask(server, each[0], **each[1]).json(), asked))
    assert together == alone
    assert len({each["text"] for each in alone}) == len(asked)


def test_a_caller_that_goes_away_frees_its_request(server: Server) -> None:
    """Whatever stage it is in: the first waits for its answer, the second has begun to get it."""
    audio = wav(np.tile(tiny.noise(11, 20.0), 10))
    address, form = f"{server.url}/v1/audio/transcriptions", {"model": NAME, "stream": "true"}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(address, data={"model": NAME}, files={"file": ("a.wav", audio)}, timeout=httpx.Timeout(60, read=0.3))
    wait_for_rest(server)
    with httpx.stream("POST", address, data=form, files={"file": ("a.wav", audio)}, timeout=60) as response:
        lines = response.iter_lines()
        assert "transcript.text.delta" in next(lines)
        assert server.gauges()["sgl_omni_requests_in_flight"] == 1
    wait_for_rest(server)
    assert ask(server, tiny.noise(3, 1.0)).status_code == 200


def wait_for_rest(server: Server, seconds: float = 20.0) -> None:
    """Until no stage holds anything of any request."""
    end = time.monotonic() + seconds
    held = ("requests_in_flight", "instance_asr_engine_running", "instance_asr_engine_kv_used_tokens")
    while any((gauges := server.gauges())[f"sgl_omni_{name}"] for name in held):
        assert time.monotonic() < end, gauges
        time.sleep(0.05)


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "language": ({"language": "fr"}, "language", "choose from de, en, zh"),
    "subtitles": ({"response_format": "srt"}, "response_format", "knows no times"),
    "limit": ({"max_new_tokens": 0}, "max_new_tokens", "greater than or equal to 1"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_the_callers_mistakes_are_told(server: Server, kind: str) -> None:
    fields, param, words = REFUSED[kind]
    response = ask(server, tiny.noise(1, 0.3), **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert words in response.json()["error"]["message"]


def test_what_is_no_audio_is_refused_and_no_translation_is_offered(server: Server) -> None:
    response = ask(server, np.zeros(0, np.float32))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "file")
    address = f"{server.url}/v1/audio/translations"
    assert httpx.post(address, data={"model": NAME}, files={"file": ("a.wav", b"x")}).status_code == 404


def test_a_seed_repeats_what_a_temperature_draws(server: Server) -> None:
    drawn = [ask(server, tiny.noise(3, 1.4), temperature=1.0, seed=seed).json()["text"] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_the_benchmark_hears_it_all(server: Server, tmp_path: Path) -> None:
    for seed, seconds in ((1, 0.5), (3, 1.5)):
        (tmp_path / f"{seed}.wav").write_bytes(wav(tiny.noise(seed, seconds)))
    out = tmp_path / "out.json"
    asked = ("--audio", str(tmp_path), "--model", NAME, "--language", "de", "--concurrency", "2", "--out", str(out))
    command = [sys.executable, "-m", "sgl_omni.cli.main", "bench", "transcription", "--url", server.url, *asked]
    done = subprocess.run([*command, "--warmup", "0.3", "--seconds", "2"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    level = json.loads(out.read_text())["levels"][0]
    assert level["errors"] == 0 and level["requests"] >= 2 and "| 2 callers each |" in done.stdout
    assert 0.5 <= level["mean_audio_s"] <= 1.5 and level["tokens_per_s"] > level["requests_per_s"]
    assert 0.5 <= level["audio_s_per_s"] / level["requests_per_s"] <= 1.5
    assert 0 < level["ttft"]["p50"] <= level["latency"]["p50"]
    assert level["latency"]["p50"] / 1.5 <= level["rtf"]["max"]
    nobody = subprocess.run([*command, "--audio", str(tmp_path / "none")], capture_output=True, text=True, timeout=60)
    assert nobody.returncode == 2 and "none" in nobody.stderr


def test_replicas_share_weights_and_answer_the_same(server: Server, reference: tiny.Reference, tmp_path: Path) -> None:
    sounds = [tiny.noise(seed, 2.2) for seed in range(6)]
    alone = [ask(server, samples).json() for samples in sounds]
    arguments = ("--model-path", str(reference.folder), *FLAGS, *REPLICAS, *POOL)
    with serving(*arguments, run_folder=tmp_path) as replicas, ThreadPoolExecutor(3) as pool:
        together = list(pool.map(lambda samples: ask(replicas, samples).json(), sounds))
        roles = [replicas.instance(f"asr@r{i}")["weights"]["role"] for i in range(2)]  # type: ignore[index]
        rows = [generated(replicas, f"asr@r{i}") for i in range(2)]
    assert together == alone
    assert roles == ["leader", "follower"]
    assert min(rows) > 0


def generated(server: Server, instance: str) -> float:
    lines = fetch(f"{server.url}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if "generated_rows" in line and instance in line)


def test_a_bad_checkpoint_stops_the_start_by_name(reference: tiny.Reference, tmp_path: Path) -> None:
    for file in reference.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64])
    broken = Server("--model-path", str(tmp_path), *FLAGS, run_folder=tmp_path)
    assert broken.wait(60) != 0
    assert f"{weights} has" in broken.log and "truncated" in broken.log
