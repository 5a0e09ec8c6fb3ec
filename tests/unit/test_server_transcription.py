"""The routes of a pipeline that listens, in front of a stand-in for the pipeline."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from sgl_omni.config.tasks import Tasks, TranscriptionTask
from sgl_omni.errors import InvalidRequest, Overloaded, RequestAborted, StageFailed
from sgl_omni.listening import bind
from sgl_omni.server.app import create_app
from sgl_omni.server.serve import HttpServer
from sgl_omni.server.subtitles import srt, vtt

TASK = TranscriptionTask(languages=("de", "en"), translates=True, timestamps=True)
SEGMENTS = [
    {"start": 0.0, "end": 1.5, "text": " Good morning.", "tokens": [1, 2]},
    {"start": 1.5, "end": 3661.25, "text": " All of <you>\n\n& more --> here.", "tokens": [3]},
]
RESULT = {
    "text": "Good morning. All of <you>",
    "language": "en",
    "duration": 3661.5,
    "segments": SEGMENTS,
    "finish_reason": "stop",
    "input_tokens": 4,
    "input_audio_tokens": 3,
    "output_tokens": 9,
}
PIECES = ["Good", " morning.", " All of", " <you>"]
AUDIO = b"RIFF and so on" * 10


class FakeHandle:
    """Streams the pieces, then has the result; or ends in ``error`` after some pieces."""

    def __init__(self, id: str, payload: dict[str, Any], error: Exception | None, after: int, hold: bool) -> None:
        self.id = id
        self.payload = payload
        self.aborted: str | None = None
        self._error, self._after, self._hold = error, after, hold
        self._gone = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[Any]:
        for i, piece in enumerate(PIECES):
            if self._error is not None and i == self._after:
                raise self._error
            yield SimpleNamespace(stage="text", payload={"text": piece})
            await asyncio.sleep(0)
        await self._wait()

    async def result(self) -> dict[str, Any]:
        if self._error is not None:
            raise self._error
        await self._wait()
        return {"text": RESULT}

    async def _wait(self) -> None:
        if self._hold:
            await self._gone.wait()
            raise RequestAborted("gone")

    def abort(self, reason: str) -> None:
        self.aborted = self.aborted or reason
        self._gone.set()


class FakeBackend:
    def __init__(self) -> None:
        self.error: Exception | None = None
        self.after = 0
        self.full = self.hold = False
        self.handles: list[FakeHandle] = []

    def submit(self, payload: Any, *, outputs: Any = None, request_id: Any = None, timeout: Any = None) -> FakeHandle:
        if self.full:
            raise Overloaded("full", retry_after=2.3)
        self.handles.append(FakeHandle(str(request_id), payload, self.error, self.after, self.hold))
        return self.handles[-1]

    def health(self) -> dict[str, Any]:
        return {"status": "ready", "model": "ears", "instances": []}

    async def refresh(self) -> None:
        return

    def stats(self) -> dict[str, Any]:
        return {}


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
async def asgi(backend: FakeBackend) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(backend, Tasks(transcription=TASK), "ears", max_body_bytes=200_000)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@pytest.fixture
async def url(backend: FakeBackend) -> AsyncIterator[str]:
    server = HttpServer(create_app(backend, Tasks(transcription=TASK), "ears"), bind("127.0.0.1", 0), grace=0.2)
    running = asyncio.create_task(server.run())
    yield server.url
    server.stop()
    await running


@pytest.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
        yield client


async def post(
    asgi: httpx.AsyncClient, fields: dict[str, Any] | None = None, *, route: str = "transcriptions", **files: Any
) -> httpx.Response:
    files = files or {"file": ("a.wav", AUDIO)}
    return await asgi.post(f"/v1/audio/{route}", data={"model": "ears", **(fields or {})}, files=files)


async def test_the_official_client_gets_the_text(client: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    answer = await client.audio.transcriptions.create(model="ears", file=("talk.wav", AUDIO))
    assert answer.text == RESULT["text"]
    assert answer.usage is not None
    assert (answer.usage.type, answer.usage.total_tokens) == ("tokens", 13)
    assert answer.usage.input_token_details is not None
    assert answer.usage.input_token_details.model_dump() == {"audio_tokens": 3, "text_tokens": 1}
    assert backend.handles[0].payload == {"audio": AUDIO, "task": "transcribe", "timestamps": False}


async def test_the_official_client_gets_segments(client: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    answer = await client.audio.transcriptions.create(
        model="ears",
        file=("talk.wav", AUDIO),
        language="de",
        prompt="Names: Ada.",
        temperature=0.4,
        response_format="verbose_json",
        timestamp_granularities=["segment"],
        extra_body={"seed": 7, "max_new_tokens": 50},
    )
    assert (answer.text, answer.language, answer.duration) == (RESULT["text"], "en", 3661.5)
    assert answer.segments is not None
    first = answer.segments[0]
    assert (first.id, first.start, first.end, first.text) == (0, 0.0, 1.5, " Good morning.")
    assert (first.tokens, first.temperature) == ([1, 2], 0.4)
    assert backend.handles[0].payload == {
        "audio": AUDIO,
        "task": "transcribe",
        "timestamps": True,
        "language": "de",
        "prompt": "Names: Ada.",
        "temperature": 0.4,
        "seed": 7,
        "max_new_tokens": 50,
    }


async def test_the_official_client_gets_a_translation(client: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    answer = await client.audio.translations.create(model="ears", file=("talk.wav", AUDIO))
    assert answer.text == RESULT["text"]
    assert backend.handles[0].payload["task"] == "translate"


async def test_the_official_client_streams(client: openai.AsyncOpenAI) -> None:
    stream = await client.audio.transcriptions.create(model="ears", file=("talk.wav", AUDIO), stream=True)
    events = [each async for each in stream]
    assert [each.delta for each in events[:-1]] == PIECES
    assert {each.type for each in events[:-1]} == {"transcript.text.delta"}
    done = events[-1]
    assert (done.type, done.text) == ("transcript.text.done", "".join(PIECES))
    assert done.usage.output_tokens == 9


@pytest.mark.parametrize(
    ("format", "media_type"),
    [
        ("json", "application/json"),
        ("text", "text/plain; charset=utf-8"),
        ("srt", "application/x-subrip; charset=utf-8"),
        ("vtt", "text/vtt; charset=utf-8"),
        ("verbose_json", "application/json"),
    ],
)
async def test_each_format_has_its_type_and_length(
    asgi: httpx.AsyncClient, backend: FakeBackend, format: str, media_type: str
) -> None:
    response = await post(asgi, {"response_format": format})
    assert (response.status_code, response.headers["content-type"]) == (200, media_type)
    assert int(response.headers["content-length"]) == len(response.content)
    assert backend.handles[0].payload["timestamps"] is (format in ("srt", "vtt", "verbose_json"))
    if format == "text":
        assert response.text == RESULT["text"] + "\n"


def test_subtitles_are_what_players_read() -> None:
    assert srt(SEGMENTS) == (
        "1\n00:00:00,000 --> 00:00:01,500\nGood morning.\n\n"
        "2\n00:00:01,500 --> 01:01:01,250\nAll of <you> & more -> here.\n\n"
    )
    assert vtt(SEGMENTS) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nGood morning.\n\n"
        "00:00:01.500 --> 01:01:01.250\nAll of &lt;you&gt; &amp; more -&gt; here.\n\n"
    )
    assert srt([]) == ""
    assert vtt([]) == "WEBVTT\n\n"


BAD_FIELDS = [
    ({"model": "gpt"}, 404, "model", "'gpt' is not served here; use 'ears'"),
    ({"model": ""}, 400, "model", "model is required"),
    ({"language": "xx"}, 400, "language", "choose from de, en"),
    ({"language": "x" * 5000}, 400, "language", "is not known"),
    ({"response_format": "pdf"}, 400, "response_format", "'json', 'text', 'srt', 'vtt' or 'verbose_json'"),
    ({"temperature": "3"}, 400, "temperature", "less than or equal to 2"),
    ({"temperature": "nan"}, 400, "temperature", "finite"),
    ({"temperature": "warm"}, 400, "temperature", "valid number"),
    ({"stream": "perhaps"}, 400, "stream", "valid boolean"),
    ({"stream": "true", "response_format": "srt"}, 400, "stream", "srt is sent whole"),
    ({"seed": "1.5"}, 400, "seed", "valid integer"),
    ({"max_new_tokens": "0"}, 400, "max_new_tokens", "greater than or equal to 1"),
    ({"timestamp_granularities[]": ["word"]}, 400, "timestamp_granularities", "times of words are not available"),
    ({"timestamp_granularities[]": ["segment"]}, 400, "timestamp_granularities", "needs response_format"),
    ({"timestamp_granularities[]": ["page"]}, 400, "timestamp_granularities[0]", "'segment' or 'word'"),
    ({"include[]": ["logprobs"]}, 400, "include", "log probabilities are not available"),
    ({"chunking_strategy": "server_vad"}, 400, "chunking_strategy", "'auto'"),
    ({"langage": "en"}, 400, "langage", "did you mean 'language'?"),
    ({"prompt": ["a", "b"]}, 400, "prompt", "given more than once"),
]


@pytest.mark.parametrize(("fields", "status", "param", "words"), BAD_FIELDS)
async def test_a_wrong_field_is_named(
    asgi: httpx.AsyncClient, backend: FakeBackend, fields: dict[str, Any], status: int, param: str, words: str
) -> None:
    response = await post(asgi, fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param)
    assert words in error["message"]
    assert len(error["message"]) < 1000
    assert not backend.handles


async def test_empty_fields_count_as_not_given(asgi: httpx.AsyncClient, backend: FakeBackend) -> None:
    response = await post(asgi, {"language": "", "prompt": "", "temperature": "", "chunking_strategy": "auto"})
    assert response.status_code == 200
    assert backend.handles[0].payload == {"audio": AUDIO, "task": "transcribe", "timestamps": False}


async def test_without_a_file_nothing_begins(asgi: httpx.AsyncClient, backend: FakeBackend) -> None:
    answers = [
        await asgi.post("/v1/audio/transcriptions", files={"model": (None, "ears")}),
        await post(asgi, file=("a.wav", b"")),
        await asgi.post("/v1/audio/transcriptions", files={"model": (None, "ears"), "file": (None, "text")}),
        await post(asgi, sound=("a.wav", AUDIO)),
        await asgi.post("/v1/audio/transcriptions", files=[("file", ("a", AUDIO)), ("file", ("b", AUDIO))]),
    ]
    words = ["file is required", "the file is empty", "must be sent as a file", "belongs in 'file'", "Too many files"]
    for response, expected in zip(answers, words, strict=True):
        assert response.status_code == 400
        assert expected in response.json()["error"]["message"]
    assert not backend.handles


async def test_what_is_no_form_is_refused(asgi: httpx.AsyncClient, backend: FakeBackend) -> None:
    address = "/v1/audio/transcriptions"
    assert (await asgi.post(address, json={"model": "ears"})).status_code == 415
    assert (await asgi.post(address)).status_code == 415
    broken = {"content-type": "multipart/form-data"}
    response = await asgi.post(address, content=b"--x\r\n", headers=broken)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_request")
    cut = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nea'
    response = await asgi.post(address, content=cut, headers={"content-type": "multipart/form-data; boundary=x"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert (await asgi.get(address)).status_code == 405
    assert not backend.handles


async def test_too_much_is_refused(asgi: httpx.AsyncClient, backend: FakeBackend) -> None:
    assert (await post(asgi, file=("a.wav", bytes(300_000)))).status_code == 413
    large = await post(asgi, {"prompt": "x" * 100_000})
    assert (large.status_code, "maximum size" in large.json()["error"]["message"]) == (400, True)
    many = await post(asgi, {f"field{i}": "x" for i in range(50)})
    assert (many.status_code, "Too many fields" in many.json()["error"]["message"]) == (400, True)
    assert not backend.handles


async def test_errors_of_the_pipeline_have_their_status(asgi: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.error = InvalidRequest("the audio is empty", "file")
    for fields in ({}, {"stream": "true"}):
        response = await post(asgi, fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "file")
    backend.error = StageFailed("it broke", stage="asr_engine")
    assert (await post(asgi)).status_code == 500
    backend.full = True
    response = await post(asgi)
    assert (response.status_code, response.headers["retry-after"]) == (503, "3")


async def test_a_stream_that_breaks_off_says_so(asgi: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.error, backend.after = StageFailed("it broke", stage="asr_engine"), 2
    response = await post(asgi, {"stream": "true"})
    assert response.status_code == 200
    last = response.text.strip().split("\n\n")[-1]
    assert last.startswith("event: error\n")
    assert json.loads(last.partition("data: ")[2])["error"]["code"] == "stage_failed"


async def test_a_client_that_goes_away_frees_its_request(url: str, backend: FakeBackend) -> None:
    backend.hold = True
    async with httpx.AsyncClient(base_url=url) as http:
        asking = asyncio.create_task(post(http))
        async with asyncio.timeout(5):
            while not backend.handles:
                await asyncio.sleep(0.01)
        asking.cancel()
        async with asyncio.timeout(5):
            while not backend.handles[0].aborted:
                await asyncio.sleep(0.01)


async def test_a_model_of_one_language_has_no_translations(backend: FakeBackend) -> None:
    plain = TranscriptionTask(languages=("en",))
    transport = httpx.ASGITransport(create_app(backend, Tasks(transcription=plain), "ears"))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as asgi:
        assert (await post(asgi, route="translations")).status_code == 404
        refused = await post(asgi, {"response_format": "srt"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_format")
        page = (await asgi.get("/")).text
        assert "POST /v1/audio/transcriptions" in page
        assert "translations" not in page
        schema = (await asgi.get("/openapi.json")).json()["paths"]["/v1/audio/transcriptions"]["post"]
        form = schema["requestBody"]["content"]["multipart/form-data"]["schema"]
        assert form["required"] == ["file", "model"]
