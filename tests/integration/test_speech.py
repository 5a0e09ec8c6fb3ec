"""The main job: text over HTTP, real processes with replicas, and speech that a recogniser understands."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import soundfile

from listening import SENTENCES, word_error_rate
from servers import ROOT, Server, fetch, serving

EVERYDAY = SENTENCES[:20]
REPLICAS = str(ROOT / "examples/configs/demo_voice_replicas.yaml")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving("--model-path", "demo-voice", run_folder=tmp_path_factory.mktemp("run")) as found:
        yield found


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving("--config", REPLICAS, run_folder=tmp_path_factory.mktemp("run")) as found:
        yield found


def speak(server: Server, text: str, **fields: object) -> bytes:
    request = {"model": "demo-voice", "input": text, "voice": "rms", "response_format": "wav", **fields}
    response = httpx.post(f"{server.url}/v1/audio/speech", json=request, timeout=120)
    assert response.status_code == 200, response.text
    return response.content


def speak_all(server: Server, texts: list[str], concurrency: int, **fields: object) -> list[bytes]:
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda text: speak(server, text, **fields), texts))


def samples(wav: bytes) -> np.ndarray:
    return soundfile.read(io.BytesIO(wav), dtype="int16")[0]


@pytest.fixture(scope="module")
def alone(server: Server) -> list[bytes]:
    """Each everyday sentence spoken with nothing else in the server."""
    return [speak(server, text) for text in EVERYDAY]


def test_everyday_sentences_are_understood(alone: list[bytes]) -> None:
    assert word_error_rate(EVERYDAY, alone) <= 0.08


def test_sixteen_at_once_give_bit_identical_audio(server: Server, alone: list[bytes]) -> None:
    together = speak_all(server, EVERYDAY, 16)
    for one, other in zip(alone, together, strict=True):
        assert np.array_equal(samples(one), samples(other))


def test_replicas_give_bit_identical_audio_too_and_share_the_work(replicas: Server, alone: list[bytes]) -> None:
    together = speak_all(replicas, EVERYDAY, 16)
    for one, other in zip(alone, together, strict=True):
        assert np.array_equal(samples(one), samples(other))
    engines = {p.pid: sum(p.cpu_times()[:2]) for p in replicas.members}
    used = [engines[replicas.pid(name)] for name in ("tts_engine@r0", "tts_engine@r1")]
    assert min(used) > 0.3 * max(used), used


LAYOUTS = {
    "one process": "--tts_engine.process preprocessing --vocoder.process preprocessing",
    "engine and vocoder together": "--vocoder.process tts_engine",
    "fused front": "--fused_stages [[preprocessing,tts_engine]]",
    "replicated ends": "--processes.vocoder.num_replicas 2 --processes.vocoder.replica_devices 0,0 "
    "--processes.preprocessing.num_replicas 2",
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_layout_gives_bit_identical_audio(tmp_path: Path, alone: list[bytes], layout: str) -> None:
    with serving("--model-path", "demo-voice", *layout.split(), run_folder=tmp_path) as other:
        for one, same in zip(alone[:4], speak_all(other, EVERYDAY[:4], 4), strict=True):
            assert np.array_equal(samples(one), samples(same))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("voice", "sentences"), [("slt", SENTENCES[::2]), ("rms", SENTENCES[1::4])], ids=["slt", "rms"]
)
def test_handed_sentences_are_understood(server: Server, voice: str, sentences: list[str]) -> None:
    assert word_error_rate(sentences, speak_all(server, sentences, 8, voice=voice)) <= 0.08


def test_streaming_gives_the_same_samples_and_the_first_of_them_early(server: Server, alone: list[bytes]) -> None:
    request = {"model": "demo-voice", "input": EVERYDAY[4], "voice": "rms", "response_format": "pcm"}
    arrivals, data = [], b""
    begin = time.monotonic()
    with httpx.stream("POST", f"{server.url}/v1/audio/speech", json=request, timeout=60) as response:
        for piece in response.iter_raw():
            arrivals.append(time.monotonic() - begin)
            data += piece
    assert np.array_equal(np.frombuffer(data, "<i2"), samples(alone[4]))
    assert len(arrivals) >= 3
    assert arrivals[0] < arrivals[-1] / 2, "the first audio must not wait for the last"


def test_server_sent_events_carry_the_same_audio(server: Server, alone: list[bytes]) -> None:
    request = {
        "model": "demo-voice",
        "input": EVERYDAY[0],
        "voice": "rms",
        "response_format": "pcm",
        "stream_format": "sse",
    }
    text = httpx.post(f"{server.url}/v1/audio/speech", json=request, timeout=60).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    audio = b"".join(base64.b64decode(e["audio"]) for e in events if e["type"] == "speech.audio.delta")
    assert np.array_equal(np.frombuffer(audio, "<i2"), samples(alone[0]))
    assert events[-1]["type"] == "speech.audio.done"
    assert events[-1]["usage"]["output_tokens"] > 50


def test_the_official_client_works_unchanged(server: Server, tmp_path: Path) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    assert [m.id for m in client.models.list()] == ["demo-voice"]
    whole = client.audio.speech.create(model="demo-voice", voice="alloy", input="Good morning.", response_format="wav")
    whole.write_to_file(tmp_path / "a.wav")
    assert soundfile.info(tmp_path / "a.wav").duration > 0.5
    with client.audio.speech.with_streaming_response.create(
        model="demo-voice", voice="slt", input="Good morning.", response_format="pcm"
    ) as response:
        assert sum(len(piece) for piece in response.iter_bytes()) > 16000
    with pytest.raises(openai.BadRequestError, match="voice"):
        client.audio.speech.create(model="demo-voice", voice="nobody", input="x")
    with pytest.raises(openai.NotFoundError):
        client.audio.speech.create(model="other", voice="alloy", input="x")


async def test_the_official_asynchronous_client_too(server: Server) -> None:
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none")

    async def one(i: int) -> int:
        response = await client.audio.speech.create(model="demo-voice", voice="rms", input=f"Number {i}.")
        return len(response.content)

    assert min(await asyncio.gather(*(one(i) for i in range(8)))) > 1000


@pytest.mark.parametrize("format", ["wav", "pcm", "flac", "mp3", "opus"])
def test_every_format_holds_the_same_length_of_speech(server: Server, alone: list[bytes], format: str) -> None:
    data = speak(server, EVERYDAY[0], response_format=format)
    seconds = len(samples(alone[0])) / 16000
    length = len(data) / 2 / 16000 if format == "pcm" else soundfile.info(io.BytesIO(data)).duration
    assert abs(length - seconds) < 0.15


def test_speed_changes_the_length_and_keeps_the_words(server: Server, alone: list[bytes]) -> None:
    fast = speak(server, EVERYDAY[0], speed=1.25)
    assert abs(len(samples(fast)) / len(samples(alone[0])) - 0.8) < 0.03
    assert word_error_rate([EVERYDAY[0]], [fast]) <= 0.2


def test_a_seed_makes_sampling_reproducible_among_others(server: Server) -> None:
    fields = {"temperature": 0.7, "seed": 5}
    first = speak(server, EVERYDAY[1], **fields)
    others = speak_all(server, [EVERYDAY[1], *EVERYDAY[2:9], EVERYDAY[1]], 9, **fields)
    assert np.array_equal(samples(first), samples(others[0]))
    assert np.array_equal(samples(first), samples(others[-1]))
    assert not np.array_equal(samples(first), samples(speak(server, EVERYDAY[1], temperature=0.7, seed=6)))


def test_long_text_is_spoken_whole(server: Server) -> None:
    text = " ".join(EVERYDAY[:8])
    assert word_error_rate([text], [speak(server, text)]) <= 0.10


def test_what_cannot_be_spoken_is_the_callers_mistake(server: Server) -> None:
    request = {"model": "demo-voice", "input": "*** 你好 ***", "voice": "rms", "response_format": "wav"}
    response = httpx.post(f"{server.url}/v1/audio/speech", json=request, timeout=60)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "input"


def test_health_names_every_instance(replicas: Server) -> None:
    health = fetch(f"{replicas.url}/health").json()
    assert health["status"] == "ready"
    assert {i["name"] for i in health["instances"]} == {"preprocessing", "tts_engine@r0", "tts_engine@r1", "vocoder"}
    assert len({i["pid"] for i in health["instances"]}) == 4
    assert all(i["state"] == "ready" and i["in_flight"] == 0 for i in health["instances"])
