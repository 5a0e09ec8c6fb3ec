"""Qwen3-TTS over HTTP: tiny checkpoints in real processes, held against what the authors' own code made of them."""

from __future__ import annotations

import base64
import io
import json
import shutil
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

from servers import ROOT, Server, fetch, serving

sys.path.append(str(ROOT / "tests"))

import tiny_qwen3_tts as tiny

pytest.importorskip("transformers")

GOLDENS = np.load(tiny.DATA / "goldens.npz")
CASES: dict[str, dict[str, Any]] = json.loads((tiny.DATA / "cases.json").read_text())
FRAMES = 24
STEP = 1 / 32768
"""Audio travels as whole numbers of 16 bits."""
POOL = ("--tts_engine.engine.max_total_tokens", "2048")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: tiny.build(tmp_path_factory.mktemp(kind), kind) for kind in tiny.KINDS}


@pytest.fixture(scope="module")
def presets(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving("--model-path", str(folders["custom_voice"]), *POOL, run_folder=tmp_path_factory.mktemp("run")) as it:
        yield it


@pytest.fixture(scope="module")
def cloning(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two replicas of preprocessing and engine on one GPU, which share the engine's weights."""
    layout = ["--processes.pipeline.num_replicas", "2", "--processes.pipeline.replica_devices", "0,0"]
    layout += ["--tts_engine.gpu_memory_fraction", "0.4", "--weight_share", "on"]
    arguments = ("--model-path", str(folders["base"]), *POOL, *layout)
    with serving(*arguments, run_folder=tmp_path_factory.mktemp("run")) as it:
        yield it


def recording() -> str:
    file = io.BytesIO()
    soundfile.write(file, tiny.recording(), tiny.SAMPLE_RATE, format="WAV", subtype="FLOAT")
    return "data:audio/wav;base64," + base64.b64encode(file.getvalue()).decode()


def body(server: Server, case: dict[str, Any], **fields: Any) -> dict[str, Any]:
    model = fetch(f"{server.url}/v1/models").json()["data"][0]["id"]
    found = {"model": model, "input": case["text"], "temperature": 0.0, "max_new_tokens": FRAMES}
    given = {
        "voice": None if case.get("speaker") is None else case["speaker"].lower(),
        "language": None if case.get("language") is None else case["language"].lower(),
        "instructions": case.get("instruct"),
    }
    if case["kind"] == "base":
        reference = {"audio": recording()} | ({"text": case["ref_text"]} if "ref_text" in case else {})
        found["references"] = [reference]
    return found | {"response_format": "pcm"} | {k: v for k, v in given.items() if v is not None} | fields


def ask(server: Server, asked: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/audio/speech", json=asked, timeout=120)


def speak(server: Server, case: dict[str, Any], **fields: Any) -> np.ndarray:
    response = ask(server, body(server, case, **fields))
    assert response.status_code == 200, response.text
    assert response.headers["X-Sample-Rate"] == str(tiny.SAMPLE_RATE)
    return np.frombuffer(response.content, "<i2") if fields.get("response_format", "pcm") == "pcm" else response.content


def of_kind(kind: str) -> list[str]:
    return [name for name, case in CASES.items() if case["kind"] == kind]


def is_golden(audio: np.ndarray, name: str) -> bool:
    expected = GOLDENS[f"{name}/audio"]
    return audio.shape == expected.shape and bool(np.abs(audio * STEP - expected).max() < 1.5 * STEP)


@pytest.mark.parametrize("name", of_kind("custom_voice"))
def test_preset_voices_speak_as_the_authors_model_does(presets: Server, name: str) -> None:
    assert is_golden(speak(presets, CASES[name]), name)


@pytest.mark.parametrize("name", of_kind("base"))
def test_cloned_voices_do_too(cloning: Server, name: str) -> None:
    assert is_golden(speak(cloning, CASES[name]), name)


def test_many_at_once_are_as_alone_on_either_replica(cloning: Server) -> None:
    names = of_kind("base") * 3
    with ThreadPoolExecutor(len(names)) as pool:
        spoken = list(pool.map(lambda name: speak(cloning, CASES[name]), names))
    assert all(is_golden(audio, name) for audio, name in zip(spoken, names, strict=True))
    for audio, name in zip(spoken, names, strict=True):
        assert np.array_equal(audio, spoken[names.index(name)])
    assert [cloning.instance(name)["in_flight"] for name in ("pipeline@r0", "pipeline@r1")] == [0, 0]


def test_replicas_share_the_talkers_weights(cloning: Server) -> None:
    weights: list[Any] = [cloning.instance(name)["weights"] for name in ("pipeline@r0", "pipeline@r1")]
    assert [found["role"] for found in weights] == ["leader", "follower"]


def test_a_stream_is_the_whole_file_and_its_events_too(presets: Server) -> None:
    case = CASES["custom"]
    whole = speak(presets, case)
    asked = body(presets, case)
    with httpx.stream("POST", f"{presets.url}/v1/audio/speech", json=asked, timeout=60) as response:
        pieces = [piece for piece in response.iter_raw() if piece]
    assert np.array_equal(np.frombuffer(b"".join(pieces), "<i2"), whole)
    file = ask(presets, {**asked, "response_format": "wav", "stream": False}).content
    assert np.array_equal(soundfile.read(io.BytesIO(file), dtype="int16")[0], whole)
    text = ask(presets, {**asked, "stream_format": "sse"}).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    audio = b"".join(base64.b64decode(e["audio"]) for e in events if e["type"] == "speech.audio.delta")
    assert np.array_equal(np.frombuffer(audio, "<i2"), whole)
    assert sum(e["type"] == "speech.audio.delta" for e in events) >= 3
    prompt = len(GOLDENS["custom/prompt"])
    assert events[-1]["usage"] == {
        "input_tokens": prompt,
        "output_tokens": FRAMES,
        "total_tokens": prompt + FRAMES,
    }


def test_a_seed_makes_sampling_reproducible(presets: Server) -> None:
    case, options = CASES["custom"], {"temperature": 0.9, "top_p": 0.95, "max_new_tokens": 12}
    first = speak(presets, case, seed=5, **options)
    assert np.array_equal(first, speak(presets, case, seed=5, **options))
    assert not np.array_equal(first, speak(presets, case, seed=6, **options))


def test_a_caller_that_goes_away_frees_everything(presets: Server) -> None:
    asked = body(presets, {"kind": "custom_voice", "text": "It rains."}, max_new_tokens=400)
    before = aborted(presets)
    for _ in range(3):
        with httpx.stream("POST", f"{presets.url}/v1/audio/speech", json=asked, timeout=60) as response:
            next(response.iter_raw())
    end = time.monotonic() + 60
    while any(presets.instance(name)["in_flight"] for name in ("pipeline", "vocoder")):
        assert time.monotonic() < end, "requests of callers that have gone are still there"
        time.sleep(0.05)
    assert aborted(presets) > before
    assert is_golden(speak(presets, CASES["custom"]), "custom")


def aborted(server: Server) -> float:
    lines = fetch(f"{server.url}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if "requests_total" in line and "aborted" in line)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"references": None}, "references"),
        ({"references": [{"audio": "data:audio/wav;base64,AAAA"}]}, "references[0].audio"),
        ({"references": [{"audio": recording()}] * 2}, "references"),
        ({"language": "klingon"}, "language"),
        ({"voice": "vivian"}, "voice"),
        ({"input": " \n"}, "input"),
        ({"max_new_tokens": 4000}, None),
    ],
    ids=["no voice", "no audio", "two voices", "language", "voice", "no text", "too long"],
)
def test_what_cannot_be_spoken_is_the_callers_mistake(
    cloning: Server, fields: dict[str, Any], param: str | None
) -> None:
    response = ask(cloning, body(cloning, CASES["clone"], **fields))
    assert response.status_code == 400, response.text
    assert param is None or response.json()["error"]["param"] == param


def test_a_described_voice_behind_the_example_layout(folders: dict[str, Path], tmp_path: Path) -> None:
    config = str(ROOT / "examples/configs/qwen3_tts.yaml")
    model = ("--model-path", str(folders["voice_design"]))
    with serving("--config", config, *model, *POOL, run_folder=tmp_path) as server:
        for name in of_kind("voice_design"):
            assert is_golden(speak(server, CASES[name]), name)
        assert fetch(f"{server.url}/v1/audio/voices").json() == {"voices": [], "default": None}


def test_a_damaged_checkpoint_ends_the_start_by_name(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(folders["base"], folder)
    weights = folder / "speech_tokenizer" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    command = [sys.executable, "-m", "sgl_omni.cli.main", "serve", "--port", "0", "--model-path", str(folder), *POOL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert f"{weights} has" in done.stderr + done.stdout
    assert "truncated" in done.stderr + done.stdout
