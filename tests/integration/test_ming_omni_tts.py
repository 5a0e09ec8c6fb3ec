"""Ming-Omni-TTS behind HTTP: real processes on the CPU platform, and a tiny checkpoint in real format."""

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
from sgl_omni.audio.decode import resample
from sgl_omni.config.load import load_config
from sgl_omni.errors import InvalidRequest
from sgl_omni.models.registry import PipelineRegistry
from sgl_omni.topology.builder import build_plan
from sgl_omni.topology.host import virtual_host

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny_ming import CAPTION, LATENT, PATCH, RATE, SPEAKER_RATE, STEP, TEXTS, PlainSpeakers, Tiny, build
from tiny_moss import recording

STEPS = 8
TOLERANCE = 5e-4
"""Rounding in batches, which a step hands on to the next, and of 16-bit samples."""
REPLICAS = """
config_cls: MingOmniTTSPipelineConfig
model_path: {model}
stages:
  tts_engine:
    gpu: 0
    gpu_memory_fraction: 0.3
    engine: {{max_total_tokens: 2048}}
    factory: {{default_max_steps: 8}}
processes:
  pipeline: {{num_replicas: 2, replica_devices: [0, 0]}}
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    torch.set_num_threads(1)
    return build(tmp_path_factory.mktemp("ming"))


@pytest.fixture(scope="module")
def server(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = f"--max-total-tokens 4096 --tts_engine.factory.default_max_steps {STEPS}".split()
    with serving("--model-path", str(tiny.folder), *options, run_folder=tmp_path_factory.mktemp("run")) as found:
        yield found


@pytest.fixture(scope="module")
def expected(tiny: Tiny) -> list[np.ndarray]:
    """What the plain model says, with the text's number as seed."""
    return [spoken(tiny, *tiny.prompt(text), seed=i) for i, text in enumerate(TEXTS)]


def spoken(
    tiny: Tiny,
    ids: list[int],
    at: int,
    seed: int,
    heard: torch.Tensor | None = None,
    speaker: torch.Tensor | None = None,
) -> np.ndarray:
    heard = torch.zeros(0, LATENT) if heard is None else heard
    latents = tiny.model.latents(ids, at, heard, seed, STEPS, speaker=speaker)
    return tiny.model.audio.decode(latents).clamp(-1, 1).numpy()


def post(server: Server, text: str, **fields: Any) -> httpx.Response:
    model = fetch(f"{server.url}/v1/models").json()["data"][0]["id"]
    body = {"model": model, "input": text, "response_format": "wav", **fields}
    return httpx.post(f"{server.url}/v1/audio/speech", json=body, timeout=120)


def speak(server: Server, text: str, **fields: Any) -> np.ndarray:
    response = post(server, text, **fields)
    assert response.status_code == 200, response.text
    if fields.get("response_format") == "pcm":
        return np.frombuffer(response.content, "<i2")
    samples, rate = soundfile.read(io.BytesIO(response.content), dtype="int16")
    assert rate == RATE
    return samples


def speak_ten(server: Server) -> list[np.ndarray]:
    with ThreadPoolExecutor(10) as pool:
        return list(pool.map(lambda i: speak(server, TEXTS[i % len(TEXTS)], seed=i % len(TEXTS)), range(10)))


def test_the_audio_is_that_of_the_plain_model(server: Server, expected: list[np.ndarray]) -> None:
    for i, text in enumerate(TEXTS):
        found = speak(server, text, seed=i)
        assert len(found) == len(expected[i])
        assert np.abs(found / 32768 - expected[i]).max() <= TOLERANCE
        assert np.abs(expected[i]).max() > 0.01


def test_streamed_and_whole_audio_are_the_same_bits(server: Server) -> None:
    streamed = speak(server, TEXTS[1], seed=1, response_format="pcm")
    assert np.array_equal(streamed, speak(server, TEXTS[1], seed=1, stream=False))


def test_many_at_once_give_the_audio_of_each_alone(server: Server, expected: list[np.ndarray]) -> None:
    for i, found in enumerate(speak_ten(server)):
        assert np.abs(found / 32768 - expected[i % len(TEXTS)]).max() <= TOLERANCE


def test_replicas_with_shared_weights_too(tiny: Tiny, expected: list[np.ndarray], tmp_path: Path) -> None:
    config = tmp_path / "ming.yaml"
    config.write_text(REPLICAS.format(model=tiny.folder))
    (tmp_path / "run").mkdir()
    with serving("--config", str(config), "--weight-share", "on", run_folder=tmp_path / "run") as replicas:
        together = speak_ten(replicas)
        weights: list[Any] = [replicas.instance(f"pipeline@r{i}")["weights"] for i in range(2)]
    assert [found["role"] for found in weights] == ["leader", "follower"]
    for i, found in enumerate(together):
        assert np.abs(found / 32768 - expected[i % len(TEXTS)]).max() <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("experts", [False, True])
def test_the_audit_passes(tiny: Tiny, tmp_path: Path, experts: bool) -> None:
    """With pages that no prompt fills: beside a part that was found again, products round otherwise."""
    folder = build(tmp_path, experts=True).folder if experts else tiny.folder
    command = [sys.executable, "-m", "sgl_omni.cli.main", "audit", str(folder), "--platform", "cpu", "--json"]
    command += ["--rounds", "1", "--max-total-tokens", "8192", "--tts_engine.gpu_memory_fraction", "0.3"]
    command += ["--tts_engine.factory.default_max_steps", str(STEPS), "--tts_engine.engine.page_size", "512"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.stdout, done.stderr
    verdict = json.loads(done.stdout)
    assert (done.returncode, verdict["passed"], verdict["problems"]) == (0, True, [])
    assert verdict["backend"] == "shm"


def test_seeds_speed_and_length(server: Server) -> None:
    assert not np.array_equal(speak(server, TEXTS[0], seed=1), speak(server, TEXTS[0], seed=2))
    assert len(speak(server, TEXTS[0], seed=1, max_new_tokens=3)) == 3 * STEP
    assert len(speak(server, TEXTS[0], seed=1, max_new_tokens=3, speed=2.0)) == 3 * STEP // 2


def test_what_the_caller_may_not_ask(server: Server) -> None:
    for fields, param in (({"voice": "nobody"}, "voice"), ({"max_new_tokens": 5000}, "max_new_tokens")):
        response = post(server, "Hi.", **fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_a_caller_that_goes_away_frees_its_place(server: Server) -> None:
    model = fetch(f"{server.url}/v1/models").json()["data"][0]["id"]
    body = {"model": model, "input": TEXTS[1], "seed": 1, "max_new_tokens": 200, "response_format": "pcm"}
    with httpx.stream("POST", f"{server.url}/v1/audio/speech", json=body) as response:
        next(response.iter_raw())
    end = time.monotonic() + 60
    while any(i["in_flight"] for i in fetch(f"{server.url}/health").json()["instances"]):
        assert time.monotonic() < end, "the request is still there"
        time.sleep(0.05)


@pytest.mark.parametrize("speakers", [False, True])
async def test_a_reference_and_a_style_are_heard(start: Start, tiny: Tiny, tmp_path: Path, speakers: bool) -> None:
    """The pipeline itself, as the payload is what the route hands on; the checkpoint with the model of speakers and
    without it."""
    if speakers:
        tiny = build(tmp_path, speakers=True)
    flags = ["--max-total-tokens", "2048", "--tts_engine.factory.default_max_steps", str(STEPS)]
    resolved = load_config(None, flags, registry=PipelineRegistry(), model_path=str(tiny.folder))
    pipeline = await start(build_plan(resolved, virtual_host(), {}))
    file = recording(0.1)
    samples, _ = soundfile.read(io.BytesIO(file), dtype="float32")
    speaker = PlainSpeakers().vector(resample(samples, RATE, SPEAKER_RATE)) if speakers else None
    padded = torch.from_numpy(np.pad(samples, (0, -len(samples) % STEP)))
    noise = torch.randn(len(padded) // STEP * PATCH, LATENT, generator=torch.Generator().manual_seed(4))
    heard = tiny.model.audio.encode(padded, noise)

    async def speak(**fields: Any) -> tuple[np.ndarray, dict[str, Any]]:
        handle = pipeline.submit({"input": TEXTS[1], "voice": None, "speed": 1.0, "seed": 4, **fields})
        audio = [chunk.payload["audio"] async for chunk in handle]
        return np.concatenate(audio), (await handle.result())["vocoder"]

    prompt = tiny.prompt(TEXTS[1], spoken="Noise.", speaker=speakers)
    wanted = spoken(tiny, *prompt, seed=4, heard=heard, speaker=speaker)
    reference = {"references": [{"audio": file, "text": "Noise."}]}
    for found, result in await asyncio.gather(speak(**reference), speak(**reference)):
        assert found.dtype == np.float32 and np.abs(found - wanted).max() <= TOLERANCE
        assert result["output_tokens"] == len(wanted) // STEP
    styled, _ = await speak(instructions="soft")
    prompt = tiny.prompt(TEXTS[1], caption=CAPTION)
    assert np.abs(styled - spoken(tiny, *prompt, seed=4)).max() <= TOLERANCE
    if speakers:
        reference = {"references": [{"audio": file, "text": None}]}
        styled_voice, _ = await speak(instructions="soft", **reference)
        assert np.abs(styled_voice - spoken(tiny, *prompt, seed=4, speaker=speaker)).max() <= TOLERANCE
        length = min(len(styled), len(styled_voice))
        assert np.abs(styled_voice[:length] - styled[:length]).max() > 10 * TOLERANCE
    with pytest.raises(InvalidRequest, match="cannot be read"):
        await speak(references=[{"audio": b"no audio", "text": "a"}])
