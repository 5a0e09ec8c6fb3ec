"""MOSS-TTS-Local behind HTTP: real processes on the CPU platform, and a tiny checkpoint in real format."""

from __future__ import annotations

import asyncio
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
import torch

from running import Start
from servers import Server, fetch, serving
from sgl_omni.config.load import load_config
from sgl_omni.errors import InvalidRequest
from sgl_omni.models.registry import PipelineRegistry
from sgl_omni.topology.builder import build_plan
from sgl_omni.topology.host import virtual_host

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny_moss import BOOKS, FRAME, RATE, TEXTS, Tiny, build, recording

FRAMES = 24
TOLERANCE = 3 / 32768
"""Rounding of the codec in pieces, and of 16-bit samples."""
REPLICAS = """
config_cls: MossTTSLocalPipelineConfig
model_path: {model}
stages:
  tts_engine:
    gpu: 0
    gpu_memory_fraction: 0.3
    engine: {{max_total_tokens: 2048}}
    factory: {{default_max_frames: 24}}
processes:
  pipeline: {{num_replicas: 2, replica_devices: [0, 0]}}
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    torch.set_num_threads(1)
    return build(tmp_path_factory.mktemp("moss"))


@pytest.fixture(scope="module")
def server(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = f"--max-total-tokens 4096 --tts_engine.factory.default_max_frames {FRAMES}".split()
    with serving("--model-path", str(tiny.folder), *options, run_folder=tmp_path_factory.mktemp("run")) as found:
        yield found


@pytest.fixture(scope="module")
def replicas_config(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("config") / "moss.yaml"
    file.write_text(REPLICAS.format(model=tiny.folder))
    return file


@pytest.fixture(scope="module")
def expected(tiny: Tiny) -> list[np.ndarray]:
    return [tiny.spoken(tiny.prompt(text), FRAMES).clip(-1, 1) for text in TEXTS]


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


@pytest.fixture(scope="module")
def alone(server: Server) -> list[np.ndarray]:
    return [speak(server, text) for text in TEXTS]


def test_the_audio_is_that_of_the_plain_model(alone: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert len({len(audio) for audio in expected}) > 1
    for found, wanted in zip(alone, expected, strict=True):
        assert len(found) == len(wanted)
        assert np.abs(found / 32768 - wanted).max() <= TOLERANCE
        assert np.abs(wanted).max() > 0.01


def test_streamed_and_whole_audio_are_the_same_bits(server: Server, alone: list[np.ndarray]) -> None:
    for text, audio in zip(TEXTS, alone, strict=True):
        assert np.array_equal(speak(server, text, response_format="pcm"), audio)
        assert np.array_equal(speak(server, text, stream=False), audio)


def test_many_at_once_give_the_audio_of_each_alone(server: Server, alone: list[np.ndarray]) -> None:
    with ThreadPoolExecutor(10) as pool:
        together = list(pool.map(lambda i: speak(server, TEXTS[i % len(TEXTS)]), range(10)))
    for i, audio in enumerate(together):
        assert np.array_equal(audio, alone[i % len(TEXTS)])


def test_replicas_with_shared_weights_too(replicas_config: Path, alone: list[np.ndarray], tmp_path: Path) -> None:
    with serving("--config", str(replicas_config), "--weight-share", "on", run_folder=tmp_path) as replicas:
        with ThreadPoolExecutor(10) as pool:
            together = list(pool.map(lambda i: speak(replicas, TEXTS[i % len(TEXTS)]), range(10)))
        shared = [replicas.instance(f"pipeline@r{i}")["weights"] for i in range(2)]
    assert all(weights for weights in shared)
    for i, audio in enumerate(together):
        assert np.array_equal(audio, alone[i % len(TEXTS)])


@pytest.mark.slow
def test_the_audit_passes(replicas_config: Path, tmp_path: Path) -> None:
    lines = tmp_path / "payloads.jsonl"
    drawn = {"temperature": 1.2, "seed": 3}
    payloads = [{"input": text, **options} for text in TEXTS[:3] for options in ({"temperature": 0.0}, drawn)]
    lines.write_text("\n".join(map(json.dumps, payloads)))
    command = [sys.executable, "-m", "sgl_omni.cli.main", "audit", "--platform", "cpu", "--json", "--rounds", "1"]
    command += ["--config", str(replicas_config), "--payloads", str(lines)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.stdout, done.stderr
    verdict = json.loads(done.stdout)
    assert (done.returncode, verdict["passed"], verdict["problems"]) == (0, True, [])
    assert verdict["backend"] == "shm"


def test_a_seed_makes_sampling_reproducible(server: Server) -> None:
    options = {"temperature": 1.5, "top_k": 20}
    first = speak(server, TEXTS[1], seed=5, **options)
    assert np.array_equal(first, speak(server, TEXTS[1], seed=5, **options))
    assert not np.array_equal(first, speak(server, TEXTS[1], seed=6, **options))


def test_speed_and_length(server: Server, alone: list[np.ndarray]) -> None:
    longest = max(range(len(TEXTS)), key=lambda i: len(alone[i]))
    assert len(speak(server, TEXTS[longest], max_new_tokens=5)) == 5 * FRAME
    assert len(speak(server, TEXTS[longest], speed=2.0)) == len(alone[longest]) // 2


def test_what_the_caller_may_not_ask(server: Server) -> None:
    for fields, param in (({"voice": "nobody"}, "voice"), ({"max_new_tokens": 5000}, "max_new_tokens")):
        response = post(server, "Hi.", **fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_a_caller_that_goes_away_frees_its_place(server: Server, expected: list[np.ndarray]) -> None:
    longest = max(range(len(TEXTS)), key=lambda i: len(expected[i]))
    model = fetch(f"{server.url}/v1/models").json()["data"][0]["id"]
    body = {"model": model, "input": TEXTS[longest], "temperature": 1.0, "seed": 1, "max_new_tokens": 300}
    with httpx.stream("POST", f"{server.url}/v1/audio/speech", json=body | {"response_format": "pcm"}) as response:
        next(response.iter_raw())
    end = time.monotonic() + 60
    while any(i["in_flight"] for i in fetch(f"{server.url}/health").json()["instances"]):
        assert time.monotonic() < end, "the request is still there"
        time.sleep(0.05)
    assert len(speak(server, TEXTS[longest])) == len(expected[longest])


async def test_a_reference_voice_is_heard(start: Start, tiny: Tiny) -> None:
    """The pipeline itself, as the payload is what the route hands on."""
    flags = ["--max-total-tokens", "2048", "--tts_engine.factory.default_max_frames", str(FRAMES)]
    resolved = load_config(None, flags, registry=PipelineRegistry(), model_path=str(tiny.folder))
    pipeline = await start(build_plan(resolved, virtual_host(), {}))
    file = recording(0.1, channels=2)
    samples, _ = soundfile.read(io.BytesIO(file), dtype="float32", always_2d=True)
    gain = 10 ** (min(3.0, max(-3.0, -20 - 10 * np.log10(np.mean(samples**2) + 1e-9))) / 20)
    codes = tiny.codec.encode(torch.from_numpy(samples.T * np.float32(gain)))
    assert codes.shape == (800 // FRAME, BOOKS)
    wanted = tiny.spoken(tiny.prompt(TEXTS[1], codes, language="English"), FRAMES).clip(-1, 1)

    async def speak(**fields: Any) -> tuple[np.ndarray, dict[str, Any]]:
        payload = {"input": TEXTS[1], "voice": None, "speed": 1.0, "temperature": 0.0, "language": "English"}
        handle = pipeline.submit(payload | fields)
        audio = [chunk.payload["audio"] async for chunk in handle]
        return np.concatenate(audio), (await handle.result())["vocoder"]

    heard = {"references": [{"audio": file, "text": "Noise."}]}
    for found, result in await asyncio.gather(speak(**heard), speak(**heard)):
        assert found.dtype == np.float32 and np.abs(found - wanted).max() <= TOLERANCE
        assert result["output_tokens"] == len(wanted) // FRAME
        assert result["input_tokens"] == len(tiny.prompt(TEXTS[1], codes, language="English"))
    plain, _ = await speak()
    assert len(plain) != len(wanted) or np.abs(plain - wanted).max() > 0.01
    with pytest.raises(InvalidRequest, match="cannot be read"):
        await speak(references=[{"audio": b"no audio", "text": None}])
