import asyncio
import base64
import io
import json
import logging
import re
import socket
import sys
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import soundfile

from sgl_omni.config.tasks import SpeechTask, Tasks
from sgl_omni.errors import (
    DeadlineExceeded,
    InvalidRequest,
    PayloadError,
    ProcessExited,
    RequestAborted,
    StageFailed,
)
from sgl_omni.listening import bind
from sgl_omni.server.app import create_app
from sgl_omni.server.serve import HttpServer

sys.path.insert(0, str(Path(__file__).parents[1]))
from fake_speech import RATE, TONE, FakeBackend, endless, failing, metric, mute, slow, until

TASK = SpeechTask(voices=("anna", "bert"), default_voice="anna", sample_rate=RATE, max_input_characters=200)
SAY = {"model": "demo", "input": "hello there", "voice": "bert"}


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
async def url(backend: FakeBackend) -> AsyncIterator[str]:
    server = HttpServer(
        create_app(backend, Tasks(speech=TASK), "demo", aliases=("voice-1",)), bind("127.0.0.1", 0), grace=0.2
    )
    running = asyncio.create_task(server.run())
    yield server.url
    server.stop()
    await running


@pytest.fixture
async def http(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url) as client:
        yield client


@pytest.fixture
async def asgi(backend: FakeBackend) -> AsyncIterator[httpx.AsyncClient]:
    """The application without a socket, for what does not depend on one."""
    app = create_app(backend, Tasks(speech=TASK), "demo", aliases=("voice-1",))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@pytest.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
        yield client


async def test_the_official_client_gets_mp3_by_default(client, backend):
    response = await client.audio.speech.create(model="demo", voice="alloy", input="hello")
    samples, rate = soundfile.read(io.BytesIO(response.content))
    assert response.response.headers["content-type"] == "audio/mpeg"
    assert rate == RATE
    assert len(samples) / RATE == pytest.approx(1.0, abs=0.2)
    assert backend.handles[0].payload == {"input": "hello", "voice": "anna", "speed": 1.0}


@pytest.mark.parametrize(
    ("format", "media_type"),
    [("wav", "audio/wav"), ("flac", "audio/flac"), ("mp3", "audio/mpeg"), ("opus", "audio/ogg; codecs=opus")],
)
@pytest.mark.parametrize("stream", [None, False])
async def test_every_format_decodes_to_what_the_pipeline_spoke(asgi, format, media_type, stream):
    response = await asgi.post("/v1/audio/speech", json=SAY | {"response_format": format, "stream": stream})
    samples, rate = soundfile.read(io.BytesIO(response.content))
    assert (response.status_code, response.headers["content-type"], rate) == (200, media_type, RATE)
    assert response.headers["x-sample-rate"] == "16000"
    assert len(samples) / RATE == pytest.approx(1.0, abs=0.2)
    assert np.std(samples[4000:12000]) == pytest.approx(np.std(TONE), rel=0.1)


async def test_pcm_is_the_models_own_rate(asgi):
    response = await asgi.post("/v1/audio/speech", json=SAY | {"response_format": "pcm"})
    assert np.abs(np.frombuffer(response.content, "<i2") - TONE * 32767).max() <= 0.5
    assert response.headers["x-sample-rate"] == "16000"


@pytest.mark.parametrize(("stream", "whole"), [(None, False), (True, False), (False, True)])
async def test_a_whole_file_has_a_length_and_a_stream_has_none(http, stream, whole):
    response = await http.post("/v1/audio/speech", json=SAY | {"response_format": "wav", "stream": stream})
    assert ("content-length" in response.headers) is whole
    assert (response.headers.get("transfer-encoding") == "chunked") is not whole
    assert (response.content[4:8] != b"\xff\xff\xff\xff") is whole


async def test_a_text_without_sound_gives_an_empty_file(asgi, backend):
    async def silent(payload):
        for nothing in ():
            yield nothing

    backend.script = silent
    response = await asgi.post("/v1/audio/speech", json=SAY | {"response_format": "wav"})
    assert (response.status_code, len(response.content)) == (200, 44)


async def test_audio_arrives_while_the_pipeline_still_speaks(client, backend):
    more = asyncio.Event()

    async def in_two_halves(payload):
        yield TONE[:8000]
        await more.wait()
        yield TONE[8000:]

    backend.script = in_two_halves
    request = client.audio.speech.with_streaming_response.create(
        model="demo", voice="bert", input="hello", response_format="pcm"
    )
    async with request as response:
        received = b""
        async for data in response.iter_bytes():
            received += data
            if len(received) == 16000:
                more.set()
    assert len(received) == 32000


async def test_every_option_reaches_the_entry_stage(client, backend):
    extensions = {"seed": 7, "temperature": 0.5, "top_k": 20, "max_new_tokens": 100}
    await client.audio.speech.create(
        model="voice-1", voice={"id": "bert"}, input="hi", speed=2, instructions="softly", extra_body=extensions
    )
    assert backend.handles[0].payload == {"input": "hi", "voice": "bert", "speed": 2.0} | extensions


@pytest.mark.parametrize(("asked", "passed_on"), [(0, 0), (-1, 0), (1, 1)])
async def test_top_k_0_and_minus_1_are_all(asgi, backend, asked, passed_on):
    assert (await asgi.post("/v1/audio/speech", json=SAY | {"top_k": asked})).status_code == 200
    assert backend.handles[0].payload["top_k"] == passed_on


async def test_server_sent_events_carry_the_audio_and_the_usage(asgi):
    response = await asgi.post("/v1/audio/speech", json=SAY | {"stream_format": "sse", "response_format": "pcm"})
    events = [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n") if line]
    audio = b"".join(base64.b64decode(each["audio"]) for each in events[:-1])
    assert response.headers["content-type"].startswith("text/event-stream")
    assert {each["type"] for each in events[:-1]} == {"speech.audio.delta"}
    assert len(audio) == 32000
    assert events[-1] == {
        "type": "speech.audio.done",
        "usage": {"input_tokens": 3, "output_tokens": 25, "total_tokens": 28},
    }


BAD_FIELDS = [
    ({"input": ""}, "input", "input is empty"),
    ({"input": " \n\t"}, "input", "input is empty"),
    ({"input": "x" * 201}, "input", "201 characters; the limit is 200"),
    ({"input": None}, "input", "input is required"),
    ({"input": 5}, "input", "valid string"),
    ({"input": ["a"]}, "input", "valid string"),
    ({"model": 1}, "model", "valid string"),
    ({"voice": "carl"}, "voice", "choose from anna, bert"),
    ({"voice": {"id": "carl"}}, "voice", "choose from anna, bert"),
    ({"voice": {"name": "anna"}}, "voice", "valid string"),
    ({"voice": 3}, "voice", "valid string"),
    ({"response_format": "midi"}, "response_format", "choose from mp3, opus, flac, wav, pcm"),
    ({"response_format": "aac"}, "response_format", "cannot be written"),
    ({"response_format": True}, "response_format", "valid string"),
    ({"speed": 0.2}, "speed", "greater than or equal to 0.25"),
    ({"speed": 4.5}, "speed", "less than or equal to 4"),
    ({"speed": True}, "speed", "valid number"),
    ({"speed": "fast"}, "speed", "valid number"),
    ({"speed": "1.0"}, "speed", "valid number"),
    ({"stream_format": "mp3"}, "stream_format", "'audio' or 'sse'"),
    ({"stream": "yes"}, "stream", "valid boolean"),
    ({"stream": False, "stream_format": "sse"}, "stream", "is a stream"),
    ({"instructions": 1}, "instructions", "valid string"),
    ({"seed": True}, "seed", "valid integer"),
    ({"seed": 1.5}, "seed", "valid integer"),
    ({"seed": 2**63}, "seed", "less than"),
    ({"temperature": -0.1}, "temperature", "greater than or equal to 0"),
    ({"temperature": 2.1}, "temperature", "less than or equal to 2"),
    ({"top_k": -2}, "top_k", "greater than or equal to -1"),
    ({"max_new_tokens": 0}, "max_new_tokens", "greater than or equal to 1"),
    ({"max_new_tokens": False}, "max_new_tokens", "valid integer"),
    ({"respnse_format": "wav"}, "respnse_format", "did you mean 'response_format'?"),
    ({"zzz": 1}, "zzz", "not a field of this request"),
]


@pytest.mark.parametrize(("change", "param", "words"), BAD_FIELDS)
async def test_a_wrong_field_is_named(asgi, backend, change, param, words):
    response = await asgi.post("/v1/audio/speech", json=SAY | change)
    error = response.json()["error"]
    assert response.status_code == 400
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, "invalid_request")
    assert words in error["message"]
    assert not backend.handles


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"", 400, "empty"),
        (b"{", 400, "not valid JSON"),
        (b"[]", 400, "must be a JSON object"),
        (b'"text"', 400, "must be a JSON object"),
        (b"\xff\xfe", 400, "not valid JSON"),
        (b'{"model":"demo","input":"a","speed":NaN}', 400, "not valid JSON"),
        (b'{"model":"demo","input":"a","speed":-Infinity}', 400, "not valid JSON"),
        (b'{"model":"demo","input":"a","speed":1e999}', 400, "speed"),
        (b'{"model":"demo","input":"\\ud800"}', 400, "not valid JSON"),
        (b"[" * 100_000, 400, "not valid JSON"),
        (b'{"input":"a"}', 400, "model is required"),
        (b'{"model":"gpt-9","input":"a"}', 404, "use 'demo'"),
    ],
)
async def test_a_wrong_body_is_refused(asgi, body, status, words):
    response = await asgi.post("/v1/audio/speech", content=body, headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["type"]) == (status, "invalid_request_error")
    assert words in response.json()["error"]["message"]


async def test_the_official_client_understands_the_errors(client):
    with pytest.raises(openai.BadRequestError, match="choose from anna, bert") as caught:
        await client.audio.speech.create(model="demo", voice="carl", input="hello")
    assert caught.value.param == "voice"
    with pytest.raises(openai.NotFoundError) as caught:
        await client.audio.speech.create(model="tts-1", voice="anna", input="hello")
    assert caught.value.code == "model_not_found"


async def test_a_form_is_not_accepted(asgi):
    response = await asgi.post("/v1/audio/speech", data={"input": "hello"})
    assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidRequest("no word to speak", "input"), 400, "invalid_request"),
        (StageFailed("it broke", stage="vocoder", instance="speech@r1"), 500, "stage_failed"),
        (PayloadError("stage vocoder, key audio: a set"), 500, "payload_type"),
        (ProcessExited("exit status -9", stage="vocoder", instance="speech@r1"), 502, "process_exited"),
        (RequestAborted("the server is shutting down"), 503, "request_aborted"),
        (DeadlineExceeded("60 s are over"), 504, "deadline_exceeded"),
        (RuntimeError("secret detail"), 500, "internal_error"),
    ],
)
@pytest.mark.parametrize("how", [{}, {"stream_format": "sse"}, {"stream": False}])
async def test_an_error_before_the_first_audio_has_its_status(asgi, backend, error, status, code, how):
    backend.script = failing(error)
    response = await asgi.post("/v1/audio/speech", json=SAY | how)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert "secret" not in response.text
    assert response.headers["x-request-id"]
    if isinstance(error, StageFailed):
        assert response.json()["error"]["message"] == "it broke (stage vocoder, instance speech@r1)"


async def test_a_full_server_says_when_to_come_back(asgi, backend):
    backend.full = True
    response = await asgi.post("/v1/audio/speech", json=SAY)
    assert (response.status_code, response.headers["retry-after"]) == (503, "3")
    assert response.json()["error"]["code"] == "overloaded"
    assert await metric(asgi, 'sgl_omni_requests_total{outcome="rejected"}') == 1


async def test_an_error_after_the_first_audio_is_one_line_of_the_log(http, backend, caplog):
    backend.script = failing(StageFailed("stage 'vocoder' failed", stage="vocoder", instance="vocoder@r1"), after=3)
    for _ in range(2):
        with pytest.raises(httpx.RemoteProtocolError):
            await http.post("/v1/audio/speech", json={**SAY, "response_format": "pcm"})
    said = [(record.name, record.levelname) for record in caplog.records if record.levelno >= logging.WARNING]
    assert said == [("sgl_omni.server.streaming", "WARNING")] * 2
    assert "broke off: StageFailed: stage 'vocoder' failed" in caplog.text


async def test_a_response_that_is_left_unfinished_by_mistake_is_still_logged(caplog):
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})

    server = HttpServer(app, bind("127.0.0.1", 0))
    running = asyncio.create_task(server.run())
    async with httpx.AsyncClient(base_url=server.url) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get("/")
    server.stop()
    await running
    assert "ASGI callable returned without completing response." in caplog.text


async def test_an_error_after_the_first_audio_leaves_the_body_incomplete(http, backend):
    backend.script = failing(StageFailed("it broke", stage="vocoder"), after=3)
    with pytest.raises(httpx.RemoteProtocolError):
        await http.post("/v1/audio/speech", json=SAY | {"response_format": "wav"})
    assert await metric(http, 'sgl_omni_requests_total{outcome="error"}') == 1


async def test_an_error_after_the_first_event_is_an_event(asgi, backend):
    backend.script = failing(StageFailed("it broke", stage="vocoder", instance="speech"), after=3)
    response = await asgi.post("/v1/audio/speech", json=SAY | {"response_format": "pcm", "stream_format": "sse"})
    last = response.text.split("\n\n")[-2]
    assert last.startswith("event: error\ndata: ")
    assert json.loads(last.split("data: ")[1])["error"]["code"] == "stage_failed"


async def test_a_late_error_of_a_whole_file_still_has_its_status(asgi, backend):
    backend.script = failing(ProcessExited("exit status 1"), after=3)
    response = await asgi.post("/v1/audio/speech", json=SAY | {"response_format": "flac"})
    assert response.status_code == 502


@pytest.mark.parametrize("format", ["wav", "mp3", "opus", "flac"])
@pytest.mark.parametrize("how", [{}, {"stream_format": "sse"}])
async def test_a_client_that_leaves_while_audio_streams_aborts_the_request(http, backend, format, how):
    backend.script = endless
    hang_up = asyncio.create_task(http.post("/v1/audio/speech", json=SAY | how | {"response_format": format}))
    await asyncio.sleep(0.1)
    hang_up.cancel()
    await until(lambda: backend.handles[0].aborted is not None)
    assert backend.handles[0].aborted == "client disconnected"
    async with asyncio.timeout(2):
        while await metric(http, 'sgl_omni_requests_total{outcome="aborted"}') != 1:
            await asyncio.sleep(0.01)


async def test_a_client_that_leaves_before_the_first_audio_aborts_the_request(http, backend):
    backend.script = mute
    waiting = asyncio.create_task(http.post("/v1/audio/speech", json=SAY))
    await until(lambda: bool(backend.handles))
    waiting.cancel()
    await until(lambda: backend.handles[0].aborted == "client disconnected", seconds=0.5)


async def test_a_client_that_reads_nothing_and_leaves_aborts_the_request(url, backend):
    """The send that waits for the client must not keep the request alive."""

    async def flood(payload):
        while True:
            yield np.zeros(160_000, dtype=np.float32)
            await asyncio.sleep(0.001)

    backend.script = flood
    body = json.dumps(SAY | {"response_format": "wav"}).encode()
    head = f"POST /v1/audio/speech HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    _, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port)
    writer.write(f"{head}\r\n\r\n".encode() + body)
    await asyncio.sleep(0.1)
    writer.transport.abort()
    await until(lambda: backend.handles[0].aborted == "client disconnected")


async def test_a_request_that_ends_well_is_never_aborted(http, backend):
    for format in ("wav", "flac"):
        await http.post("/v1/audio/speech", json=SAY | {"response_format": format})
    assert [handle.aborted for handle in backend.handles] == [None, None]
    assert await metric(http, 'sgl_omni_requests_total{outcome="ok"}') == 2
    assert await metric(http, "sgl_omni_time_to_first_audio_seconds_count") == 2
    assert await metric(http, "sgl_omni_request_duration_seconds_count") == 2
    assert await metric(http, "sgl_omni_audio_seconds_total") == pytest.approx(2.0)


async def test_stopping_the_server_aborts_what_outlasts_its_grace(backend):
    backend.script = endless
    server = HttpServer(create_app(backend, Tasks(speech=TASK), "demo"), bind("127.0.0.1", 0), grace=0.2)
    running = asyncio.create_task(server.run())
    async with httpx.AsyncClient(base_url=server.url) as http:
        listening = asyncio.create_task(http.post("/v1/audio/speech", json=SAY | {"response_format": "wav"}))
        await until(lambda: bool(backend.handles))
        server.stop()
        await asyncio.wait_for(running, 3)
        with pytest.raises(httpx.RemoteProtocolError):
            await listening
    assert backend.handles[0].aborted


async def test_a_body_of_a_hundred_megabytes_is_refused_unread(http, backend):
    async def megabytes():
        for _ in range(100):
            yield b" " * 1_000_000

    for content in (b" " * 100_000_000, megabytes()):
        response = await http.post("/v1/audio/speech", content=content, headers={"content-type": "application/json"})
        assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
        assert "1048576 bytes" in response.json()["error"]["message"]
    assert not backend.handles


@pytest.mark.parametrize(("path", "status"), [("/v1/audio/speech", 413), ("/nowhere", 404), ("/health", 405)])
async def test_a_body_without_end_gets_its_answer_and_then_the_end_of_the_connection(url, monkeypatch, path, status):
    monkeypatch.setattr("sgl_omni.server.middleware.DRAIN_BYTES", 4 << 20)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    loop, sent = asyncio.get_running_loop(), 0
    # A stream would drop what it has not read yet once it cannot write.
    with socket.create_connection(("127.0.0.1", httpx.URL(url).port)) as client:
        client.setblocking(False)
        await loop.sock_sendall(client, head.encode())
        try:
            while sent < 64 << 20:
                await loop.sock_sendall(client, b"10000\r\n" + b" " * 65536 + b"\r\n")
                sent += 65536
        except ConnectionError:
            pass
        assert sent < 64 << 20, "the server must not read for ever"
        assert (await loop.sock_recv(client, 64)).startswith(f"HTTP/1.1 {status} ".encode())


async def test_a_client_that_announces_too_much_is_answered_before_it_sends(url, monkeypatch):
    monkeypatch.setattr("sgl_omni.server.middleware.DRAIN_SECONDS", 3600.0)
    head = "POST /v1/audio/speech HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port)
    writer.write(head.format(10**10).encode())
    async with asyncio.timeout(20):
        answer = await reader.readuntil(b"\r\n\r\n")
        size = int(re.search(rb"content-length: (\d+)", answer.lower())[1])
        error = json.loads(await reader.readexactly(size))["error"]
    assert answer.startswith(b"HTTP/1.1 413 ") and b"connection: close" in answer.lower()
    assert error["code"] == "request_too_large"
    writer.close()


async def test_an_early_answer_to_a_whole_body_keeps_the_connection(http):
    async def half_a_megabyte():
        for _ in range(8):
            yield b" " * 65536

    response = await http.post("/nowhere", content=half_a_megabyte())
    assert (response.status_code, response.headers.get("connection")) == (404, None)


async def test_a_refusal_stays_short_whatever_was_sent(asgi):
    many = {f"field{i}": 1 for i in range(50_000)}
    for wrong in (many, {"voice": "x" * 500_000}, {"model": "y" * 500_000}, {"response_format": "z" * 500_000}):
        response = await asgi.post("/v1/audio/speech", json=SAY | wrong)
        assert response.status_code in (400, 404)
        assert len(response.content) < 4000
    assert "and 49990 more" in (await asgi.post("/v1/audio/speech", json=SAY | many)).json()["error"]["message"]
    assert (await asgi.post("/v1/audio/speech", json=SAY | {"response_format": ""})).status_code == 400


async def test_a_client_that_sends_half_a_body_and_leaves_does_no_harm(http, url):
    with socket.create_connection(("127.0.0.1", httpx.URL(url).port)) as sock:
        sock.sendall(b"POST /v1/audio/speech HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert (await http.get("/health")).status_code == 200


async def test_fifty_requests_at_once(http, backend):
    async def one(number: int) -> bytes:
        response = await http.post("/v1/audio/speech", json=SAY | {"input": str(number), "response_format": "pcm"})
        return response.content

    bodies: list[Awaitable[bytes]] = [one(number) for number in range(50)]
    assert {len(body) for body in await asyncio.gather(*bodies)} == {32000}
    assert len({handle.id for handle in backend.handles}) == 50


async def test_request_ids(http, backend):
    named = await http.post("/v1/audio/speech", json=SAY, headers={"X-Request-Id": "abc-1"})
    again = await http.post("/v1/audio/speech", json=SAY, headers={"X-Request-Id": "abc-1"})
    assert named.headers["x-request-id"] == again.headers["x-request-id"] == "abc-1"
    assert [handle.id for handle in backend.handles] == ["abc-1.0", "abc-1.1"]
    for insane in ("a b", "x" * 129, "a\tb", ""):
        response = await http.get("/health", headers={"X-Request-Id": insane})
        assert response.headers["x-request-id"].startswith("req-")


async def test_voices(asgi):
    assert (await asgi.get("/v1/audio/voices")).json() == {
        "voices": [{"id": "anna", "name": "anna"}, {"id": "bert", "name": "bert"}],
        "default": "anna",
    }


async def test_encoding_leaves_the_event_loop_free(asgi, backend):
    """Half a minute of Opus takes a third of a second to encode, in a thread."""

    async def long(payload):
        yield np.tile(TONE, 30)

    backend.script = long
    request = asyncio.create_task(asgi.post("/v1/audio/speech", json=SAY | {"response_format": "opus"}))
    turns = 0
    while not request.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert (await request).status_code == 200
    assert turns > 20, "encoding on the loop would leave it a handful of turns"


async def test_a_body_that_stops_coming_gets_its_answer_and_the_end_of_the_connection(url, backend, monkeypatch):
    monkeypatch.setattr("sgl_omni.server.middleware.SILENT_SECONDS", 0.3)
    head = "POST /v1/audio/speech HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{"
    reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port)
    writer.write(head.encode())
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 408") and b"paused" in answer
    assert not backend.handles


async def test_a_caller_may_wait_long_for_the_audio(url, backend, monkeypatch):
    monkeypatch.setattr("sgl_omni.server.middleware.SILENT_SECONDS", 0.1)
    backend.script = slow
    async with httpx.AsyncClient(base_url=url) as http:
        assert (await http.post("/v1/audio/speech", json=SAY | {"response_format": "wav"})).status_code == 200


async def test_a_voice_is_known_however_it_is_capitalised(asgi, backend):
    for name in ("bert", "Bert", "BERT"):
        assert (await asgi.post("/v1/audio/speech", json=SAY | {"voice": name})).status_code == 200
    assert {handle.payload["voice"] for handle in backend.handles} == {"bert"}


@pytest.mark.parametrize("body", [{}, {"stream": False}, {"stream_format": "sse"}])
async def test_a_refusal_of_the_pipeline_that_names_no_field_is_of_the_text(asgi, backend, body):
    backend.script = failing(InvalidRequest("makes a prompt of 9 positions; the model has 8"))
    response = await asgi.post("/v1/audio/speech", json=SAY | body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "input")
