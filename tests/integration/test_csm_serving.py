"""CSM behind HTTP: real processes on the CPU platform and a tiny checkpoint, held against transformers."""

from __future__ import annotations

import base64
import io
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile
import torch

from servers import ROOT, Server, fetch, serving
from sgl_omni.audio.decode import decode_audio

pytest.importorskip("transformers")
sys.path.insert(0, str(ROOT / "tests"))
from tiny_csm import FRAME, RATE, TEXTS, Tiny, build, recording

FRAMES = 12
TOLERANCE = 2 / 32768
"""Rounding of the codec in pieces, and of 16-bit samples."""
OPTIONS = ("--tts_engine.engine.max_total_tokens", "4096", "--tts_engine.factory.default_max_frames", str(FRAMES))
BUDGET = ("--tts_engine.gpu_memory_fraction", "0.4")
REPLICAS = ("--processes.pipeline.num_replicas", "2", "--processes.pipeline.replica_devices", "0,0", *BUDGET)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    torch.set_num_threads(1)
    return build(tmp_path_factory.mktemp("csm"), FRAMES)


@pytest.fixture(scope="module")
def server(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving("--model-path", str(tiny.folder), *OPTIONS, run_folder=tmp_path_factory.mktemp("run")) as found:
        yield found


@pytest.fixture(scope="module")
def expected(tiny: Tiny) -> list[np.ndarray]:
    return [tiny.audio(tiny.codes(text, FRAMES)) for text in TEXTS]


def post(server: Server, text: str, **fields: Any) -> httpx.Response:
    model = fetch(f"{server.url}/v1/models").json()["data"][0]["id"]
    body = {"model": model, "input": text, "temperature": 0, "response_format": "wav", **fields}
    return httpx.post(f"{server.url}/v1/audio/speech", json=body, timeout=120)


def speak(server: Server, text: str, **fields: Any) -> np.ndarray:
    response = post(server, text, **fields)
    assert response.status_code == 200, response.text
    if fields.get("response_format") == "pcm":
        return np.frombuffer(response.content, "<i2")
    samples, rate = soundfile.read(io.BytesIO(response.content), dtype="int16")
    assert rate == RATE
    return samples


def is_near(found: np.ndarray, wanted: np.ndarray) -> bool:
    return found.shape == wanted.shape and bool(np.abs(found / 32768 - wanted).max() <= TOLERANCE)


@pytest.fixture(scope="module")
def alone(server: Server) -> list[np.ndarray]:
    return [speak(server, text) for text in TEXTS]


def test_the_audio_is_that_of_transformers(alone: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert len({len(audio) for audio in expected}) > 1
    assert all(0.1 < np.abs(audio).max() < 1 for audio in expected)
    assert all(is_near(found, wanted) for found, wanted in zip(alone, expected, strict=True))


def test_another_speaker_and_recordings_are_heard(server: Server, tiny: Tiny) -> None:
    codes = tiny.codes(TEXTS[0], FRAMES, "7")
    assert is_near(speak(server, TEXTS[0], voice="7"), tiny.audio(codes))
    files = [recording(0.3, 16000), recording(0.2, seed=1)]
    words = ["Good night.", "Why not?"]
    heard = [(said, decode_audio(file, RATE, param="")) for said, file in zip(words, files, strict=True)]
    given = [{"audio": base64.b64encode(f).decode(), "text": said} for f, said in zip(files, words, strict=True)]
    wanted = tiny.codes(TEXTS[0], FRAMES, heard=heard)
    assert wanted.tolist() != codes.tolist() != tiny.codes(TEXTS[0], FRAMES).tolist()
    assert is_near(speak(server, TEXTS[0], references=given), tiny.audio(wanted))


def test_streamed_and_whole_audio_are_the_same_bits(server: Server, alone: list[np.ndarray]) -> None:
    for text, audio in zip(TEXTS, alone, strict=True):
        assert np.array_equal(speak(server, text, response_format="pcm"), audio)
        assert np.array_equal(speak(server, text, stream=False), audio)


def test_many_at_once_give_the_audio_of_each_alone(server: Server, alone: list[np.ndarray]) -> None:
    assert_same_together(server, alone)


def assert_same_together(server: Server, alone: list[np.ndarray]) -> None:
    with ThreadPoolExecutor(10) as pool:
        together = list(pool.map(lambda i: speak(server, TEXTS[i % len(TEXTS)]), range(10)))
    for i, audio in enumerate(together):
        assert np.array_equal(audio, alone[i % len(TEXTS)])


def test_two_replicas_with_shared_weights_too(tiny: Tiny, alone: list[np.ndarray], tmp_path: Path) -> None:
    config = str(ROOT / "examples/configs/csm.yaml")
    layout = ("--config", config, "--model-path", str(tiny.folder), *OPTIONS, *REPLICAS, "--weight_share", "on")
    with serving(*layout, run_folder=tmp_path) as replicas:
        assert_same_together(replicas, alone)
        weights: list[Any] = [replicas.instance(f"pipeline@r{i}")["weights"] for i in range(2)]
    assert [found["role"] for found in weights] == ["leader", "follower"]


@pytest.mark.slow
def test_the_audit_passes(tiny: Tiny, tmp_path: Path) -> None:
    drawn = {"temperature": 1.2, "seed": 3}
    payloads = [{"input": text, **options} for text in TEXTS[:3] for options in ({"temperature": 0.0}, drawn)]
    (tmp_path / "payloads.jsonl").write_text("\n".join(map(json.dumps, payloads)))
    command = [sys.executable, "-m", "sgl_omni.cli.main", "audit", str(tiny.folder), "--platform", "cpu", "--json"]
    command += ["--rounds", "1", "--payloads", str(tmp_path / "payloads.jsonl"), *OPTIONS, *BUDGET]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.stdout, done.stderr
    verdict = json.loads(done.stdout)
    assert (done.returncode, verdict["passed"], verdict["problems"]) == (0, True, [])
    assert verdict["backend"] == "shm"


def test_a_seed_makes_sampling_reproducible(server: Server) -> None:
    options = {"temperature": 1.5, "top_k": 20}
    first = speak(server, TEXTS[2], seed=5, **options)
    assert np.array_equal(first, speak(server, TEXTS[2], seed=5, **options))
    assert not np.array_equal(first, speak(server, TEXTS[2], seed=6, **options))


def test_speed_and_length(server: Server, alone: list[np.ndarray]) -> None:
    longest = max(range(len(TEXTS)), key=lambda i: len(alone[i]))
    assert len(speak(server, TEXTS[longest], max_new_tokens=5)) == 5 * FRAME
    assert len(speak(server, TEXTS[longest], speed=2.0)) == len(alone[longest]) // 2


def test_what_the_caller_may_not_ask(server: Server) -> None:
    wrong = {"audio": base64.b64encode(recording(0.1)).decode()}
    for fields, param in (
        ({"voice": "nobody"}, "voice"),
        ({"max_new_tokens": 5000}, "max_new_tokens"),
        ({"references": [wrong]}, "references[0].text"),
        ({"references": [{**wrong, "text": "a"}] * 9}, "references"),
    ):
        response = post(server, "Hi.", **fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_a_caller_that_goes_away_frees_its_place(server: Server, alone: list[np.ndarray]) -> None:
    longest = max(range(len(TEXTS)), key=lambda i: len(alone[i]))
    model = fetch(f"{server.url}/v1/models").json()["data"][0]["id"]
    body = {"model": model, "input": TEXTS[longest], "temperature": 1.0, "seed": 1, "max_new_tokens": 200}
    with httpx.stream("POST", f"{server.url}/v1/audio/speech", json=body | {"response_format": "pcm"}) as response:
        next(response.iter_raw())
    end = time.monotonic() + 60
    while any(i["in_flight"] for i in fetch(f"{server.url}/health").json()["instances"]):
        assert time.monotonic() < end, "the request is still there"
        time.sleep(0.05)
    assert np.array_equal(speak(server, TEXTS[longest]), alone[longest])


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def truncated(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def of_another_architecture(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["VitsModel"]}))


BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "no weights": (without("model.safetensors"), "model.safetensors is missing"),
    "truncated weights": (truncated, "truncated or damaged"),
    "no tokenizer": (without("tokenizer.json"), "holds no tokenizer"),
    "another architecture": (of_another_architecture, "architectures is ['VitsModel']"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_checkpoint_ends_the_start_by_name(tiny: Tiny, tmp_path: Path, case: str) -> None:
    spoil, message = BAD[case]
    folder = tmp_path / "model"
    shutil.copytree(tiny.folder, folder)
    spoil(folder)
    config = str(ROOT / "examples/configs/csm.yaml")
    command = [sys.executable, "-m", "sgl_omni.cli.main", "serve", "--port", "0", "--config", config]
    done = subprocess.run([*command, "--model-path", str(folder), *OPTIONS], capture_output=True, text=True, timeout=60)
    said = " ".join((done.stderr + done.stdout).split())
    assert done.returncode != 0
    assert message in said and str(folder) in said
