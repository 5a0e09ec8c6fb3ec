"""Qwen3-Omni behind HTTP, its speech stages twice: what OpenAI's client gets is what the whole model says."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile
import tiny_qwen3_omni as tiny
from qwen3_omni_reference import Answered, Asked, Reference, picture, tone, user

from servers import Server, fetch, serving

pytest.importorskip("transformers")

TOKENS = 9
TOLERANCE = 2e-4
"""Of samples in [-1, 1], which travel in 16 bits."""
ASKED: dict[str, Asked] = {
    "text": user("hello there", system="be brief"),
    "all": user("see ", ("image", [0]), media=[picture(90, 60)]),
    "audio": user("what is ", ("audio", [0]), "?", media=[tone(1.3)]),
}
LAYOUT = [
    *[f"--{stage}.process host" for stage in ("preprocessing", "image_encoder", "audio_encoder", "thinker", "decode")],
    "--talker_ar.gpu_memory_fraction 0.3 --code2wav.gpu_memory_fraction 0.1 --talker_ar.engine.max_total_tokens 2048",
    *[
        f"--processes.{process}.num_replicas 2 --processes.{process}.replica_devices 1,2"
        for process in ("talker_ar", "code2wav")
    ],
]


@dataclass(frozen=True)
class Omni:
    server: Server
    expected: dict[str, Answered]


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Omni]:
    folder = tmp_path_factory.mktemp("omni")
    model = tiny.build(folder)
    tiny.write_processors(folder)
    reference = Reference(model, folder)
    expected = {k: reference.answer(asked, tokens=TOKENS, frames=tiny.FRAMES) for k, asked in ASKED.items()}
    flags = " ".join(LAYOUT).split()
    arguments = ["--model-path", str(folder), "--platform", "cpu", "--name", "tiny-omni", *flags]
    with serving(*arguments, run_folder=tmp_path_factory.mktemp("run")) as server:
        yield Omni(server, expected)


def body(kind: str, **options: Any) -> dict[str, Any]:
    asked = ASKED[kind]
    data = [base64.b64encode(file).decode() for file in asked.media]

    def part(of: dict[str, Any]) -> dict[str, Any]:
        if of["type"] == "text":
            return of
        file = data[of["media"][0]]
        if of["type"] == "audio":
            return {"type": "input_audio", "input_audio": {"data": file, "format": "wav"}}
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{file}"}}

    messages = [{"role": m["role"], "content": [part(each) for each in m["content"]]} for m in asked.messages]
    return {"model": "tiny-omni", "messages": messages, "temperature": 0, "max_completion_tokens": TOKENS, **options}


SPEAK = {"modalities": ["text", "audio"], "audio": {"voice": "ethan", "format": "wav"}}


def samples(wav: bytes) -> np.ndarray:
    audio, rate = soundfile.read(io.BytesIO(wav), dtype="float32")
    assert rate == 24000
    return audio


def close(audio: np.ndarray, expected: Answered) -> bool:
    return audio.shape == expected.audio.shape and bool(np.abs(audio - expected.audio).max() < TOLERANCE)


def client(omni: Omni) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{omni.server.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("kind", ASKED)
def test_text_and_speech_whole(omni: Omni, kind: str) -> None:
    made = client(omni).chat.completions.create(**body(kind, **SPEAK))
    [choice], expected = made.choices, omni.expected[kind]
    assert choice.message.content == expected.text
    assert choice.message.audio is not None
    assert choice.message.audio.transcript == expected.text
    assert close(samples(base64.b64decode(choice.message.audio.data)), expected)
    assert made.usage is not None
    assert made.usage.prompt_tokens == len(expected.prompt_ids)


def test_text_and_speech_as_they_come_are_the_same(omni: Omni) -> None:
    options = {**SPEAK, "audio": {"voice": "ethan", "format": "pcm16"}}
    text, audio = "", b""
    for chunk in client(omni).chat.completions.create(**body("audio", **options), stream=True):
        delta = chunk.choices[0].delta
        text += delta.content or ""
        heard: Any = getattr(delta, "audio", None)
        audio += base64.b64decode((heard and heard.data) or "")
    expected = omni.expected["audio"]
    assert text == expected.text
    assert close(np.frombuffer(audio, "<i2").astype(np.float32) / 32768, expected)


def test_both_replicas_speak_and_speak_the_same(omni: Omni) -> None:
    kinds = [*ASKED, *ASKED, *ASKED, *ASKED]

    def one(kind: str) -> bytes:
        response = httpx.post(f"{omni.server.url}/v1/chat/completions", json=body(kind, **SPEAK), timeout=60)
        assert response.status_code == 200, response.text
        return base64.b64decode(response.json()["choices"][0]["message"]["audio"]["data"])

    with ThreadPoolExecutor(6) as pool:
        spoken = list(pool.map(one, kinds))
    assert all(close(samples(wav), omni.expected[kind]) for kind, wav in zip(kinds, spoken, strict=True))
    names = {i["name"] for i in fetch(f"{omni.server.url}/health").json()["instances"]}
    assert names == {"host", "talker_ar@r0", "talker_ar@r1", "code2wav@r0", "code2wav@r1"}


def test_text_without_speech(omni: Omni) -> None:
    made = client(omni).chat.completions.create(**body("all"))
    assert made.choices[0].message.content == omni.expected["all"].text
    assert made.choices[0].message.audio is None


@pytest.mark.parametrize(
    ("file", "kind", "message"),
    [
        (b"GIF89a is all there is", "image_url", "image"),
        (tone(0.2), "image_url", "is none of PNG"),
        (picture(20, 20), "input_audio", "audio cannot be read"),
        (b"", "input_audio", ""),
    ],
    ids=["broken", "sound-as-picture", "picture-as-sound", "empty"],
)
def test_files_that_are_not_what_they_should_be_answer_400(omni: Omni, file: bytes, kind: str, message: str) -> None:
    data = base64.b64encode(file).decode()
    value = {"data": data, "format": "wav"} if kind == "input_audio" else {"url": f"data:image/png;base64,{data}"}
    asked = {"model": "tiny-omni", "messages": [{"role": "user", "content": [{"type": kind, kind: value}]}]}
    response = httpx.post(f"{omni.server.url}/v1/chat/completions", json=asked, timeout=60)
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]


def test_an_image_bomb_and_ten_hours_of_audio_are_refused_by_what_their_headers_say(omni: Omni) -> None:
    def refusal(part: dict[str, Any]) -> str:
        asked = {"model": "tiny-omni", "messages": [{"role": "user", "content": [part]}]}
        response = httpx.post(f"{omni.server.url}/v1/chat/completions", json=asked, timeout=60)
        assert response.status_code == 400, response.text
        message: str = response.json()["error"]["message"]
        return message

    bomb = base64.b64encode(white(9_000, 9_000)).decode()
    found = refusal({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{bomb}"}})
    assert "9000 x 9000 pixels" in found
    long = base64.b64encode(quiet(36_000)).decode()
    assert "lasts 36000.0 s" in refusal({"type": "input_audio", "input_audio": {"data": long, "format": "flac"}})


def white(width: int, height: int) -> bytes:
    """A small file of very many pixels."""
    import struct
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")
    )


def quiet(seconds: int) -> bytes:
    """A small FLAC file that lasts so long."""
    file = io.BytesIO()
    with soundfile.SoundFile(file, "w", samplerate=1000, channels=1, format="FLAC") as out:
        for _ in range(seconds // 1000):
            out.write(np.zeros(1_000_000, dtype=np.int16))
    return file.getvalue()
