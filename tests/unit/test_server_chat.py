"""The chat and completion routes in front of a pipeline that is played."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile

from sgl_omni.config.tasks import ChatTask, Tasks
from sgl_omni.errors import InvalidRequest, Overloaded, RequestAborted, StageFailed
from sgl_omni.listening import bind
from sgl_omni.media.source import MediaSource
from sgl_omni.server.app import create_app
from sgl_omni.server.serve import HttpServer

RATE = 24000
TONE = (0.4 * np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE)).astype(np.float32)
TEXT = ChatTask(text_output="decode", completes_text=True)
OMNI = ChatTask(
    text_output="decode",
    audio_output="code2wav",
    inputs=("text", "image", "audio", "video"),
    voices=("Ethan", "chelsie"),
    default_voice="Ethan",
    sample_rate=RATE,
)
ASK = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
Events = list[dict[str, Any]]


class Handle:
    """Gives the chunks of a script, then its results."""

    def __init__(self, request_id: str, script: list[Any], results: dict[str, Any]) -> None:
        self.id = request_id
        self.aborted: str | None = None
        self._script = script
        self._results = results
        self._gone = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[Any]:
        for item in self._script:
            if item is None:
                await self._gone.wait()
                raise RequestAborted("gone")
            if isinstance(item, Exception):
                raise item
            await asyncio.sleep(0)
            yield SimpleNamespace(stage=item[0], payload=item[1])

    async def result(self) -> dict[str, Any]:
        async for _ in self:
            continue
        return self._results

    def abort(self, reason: str) -> None:
        self.aborted = self.aborted or reason
        self._gone.set()


@dataclass
class Backend:
    """Remembers what it was asked; answers ``words``, and a tone where speech is wanted."""

    words: tuple[Any, ...] = ("Good", " ", "morning", "")
    finish_reason: str = "stop"
    asked: list[tuple[dict[str, Any], Any]] = field(default_factory=list)
    handles: list[Handle] = field(default_factory=list)
    full: bool = False

    def submit(self, payload: Any, *, outputs: Any = None, request_id: Any = None, timeout: Any = None) -> Handle:
        if self.full:
            raise Overloaded("full", retry_after=2)
        self.asked.append((payload, outputs))
        script = [word if not isinstance(word, str) else ("decode", {"text": word}) for word in self.words]
        text = "".join(word for word in self.words if isinstance(word, str))
        counts = {"finish_reason": self.finish_reason, "input_tokens": 5, "output_tokens": 3}
        results = {"decode": {"text": text, **counts}}
        if "code2wav" in outputs:
            script += [("code2wav", {"audio": part, "sample_rate": RATE}) for part in np.split(TONE, 10)]
            results["code2wav"] = {**counts, "output_tokens": 12}
        self.handles.append(Handle(f"{request_id}.1", script, results))
        return self.handles[-1]

    def health(self) -> dict[str, Any]:
        return {"status": "ready", "model": "m", "instances": []}

    async def refresh(self) -> None:
        return

    def stats(self) -> dict[str, Any]:
        return {}


@pytest.fixture
def backend() -> Backend:
    return Backend()


def client(backend: Backend, task: ChatTask = TEXT, **options: Any) -> httpx.AsyncClient:
    app = create_app(backend, Tasks(chat=task), "m", **options)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


async def post(backend: Backend, body: dict[str, Any], task: ChatTask = TEXT, route: str = "chat/completions") -> Any:
    async with client(backend, task) as http:
        return await http.post(f"/v1/{route}", json=body)


def events(response: httpx.Response) -> tuple[Events, bool]:
    """The objects of a stream, and whether it ended well."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    done = lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[: len(lines) - done]], done


async def test_an_answer(backend: Backend) -> None:
    response = await post(backend, ASK)
    answer = response.json()
    assert (response.status_code, answer["object"], answer["model"]) == (200, "chat.completion", "m")
    assert answer["id"].startswith("chatcmpl-") and answer["created"] > 1_700_000_000
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Good morning", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    assert backend.asked == [
        (
            {
                "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
                "media": [],
                "modalities": ["text"],
                "voice": None,
                "stream": False,
            },
            ["decode"],
        )
    ]


async def test_a_stream(backend: Backend) -> None:
    backend.finish_reason = "length"
    found, done = events(await post(backend, {**ASK, "stream": True, "stream_options": {"include_usage": True}}))
    assert done and {chunk["object"] for chunk in found} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in found}) == 1
    deltas = [chunk["choices"][0]["delta"] for chunk in found[:-1]]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None} and deltas[-1] == {}
    assert [delta["content"] for delta in deltas[1:-1]] == ["Good", " ", "morning"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in found[:-1]] == [None] * 4 + ["length"]
    assert all(chunk["usage"] is None for chunk in found[:-1])
    assert found[-1]["choices"] == [] and found[-1]["usage"]["total_tokens"] == 8
    plain, _ = events(await post(backend, {**ASK, "stream": True}))
    assert all("usage" not in chunk for chunk in plain) and len(plain) == len(found) - 1


async def test_what_is_asked_reaches_the_pipeline(backend: Backend) -> None:
    options = {
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 7,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
    }
    template = {"chat_template_kwargs": {"enable_thinking": False}}
    harmless = {"user": "u", "metadata": {"a": "b"}, "store": True, "n": 1, "tools": [], "logprobs": False}
    neutral = {"response_format": {"type": "text"}, "presence_penalty": 0.0, "frequency_penalty": 0}
    body = {**ASK, **options, **template, **harmless, **neutral, "max_completion_tokens": 9, "stop": "x", "top_k": -1}
    assert (await post(backend, body)).status_code == 200
    payload = backend.asked[0][0]
    assert {name: payload[name] for name in options} == options
    assert (payload["template"], payload["max_new_tokens"]) == ({"enable_thinking": False}, 9)
    assert (payload["stop"], payload["top_k"]) == (["x"], 0)
    await post(backend, {**ASK, "max_tokens": 4, "stop": ["a", "b"]})
    assert (backend.asked[1][0]["max_new_tokens"], backend.asked[1][0]["stop"]) == (4, ["a", "b"])


TURN = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [TURN, {"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages[1]"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "assistant", "content": None, "audio": {"id": "a"}}]}, "messages[0].content"),
        ({"n": 2}, "n"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"logprobs": True}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": ""}, "stop[0]"),
        ({"stop": ["a" * 257]}, "stop[0]"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"min_tokens": 5}, "min_tokens"),
    ],
)
async def test_what_cannot_be_asked_is_named(backend: Backend, fields: dict[str, Any], param: str) -> None:
    response = await post(backend, {**ASK, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert not backend.asked


async def test_roles_and_parts(backend: Backend) -> None:
    messages = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "ann"},
        {"role": "assistant", "content": "c", "refusal": None, "audio": None, "tool_calls": None},
        {"role": "user", "content": ""},
    ]
    assert (await post(backend, {**ASK, "messages": messages})).status_code == 200
    found = [(m["role"], [p["text"] for p in m["content"]]) for m in backend.asked[0][0]["messages"]]
    assert found == [("system", ["Be kind."]), ("user", ["a", "b"]), ("assistant", ["c"]), ("user", [""])]


def data_url(data: bytes) -> str:
    return f"data:application/octet-stream;base64,{base64.b64encode(data).decode()}"


async def test_media_are_fetched_and_numbered(backend: Backend, tmp_path: Path) -> None:
    (tmp_path / "frame.png").write_bytes(b"frame two")
    content = [
        {"type": "image_url", "image_url": {"url": data_url(b"picture"), "detail": "high"}},
        {"type": "text", "text": "and"},
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(b"sound").decode(), "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": data_url(b"other sound")}},
        {"type": "video", "video": [data_url(b"frame one"), f"file://{tmp_path}/frame.png"]},
        {"type": "video_url", "video_url": data_url(b"film")},
    ]
    body = {**ASK, "messages": [{"role": "user", "content": content}]}
    async with client(backend, OMNI, media=MediaSource(allowed_path=tmp_path)) as http:
        response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    payload, place = backend.asked[0][0], "messages[0].content"
    assert payload["messages"][0]["content"] == [
        {"type": "image", "media": [0], "params": [f"{place}[0].image_url.url"]},
        {"type": "text", "text": "and"},
        {"type": "audio", "media": [1], "params": [f"{place}[2].input_audio.data"]},
        {"type": "audio", "media": [2], "params": [f"{place}[3].audio_url.url"]},
        {"type": "video", "media": [3, 4], "params": [f"{place}[4].video[0]", f"{place}[4].video[1]"]},
        {"type": "video", "media": [5], "params": [f"{place}[5].video_url.url"]},
    ]
    assert payload["media"] == [b"picture", b"sound", b"other sound", b"frame one", b"frame two", b"film"]


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "image_url", "image_url": "http://elsewhere/x.png"}, "image_url.url"),
        ({"type": "image_url", "image_url": "/etc/passwd"}, "image_url.url"),
        ({"type": "input_audio", "input_audio": {"data": "%"}}, "input_audio.data"),
        ({"type": "video", "video": ["data:,a", "ftp://x"]}, "video[1]"),
        ({"type": "video", "video": []}, "video"),
    ],
)
async def test_media_that_are_not_to_be_had_are_named(backend: Backend, part: dict[str, Any], param: str) -> None:
    response = await post(backend, {**ASK, "messages": [{"role": "user", "content": [part]}]}, OMNI)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == f"messages[0].content[0].{param}"
    assert not backend.asked


async def test_too_many_files_are_refused(backend: Backend) -> None:
    part = {"type": "video", "video": ["data:,a"] * 1025}
    response = await post(backend, {**ASK, "messages": [{"role": "user", "content": [part]}]}, OMNI)
    assert response.status_code == 400 and "1024 files" in response.text


SPEAK = {**ASK, "modalities": ["text", "audio"], "audio": {"voice": "Chelsie", "format": "wav"}}


async def test_a_spoken_answer(backend: Backend) -> None:
    response = await post(backend, SPEAK, OMNI)
    message = response.json()["choices"][0]["message"]
    assert (message["content"], message["audio"]["transcript"]) == ("Good morning", "Good morning")
    assert message["audio"]["id"].startswith("audio_") and message["audio"]["expires_at"]
    samples, rate = soundfile.read(io.BytesIO(base64.b64decode(message["audio"]["data"])), dtype="float32")
    assert (rate, len(samples), response.headers["x-sample-rate"]) == (RATE, RATE, str(RATE))
    assert np.abs(samples - TONE).max() < 1e-3
    payload, outputs = backend.asked[0]
    assert (payload["voice"], payload["modalities"], outputs) == (
        "chelsie",
        ["text", "audio"],
        ["decode", "code2wav"],
    )
    assert response.json()["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 15,
        "total_tokens": 20,
        "completion_tokens_details": {"audio_tokens": 12},
    }


@pytest.mark.parametrize("format", ["pcm16", "wav", "mp3"])
async def test_a_spoken_stream_is_the_same_answer(backend: Backend, format: str) -> None:
    body = {**SPEAK, "audio": {"format": format}, "stream": True}
    found, done = events(await post(backend, body, OMNI))
    deltas = [chunk["choices"][0]["delta"] for chunk in found]
    audio = [delta["audio"] for delta in deltas if "audio" in delta]
    assert done and len({each["id"] for each in audio}) == 1
    assert "".join(each.get("transcript", "") for each in audio) == "Good morning"
    assert "".join(delta.get("content", "") for delta in deltas) == "Good morning"
    data = b"".join(base64.b64decode(each["data"]) for each in audio if "data" in each)
    assert sum("data" in each for each in audio) > 3 or format == "mp3"
    assert backend.asked[0][0]["voice"] == "Ethan"
    if format == "pcm16":
        assert np.array_equal(np.frombuffer(data, "<i2"), np.rint(TONE * 32767).astype("<i2"))
    else:
        assert abs(len(soundfile.read(io.BytesIO(data))[0]) - RATE) < RATE / 10


@pytest.mark.parametrize(
    ("audio", "param"),
    [({"voice": "nobody"}, "audio.voice"), ({"format": "ogg3"}, "audio.format"), ({"speed": 2}, "audio.speed")],
)
async def test_audio_options_that_are_none_are_named(backend: Backend, audio: dict[str, Any], param: str) -> None:
    response = await post(backend, {**SPEAK, "audio": audio}, OMNI)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_openai_stock_voices_are_the_default_voice(backend: Backend) -> None:
    await post(backend, {**SPEAK, "audio": {"voice": {"id": "alloy"}, "format": "pcm16"}}, OMNI)
    assert backend.asked[0][0]["voice"] == "Ethan"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_answer_has_its_status(backend: Backend, stream: bool) -> None:
    for error, status in ((InvalidRequest("too long", "messages"), 400), (StageFailed("broke", stage="llm"), 500)):
        backend.words = (error,)
        response = await post(backend, {**ASK, "stream": stream})
        assert (response.status_code, response.json()["error"]["message"]) == (
            status,
            "too long" if status == 400 else "broke (stage llm)",
        )
    backend.full = True
    response = await post(backend, {**ASK, "stream": stream})
    assert (response.status_code, response.headers["retry-after"]) == (503, "2")


async def test_an_error_in_a_stream_is_its_last_event(backend: Backend) -> None:
    backend.words = ("Good", StageFailed("broke", stage="llm"))
    found, done = events(await post(backend, {**ASK, "stream": True}))
    assert not done
    assert found[1]["choices"][0]["delta"]["content"] == "Good"
    assert found[-1]["error"]["message"] == "broke (stage llm)" and found[-1]["error"]["type"] == "server_error"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_aborts(backend: Backend, stream: bool) -> None:
    backend.words = ("Good", None)
    server = HttpServer(create_app(backend, Tasks(chat=TEXT), "m"), bind("127.0.0.1", 0))
    running = asyncio.create_task(server.run())
    async with httpx.AsyncClient(base_url=server.url, timeout=0.5) as http:
        with pytest.raises(httpx.ReadTimeout):
            await http.post("/v1/chat/completions", json={**ASK, "stream": stream})
    async with asyncio.timeout(5):
        while not backend.handles[0].aborted:
            await asyncio.sleep(0.01)
    assert backend.handles[0].aborted == "client disconnected"
    server.stop()
    await asyncio.wait_for(running, 5)


async def test_openais_client_reads_all_of_it(backend: Backend) -> None:
    async with client(backend, OMNI) as http:
        official = openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http, max_retries=0)
        messages: Any = [{"role": "user", "content": "hello"}]
        answer = await official.chat.completions.create(model="m", messages=messages)
        assert answer.choices[0].message.content == "Good morning"
        # What came back goes into the next request as it is.
        again: Any = [*messages, answer.choices[0].message.model_dump(), *messages]
        await official.chat.completions.create(model="m", messages=again)
        stream = await official.chat.completions.create(
            model="m", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        text, total = "", 0
        async for chunk in stream:
            if chunk.choices:
                text += chunk.choices[0].delta.content or ""
            elif chunk.usage:
                total = chunk.usage.total_tokens
        assert (text, total) == ("Good morning", 8)
        spoken = await official.chat.completions.create(
            model="m", messages=messages, modalities=["text", "audio"], audio={"voice": "alloy", "format": "wav"}
        )
        assert spoken.choices[0].message.audio is not None
        assert spoken.choices[0].message.audio.transcript == "Good morning"
        backend.words = ("Good", StageFailed("broke", stage="llm"))
        with pytest.raises(openai.APIError, match="broke"):
            async for _ in await official.chat.completions.create(model="m", messages=messages, stream=True):
                pass


COMPLETE = {"model": "m", "prompt": "Once"}


async def test_a_completion(backend: Backend) -> None:
    answer = (await post(backend, COMPLETE, route="completions")).json()
    assert (answer["object"], answer["id"][:5]) == ("text_completion", "cmpl-")
    assert answer["choices"] == [{"index": 0, "text": "Good morning", "logprobs": None, "finish_reason": "stop"}]
    assert answer["usage"]["completion_tokens"] == 3
    payload = {"prompt": "Once", "modalities": ["text"], "max_new_tokens": 16, "stream": False}
    assert backend.asked == [(payload, ["decode"])]
    body = {**COMPLETE, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 5}
    found, done = events(await post(backend, body, route="completions"))
    assert done and "".join(c["text"] for chunk in found for c in chunk["choices"]) == "Good morning"
    assert found[-2]["choices"][0]["finish_reason"] == "stop" and found[-1]["usage"]["total_tokens"] == 8


@pytest.mark.parametrize(("prompt", "expected"), [("a", "a"), (["a"], "a"), ([3, 4], [3, 4]), ([[3, 4]], [3, 4])])
async def test_shapes_of_a_prompt(backend: Backend, prompt: Any, expected: Any) -> None:
    assert (await post(backend, {**COMPLETE, "prompt": prompt}, route="completions")).status_code == 200
    assert backend.asked[0][0]["prompt"] == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**70]}, "prompt"),
        ({"prompt": [[True]]}, "prompt"),
        ({"prompt": [[[1]]]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"echo": True}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 0}, "logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"n": 3}, "n"),
        ({"messages": []}, "messages"),
    ],
)
async def test_completions_that_cannot_be_are_named(backend: Backend, fields: dict[str, Any], param: str) -> None:
    response = await post(backend, {**COMPLETE, **fields}, route="completions")
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_ids_out_of_range_are_told_the_range(backend: Backend) -> None:
    response = await post(backend, {**COMPLETE, "prompt": [2**70]}, route="completions")
    assert "token ids are whole numbers from 0 to 2147483647" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("route", "body", "param"), [("chat/completions", ASK, "messages"), ("completions", COMPLETE, "prompt")]
)
async def test_a_refusal_of_the_pipeline_that_names_no_field_is_of_the_main_one(
    backend: Backend, route: str, body: dict[str, Any], param: str
) -> None:
    for error, named in ((InvalidRequest("too long"), param), (InvalidRequest("no", "seed"), "seed")):
        backend.words = (error,)
        for more in ({}, {"stream": True}):
            response = await post(backend, {**body, **more}, route=route)
            assert (response.status_code, response.json()["error"]["param"]) == (400, named)
    backend.words = ("Good", InvalidRequest("too long"))
    assert f'"param": "{param}"' in (await post(backend, {**body, "stream": True}, route=route)).text


async def test_all_that_an_unsupported_field_may_say_is_told(backend: Backend) -> None:
    message = (await post(backend, {**ASK, "tool_choice": "required"})).json()["error"]["message"]
    assert message == "tool_choice is not supported by this server; it may only be 'none' or 'auto'"


async def test_voices_of_a_model_that_speaks_in_conversations_are_listed(backend: Backend) -> None:
    for task, expected in ((OMNI, ["Ethan", "chelsie"]), (TEXT, None)):
        app = create_app(backend, Tasks(chat=task), "m")
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            response = await client.get("/v1/audio/voices")
            if expected is None:
                assert response.status_code == 404
                continue
            voices = [{"id": name, "name": name} for name in expected]
            assert response.json() == {"voices": voices, "default": "Ethan"}
            assert "GET  /v1/audio/voices" in (await client.get("/")).text
            assert (await client.post("/v1/audio/voices", data={"name": "a"})).status_code == 405


async def test_routes_are_those_that_the_pipeline_serves(backend: Backend) -> None:
    async with client(backend, OMNI) as http:
        page = (await http.get("/")).text
        assert "POST /v1/chat/completions" in page and "/v1/completions" not in page
        assert (await http.post("/v1/completions", json=COMPLETE)).status_code == 404
    async with client(backend) as http:
        assert "POST /v1/completions" in (await http.get("/")).text
        await http.post("/v1/chat/completions", json={**ASK, "stream": True})
        metrics = (await http.get("/metrics")).text
        assert "sgl_omni_time_to_first_text_seconds_count 1.0" in metrics
        assert 'sgl_omni_requests_total{outcome="ok"} 1.0' in metrics
        response = await http.post("/v1/chat/completions", json={**ASK, "model": "other"})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
