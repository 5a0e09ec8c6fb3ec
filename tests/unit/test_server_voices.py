"""Voices that clients give: references in a request, uploaded voices, and batches of texts."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile

from sgl_omni.config.tasks import SpeechTask, Tasks
from sgl_omni.errors import InvalidRequest, StageFailed
from sgl_omni.listening import bind
from sgl_omni.media.source import MediaSource
from sgl_omni.server.app import create_app
from sgl_omni.server.serve import HttpServer
from sgl_omni.server.speech_references import MAX_REFERENCE_BYTES, is_bare_base64
from sgl_omni.server.voices import Voice, VoiceStore

sys.path.insert(0, str(Path(__file__).parents[1]))
from fake_speech import RATE, TONE, FakeBackend, endless, failing, metric, speak, until

CLONER = SpeechTask(
    voices=(),
    default_voice=None,
    sample_rate=RATE,
    max_input_characters=200,
    max_references=2,
    takes_instructions=True,
    languages=("English", "Chinese"),
)
SPEECH = "/v1/audio/speech"
BATCH = "/v1/audio/speech/batch"
VOICES = "/v1/audio/voices"
SAY: dict[str, Any] = {"model": "demo", "input": "hello there"}


def wav(samples: np.ndarray = TONE) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, RATE, format="WAV")
    return file.getvalue()


WAV = wav()
BASE64 = base64.b64encode(WAV).decode()
DATA_URL = f"data:audio/wav;base64,{BASE64}"


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def media(tmp_path: Path) -> MediaSource:
    (tmp_path / "voice.wav").write_bytes(WAV)
    (tmp_path / "empty.wav").write_bytes(b"")
    return MediaSource(["voices.example"], tmp_path)


@pytest.fixture
async def asgi(backend: FakeBackend, media: MediaSource) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(backend, Tasks(speech=CLONER), "demo", media=media)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@pytest.fixture
async def http(backend: FakeBackend, media: MediaSource) -> AsyncIterator[httpx.AsyncClient]:
    server = HttpServer(create_app(backend, Tasks(speech=CLONER), "demo", media=media), bind("127.0.0.1", 0), grace=0.2)
    running = asyncio.create_task(server.run())
    async with httpx.AsyncClient(base_url=server.url) as client:
        yield client
    server.stop()
    await running


async def upload(asgi: httpx.AsyncClient, name: str = "carla", audio: bytes = WAV, **fields: str) -> httpx.Response:
    return await asgi.post(VOICES, data={"name": name, **fields}, files={"audio_sample": ("a.wav", audio, "audio/wav")})


@pytest.mark.parametrize("how", ["data URL", "base64", "path", "file URL", "audio_path"])
async def test_a_reference_reaches_the_entry_stage(asgi, backend, tmp_path, how):
    path = tmp_path / "voice.wav"
    given = {
        "data URL": {"audio": DATA_URL},
        "base64": {"audio": BASE64},
        "path": {"audio": str(path)},
        "file URL": {"audio": path.as_uri()},
        "audio_path": {"audio_path": str(path)},
    }[how]
    response = await asgi.post(SPEECH, json=SAY | {"references": [{**given, "text": " what it says "}]})
    assert response.status_code == 200, response.text
    expected = {"input": "hello there", "voice": None, "speed": 1.0}
    assert backend.handles[0].payload == expected | {"references": [{"audio": WAV, "text": "what it says"}]}


async def test_the_short_form_and_several_references(asgi, backend):
    await asgi.post(SPEECH, json=SAY | {"ref_audio": DATA_URL, "ref_text": "words"})
    await asgi.post(SPEECH, json=SAY | {"references": [{"audio": BASE64}, {"audio": DATA_URL, "text": None}]})
    await asgi.post(SPEECH, json=SAY | {"references": [], "voice": "alloy"})
    found = [handle.payload.get("references") for handle in backend.handles]
    assert found == [[{"audio": WAV, "text": "words"}], [{"audio": WAV, "text": None}] * 2, None]


@pytest.mark.parametrize("voice", ["alloy", "default", None])
async def test_a_stock_voice_beside_references_means_the_references(asgi, backend, voice):
    await asgi.post(SPEECH, json=SAY | {"voice": voice, "ref_audio": DATA_URL})
    assert backend.handles[0].payload["voice"] is None


def test_base64_is_told_from_urls_and_paths():
    assert is_bare_base64(BASE64)
    assert is_bare_base64("//uQZAAAAAAAAAAA")
    assert is_bare_base64("/9j/" * 2000)
    assert not any(map(is_bare_base64, ["/srv/voice.wav", "file:///a", "https://a/b", "data:,a", "ftp://a"]))


BAD_REFERENCES: list[tuple[dict[str, Any], str, str]] = [
    ({"references": [{"audio": "https://evil.example/a.wav"}]}, "references[0].audio", "may not be fetched"),
    ({"references": [{"audio": "/etc/passwd"}]}, "references[0].audio", "--allowed-local-media-path"),
    ({"references": [{"audio": "file:///etc/passwd"}]}, "references[0].audio", "--allowed-local-media-path"),
    ({"references": [{"audio_path": "/etc/passwd"}]}, "references[0].audio_path", "--allowed-local-media-path"),
    ({"references": [{"audio_path": BASE64}]}, "references[0].audio_path", "must be a data:"),
    ({"references": [{"audio": "ftp://voices.example/a"}]}, "references[0].audio", "must be a data:"),
    ({"references": [{"audio": BASE64}, {"audio": "?!"}]}, "references[1].audio", "not base64"),
    ({"references": [{"audio": "data:audio/wav;base64,"}]}, "references[0].audio", "the audio is empty"),
    ({"references": [{"audio": ""}]}, "references[0].audio", "the audio is empty"),
    ({"references": [{}]}, "references[0].audio", "exactly one of audio and audio_path"),
    ({"references": [{"audio": BASE64, "audio_path": "/a"}]}, "references[0].audio", "exactly one of"),
    ({"references": [{"audio": BASE64, "speaker": "a"}]}, "references[0].speaker", "not a field"),
    ({"references": [{"audio": BASE64, "text": "x" * 201}]}, "references[0].text", "201 characters"),
    ({"references": [{"audio": BASE64}] * 3}, "references", "3 references are given; the limit is 2"),
    ({"references": "voice.wav"}, "references", "valid list"),
    ({"ref_audio": DATA_URL, "ref_text": "x" * 201}, "ref_text", "201 characters"),
    ({"ref_audio": DATA_URL, "references": [{"audio": BASE64}]}, "ref_audio", "not both"),
    ({"ref_text": "words"}, "ref_text", "which is not given"),
    ({"ref_audio": DATA_URL, "voice": "nobody"}, "voice", "a voice or references"),
    ({"voice": "nobody"}, "voice", "this model has no voices; upload one or give references"),
    ({"language": "Klingon"}, "language", "choose from English, Chinese"),
    ({"top_p": 0}, "top_p", "greater than 0"),
    ({"top_p": 1.1}, "top_p", "less than or equal to 1"),
    ({"repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
]


@pytest.mark.parametrize(("change", "param", "words"), BAD_REFERENCES)
async def test_what_cannot_be_a_voice_is_refused(asgi, backend, change, param, words):
    response = await asgi.post(SPEECH, json=SAY | change)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert words in error["message"]
    assert not backend.handles


async def test_an_empty_file_and_a_huge_one_are_refused(asgi, backend, tmp_path):
    with (tmp_path / "huge.wav").open("wb") as file:
        file.truncate(MAX_REFERENCE_BYTES + 1)
    for name, words in (("empty.wav", "the audio is empty"), ("huge.wav", "the limit for a reference is")):
        response = await asgi.post(SPEECH, json=SAY | {"ref_audio": str(tmp_path / name)})
        assert response.status_code == 400
        assert words in response.json()["error"]["message"]
    encoded = base64.b64encode(bytes(MAX_REFERENCE_BYTES + 3)).decode()
    response = await asgi.post(SPEECH, json=SAY | {"ref_audio": encoded})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "ref_audio")
    assert not backend.handles


async def test_instructions_language_and_sampling_reach_the_entry_stage(asgi, backend):
    options = {"top_p": 0.9, "repetition_penalty": 1.1, "temperature": 1, "instructions": "softly"}
    await asgi.post(SPEECH, json=SAY | options | {"language": "chinese"})
    assert backend.handles[0].payload == {"input": "hello there", "voice": None, "speed": 1.0} | options | {
        "language": "Chinese"
    }


async def test_a_model_that_clones_nothing_says_so(backend):
    app = create_app(backend, Tasks(speech=SpeechTask(voices=("a",), default_voice="a", sample_rate=RATE)), "demo")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as plain:
        for request in ({"ref_audio": DATA_URL}, {"references": [{"audio": DATA_URL}]}, {"language": "English"}):
            response = await plain.post(SPEECH, json=SAY | request)
            assert (response.status_code, response.json()["error"]["param"]) == (400, next(iter(request)))
        response = await upload(plain)
        assert (response.status_code, "does not clone" in response.text) == (400, True)
        await plain.post(SPEECH, json=SAY | {"instructions": "softly"})
        assert backend.handles[0].payload == {"input": "hello there", "voice": "a", "speed": 1.0}


@pytest.mark.parametrize("takes_instructions", [False, True])
async def test_a_model_that_clones_nothing_does_not_advise_it(backend, takes_instructions):
    task = SpeechTask(voices=(), default_voice=None, sample_rate=RATE, takes_instructions=takes_instructions)
    app = create_app(backend, Tasks(speech=task), "demo")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        message = (await client.post(SPEECH, json=SAY | {"voice": "nobody"})).json()["error"]["message"]
    advice = "leave voice out and describe one in instructions" if takes_instructions else "leave voice out"
    assert message == f"voice 'nobody' is not known; this model has no voices; {advice}"


async def test_an_uploaded_voice_is_listed_used_and_deleted(asgi, backend):
    response = await upload(asgi, "carla", ref_text="what she says", consent="yes")
    assert response.status_code == 200, response.text
    described = response.json()
    assert (described["id"], described["seconds"], described["has_text"]) == ("carla", 1.0, True)
    assert (await asgi.get(VOICES)).json() == {"voices": [described], "default": None}
    assert (await asgi.post(SPEECH, json=SAY | {"voice": "carla"})).status_code == 200
    expected = {"input": "hello there", "voice": None, "speed": 1.0}
    assert backend.handles[0].payload == expected | {"references": [{"audio": WAV, "text": "what she says"}]}
    both = await asgi.post(SPEECH, json=SAY | {"voice": "carla", "ref_audio": DATA_URL})
    assert "not both" in both.json()["error"]["message"]
    assert (await asgi.delete(f"{VOICES}/carla")).json() == {"id": "carla", "object": "audio.voice", "deleted": True}
    assert (await asgi.delete(f"{VOICES}/carla")).status_code == 404
    assert (await asgi.get(VOICES)).json()["voices"] == []
    assert (await asgi.post(SPEECH, json=SAY | {"voice": "carla"})).status_code == 400


async def test_a_voice_may_have_a_stock_name_and_the_official_client_uses_it(http, backend):
    async with openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="unused", max_retries=0) as client:
        await client.audio.speech.create(model="demo", voice="alloy", input="hello")
        assert (await upload(http, "alloy")).status_code == 200
        await client.audio.speech.create(model="demo", voice="alloy", input="hello")
    assert [handle.payload.get("references") for handle in backend.handles] == [None, [{"audio": WAV, "text": None}]]


@pytest.mark.parametrize("name", ["", " ", "a b", "../x", "_x", "x" * 65, "a/b", "default", "a\n"])
async def test_names_of_voices_have_rules(asgi, name):
    response = await upload(asgi, name)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "name")


async def test_voices_of_all_scripts_are_names(asgi):
    assert (await upload(asgi, "小明-2.a_b")).status_code == 200
    assert (await asgi.delete(f"{VOICES}/小明-2.a_b")).status_code == 200


@pytest.mark.parametrize(
    ("audio", "words"),
    [
        (b"", "cannot be read"),
        (b"no sound", "cannot be read"),
        (wav(TONE[:0]), "the audio is empty"),
        (bytes(MAX_REFERENCE_BYTES + 1), "more than the limit"),
    ],
    ids=["no bytes", "no audio", "no samples", "too large"],
)
async def test_an_upload_must_be_audio(asgi, audio, words):
    response = await upload(asgi, audio=audio)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "audio_sample")
    assert words in response.json()["error"]["message"]
    assert (await asgi.get(VOICES)).json()["voices"] == []


@pytest.mark.parametrize(
    ("limits", "param", "words"),
    [
        ({"max_reference_seconds": 0.5}, "audio_sample", "the limit is 0.5 s"),
        ({"least_reference_seconds": 90.0}, "audio_sample", "needs at least 90 s"),
        ({"needs_reference_text": True}, "ref_text", "needs what is said in the recording"),
    ],
)
async def test_what_the_model_could_never_speak_with_is_refused_as_it_is_uploaded(backend, limits, param, words):
    app = create_app(backend, Tasks(speech=replace(CLONER, **limits)), "demo")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        response = await upload(client, ref_text=" ")
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert words in response.json()["error"]["message"]
        if param == "ref_text":
            response = await client.post(SPEECH, json=SAY | {"ref_audio": DATA_URL})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "ref_text")
            response = await client.post(SPEECH, json=SAY | {"references": [{"audio": BASE64}]})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "references[0].text")


async def test_a_recording_that_the_model_refuses_is_named_as_the_caller_gave_it(asgi, backend):
    backend.script = failing(InvalidRequest("too quiet", "references[0].audio"))
    await upload(asgi)
    given: list[tuple[dict[str, Any], str]] = [
        ({"voice": "carla"}, "voice"),
        ({"ref_audio": DATA_URL}, "ref_audio"),
        ({"references": [{"audio": BASE64}]}, "references[0].audio"),
    ]
    for fields, param in given:
        error = (await asgi.post(SPEECH, json=SAY | fields)).json()["error"]
        assert (error["param"], "too quiet" in error["message"]) == (param, True)
        batch = {"model": "demo", "inputs": [{"input": "hi", **fields}]}
        [entry] = (await asgi.post(BATCH, json=batch)).json()["data"]
        assert entry["error"]["param"] == f"inputs[0].{param}"
    error = (await asgi.post(SPEECH, json=SAY | {"ref_audio": "?!"})).json()["error"]
    assert (error["param"], "not base64" in error["message"]) == ("ref_audio", True)
    backend.script = failing(InvalidRequest("give one", "references"))
    assert (await asgi.post(SPEECH, json=SAY)).json()["error"]["param"] == "references"
    backend.script = failing(InvalidRequest("too much", "input"))
    assert (await asgi.post(SPEECH, json=SAY | {"voice": "carla"})).json()["error"]["param"] == "input"


async def test_a_form_that_makes_no_sense_is_refused(asgi):
    file = ("a.wav", WAV, "audio/wav")
    forms: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({}, {"file": file}, "name"),
        ({"name": "a"}, {"audio_sample": file, "file": file}, "audio_sample"),
        ({"name": "a", "audio_sample": "text"}, {"other": file}, "other"),
        ({"name": "a", "ref_text": "x", "text": "y"}, {"file": file}, "ref_text"),
        ({"name": "a", "ref_text": "x" * 201}, {"file": file}, "ref_text"),
    ]
    for data, files, param in forms:
        response = await asgi.post(VOICES, data=data, files=files)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert (await asgi.post(VOICES, json={"name": "a"})).status_code == 415
    assert (await asgi.post(VOICES, data={"name": "a"})).status_code == 415
    broken = await asgi.post(VOICES, content=b"--x\r\n", headers={"content-type": "multipart/form-data"})
    assert broken.status_code == 400
    assert (await upload(asgi, "a")).status_code == 200
    again = await upload(asgi, "a")
    assert (again.status_code, "delete it first" in again.text) == (400, True)


def test_uploaded_voices_are_bounded_in_number_and_bytes():
    store = VoiceStore(CLONER, max_voices=2, max_bytes=100)

    def voice(name: str, size: int) -> Voice:
        return Voice(name, {"audio": bytes(size), "text": None}, 1.0, 0)

    store.add(voice("a", 60))
    with pytest.raises(InvalidRequest, match="60 of 100 bytes"):
        store.add(voice("b", 41))
    store.add(voice("b", 40))
    with pytest.raises(InvalidRequest, match="2 voices are uploaded, the most"):
        store.add(voice("c", 0))
    assert store.remove("a")
    store.add(voice("c", 60))
    assert store.names() == ("b", "c")


async def test_a_batch_has_an_entry_for_each_text_in_order(asgi, backend):
    inputs = ["one", {"input": "two", "speed": 2.0, "response_format": "wav"}, {"input": "three", "seed": 5}]
    body = {"model": "demo", "inputs": inputs, "response_format": "pcm", "seed": 3}
    response = await asgi.post(BATCH, json=body)
    answer = response.json()
    assert response.status_code == 200, response.text
    assert response.headers["content-length"] == str(len(response.content))
    assert [entry["index"] for entry in answer["data"]] == [0, 1, 2]
    assert [entry["format"] for entry in answer["data"]] == ["pcm", "wav", "pcm"]
    assert all(
        entry["usage"] == {"input_tokens": 3, "output_tokens": 25, "total_tokens": 28} for entry in answer["data"]
    )
    assert len(base64.b64decode(answer["data"][0]["audio"])) == 2 * len(TONE)
    samples, rate = soundfile.read(io.BytesIO(base64.b64decode(answer["data"][1]["audio"])))
    assert (len(samples), rate) == (len(TONE), RATE)
    found = {handle.payload["input"]: (handle.payload["speed"], handle.payload["seed"]) for handle in backend.handles}
    assert found == {"one": (1.0, 3), "two": (2.0, 3), "three": (1.0, 5)}
    assert await metric(asgi, 'sgl_omni_requests_total{outcome="ok"}') == 1


async def test_a_text_with_a_voice_of_its_own_leaves_the_common_one(asgi, backend):
    await upload(asgi, "carla", ref_text="hers")
    inputs = ["one", {"input": "two", "voice": "carla"}, {"input": "three", "voice": "alloy"}]
    await asgi.post(BATCH, json={"model": "demo", "inputs": inputs, "ref_audio": DATA_URL, "ref_text": "common"})
    found = {
        handle.payload["input"]: [each["text"] for each in handle.payload.get("references", [])]
        for handle in backend.handles
    }
    assert found == {"one": ["common"], "two": ["hers"], "three": []}


async def test_what_several_texts_refer_to_is_fetched_once(asgi, backend, media, monkeypatch, tmp_path):
    asked: list[str] = []
    fetch = MediaSource.fetch

    async def counting(self: MediaSource, reference: str, param: str) -> bytes:
        asked.append(reference)
        return await fetch(self, reference, param)

    monkeypatch.setattr(MediaSource, "fetch", counting)
    path = str(tmp_path / "voice.wav")
    await asgi.post(BATCH, json={"model": "demo", "inputs": ["a", "b", "c"], "ref_audio": path})
    assert asked == [path]
    assert all(handle.payload["references"][0]["audio"] == WAV for handle in backend.handles)


async def test_one_failure_leaves_the_other_texts(asgi, backend):
    async def script(payload: dict) -> AsyncIterator[np.ndarray]:
        source = failing(StageFailed("it broke", stage="vocoder"), after=1) if payload["input"] == "bad" else speak
        async for samples in source(payload):
            yield samples

    backend.script = script
    inputs = ["good", "bad", "", {"input": "x", "sped": 1}, {"speed": 2}, 7, {"input": "x", "ref_audio": "/etc/passwd"}]
    data = (await asgi.post(BATCH, json={"model": "demo", "inputs": [*inputs, "good"]})).json()["data"]
    errors = [(entry.get("error") or {"param": "", "code": ""}) for entry in data]
    assert [(error["code"], error["param"]) for error in errors] == [
        ("", ""),
        ("stage_failed", None),
        ("invalid_request", "inputs[2].input"),
        ("invalid_request", "inputs[3].sped"),
        ("invalid_request", "inputs[4].input"),
        ("invalid_request", "inputs[5]"),
        ("invalid_request", "inputs[6].ref_audio"),
        ("", ""),
    ]
    assert all(("audio" in entry) != ("error" in entry) for entry in data)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"inputs": ["a"]}, 400, "model"),
        ({"model": "demo"}, 400, "inputs"),
        ({"model": "demo", "inputs": []}, 400, "inputs"),
        ({"model": "demo", "inputs": ["a"] * 65}, 400, "inputs"),
        ({"model": "demo", "inputs": "a"}, 400, "inputs"),
        ({"model": "demo", "inputs": ["a"], "stream": True}, 400, "stream"),
        ({"model": "gpt", "inputs": ["a"]}, 404, "model"),
    ],
)
async def test_a_batch_that_makes_no_sense_is_refused(asgi, backend, body, status, param):
    response = await asgi.post(BATCH, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)
    assert not backend.handles


async def test_a_full_server_refuses_a_batch_whole(asgi, backend):
    backend.full = True
    response = await asgi.post(BATCH, json={"model": "demo", "inputs": ["a", "b"]})
    assert (response.status_code, response.headers["retry-after"]) == (503, "3")


async def test_a_client_that_leaves_aborts_all_of_a_batch(http, backend):
    backend.script = endless
    body = {"model": "demo", "inputs": [str(number) for number in range(40)]}
    leaving = asyncio.create_task(http.post(BATCH, json=body))
    await until(lambda: len(backend.handles) == 16)
    leaving.cancel()
    await until(lambda: all(handle.aborted == "client disconnected" for handle in backend.handles))
    async with asyncio.timeout(2):
        while await metric(http, 'sgl_omni_requests_total{outcome="aborted"}') != 1:
            await asyncio.sleep(0.01)
    assert len(backend.handles) == 16, "what had not begun must not begin"


async def test_the_routes_are_described(asgi):
    found = (await asgi.get("/openapi.json")).json()["paths"]
    assert {"/v1/audio/speech", "/v1/audio/speech/batch", "/v1/audio/voices"} <= set(found)
    assert "references" in json.dumps(found["/v1/audio/speech"])
