import asyncio
import json
import signal

import httpx
import pytest

from sgl_omni.config.tasks import SpeechTask, Tasks
from sgl_omni.errors import StartupError
from sgl_omni.listening import bind
from sgl_omni.server.app import create_app
from sgl_omni.server.serve import HttpServer

TASK = SpeechTask(voices=("anna",), default_voice="anna", sample_rate=16000)

STATS = {
    "requests_total": {"ok": 5, "error": 1, "aborted": 2, "rejected": 3},
    "late_messages": 6,
    "instances": {
        "speech@r0": {"in_flight": 3, "up": 1, "restarts": 0, "kv_tokens_used": 128, "device": "cuda:0"},
        "speech@r1": {"in_flight": 1, "up": 0, "restarts": 2, "kv-tokens free": 1.5},
    },
}


class IdleBackend:
    status = "ready"
    in_flight = 0

    def submit(self, payload, *, outputs=None, request_id=None, timeout=None):
        raise AssertionError("nothing is submitted here")

    def health(self) -> dict:
        return {"status": self.status, "model": "org/demo", "instances": [{"name": "speech@r0", "state": "ready"}]}

    async def refresh(self) -> None:
        self.in_flight = 4

    def stats(self) -> dict:
        return STATS | {"in_flight": self.in_flight}


def client_of(app) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


@pytest.fixture
def backend() -> IdleBackend:
    return IdleBackend()


@pytest.fixture
async def http(backend):
    async with client_of(create_app(backend, Tasks(speech=TASK), "org/demo", aliases=("demo",))) as client:
        yield client


async def test_models(http):
    listed = (await http.get("/v1/models")).json()
    assert (listed["object"], [model["id"] for model in listed["data"]]) == ("list", ["org/demo"])
    for name in ("org/demo", "demo"):
        assert (await http.get(f"/v1/models/{name}")).json() == listed["data"][0]
    missing = await http.get("/v1/models/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("status", "code"), [("ready", 200), ("degraded", 200), ("starting", 503), ("draining", 503), ("failed", 503)]
)
async def test_health(http, backend, status, code):
    backend.status = status
    response = await http.get("/health")
    assert response.status_code == code
    assert response.json() == backend.health()
    head = await http.head("/health")
    assert (head.status_code, head.content) == (code, b"")


async def test_metrics_read_the_pipeline_when_scraped(http):
    response = await http.get("/metrics")
    lines = response.text.splitlines()
    assert response.headers["content-type"].startswith("text/plain; version=")
    for line in (
        'sgl_omni_pipeline_requests_total{outcome="aborted"} 2.0',
        'sgl_omni_requests_total{outcome="ok"} 0.0',
        "sgl_omni_requests_in_flight 4.0",
        "sgl_omni_late_messages_total 6.0",
        'sgl_omni_instance_in_flight{instance="speech@r0"} 3.0',
        'sgl_omni_instance_up{instance="speech@r1"} 0.0',
        'sgl_omni_instance_restarts_total{instance="speech@r1"} 2.0',
        'sgl_omni_instance_kv_tokens_used{instance="speech@r0"} 128.0',
        'sgl_omni_instance_kv_tokens_free{instance="speech@r1"} 1.5',
    ):
        assert line in lines
    assert "cuda:0" not in response.text


async def test_two_servers_in_one_process_count_apart(backend):
    for _ in range(2):
        async with client_of(create_app(backend, Tasks(speech=TASK), "org/demo")) as client:
            assert (await client.post("/v1/audio/speech", json={})).status_code == 400
            text = (await client.get("/metrics")).text
            assert 'sgl_omni_requests_total{outcome="invalid"} 1.0' in text


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v2/nothing", 404, "not_found"),
        ("POST", "/v1/chat/completions", 404, "not_found"),
        ("GET", "/v1/audio/speech", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
    ],
)
async def test_a_wrong_path_or_method_has_the_one_shape(http, method, path, status, code):
    response = await http.request(method, path)
    error = response.json()["error"]
    assert response.status_code == status
    assert error == {
        "message": f"{'Not Found' if status == 404 else 'Method Not Allowed'}: {method} {path}",
        "type": "invalid_request_error",
        "param": None,
        "code": code,
    }
    assert (response.headers.get("allow") is not None) is (status == 405)


async def test_a_pipeline_that_does_not_speak_has_no_speech_route(backend):
    async with client_of(create_app(backend, Tasks(), "org/demo")) as client:
        assert (await client.post("/v1/audio/speech", json={})).status_code == 404
        assert "speech" not in (await client.get("/")).text


async def test_the_first_page_and_the_schema(http):
    assert "POST /v1/audio/speech" in (await http.get("/")).text
    schema = (await http.get("/openapi.json")).json()
    body = schema["paths"]["/v1/audio/speech"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"model", "input", "voice", "seed"} <= set(body["properties"])


def test_a_port_in_use_fails_the_start():
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            bind("127.0.0.1", port)


def test_an_unknown_host_fails_the_start():
    with pytest.raises(StartupError, match="check --host"):
        bind("no such host", 0)


async def test_the_server_leaves_signals_alone_and_frees_its_port(backend):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    server = HttpServer(create_app(backend, Tasks(speech=TASK), "org/demo"), bind("127.0.0.1", 0))
    running = asyncio.create_task(server.run())
    async with httpx.AsyncClient(base_url=server.url) as client:
        assert (await client.get("/health")).status_code == 200
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
        server.stop()
        await asyncio.wait_for(running, 2)
    bind("127.0.0.1", server.port).close()


async def test_an_ipv6_address_has_brackets(backend):
    with bind("::1", 0) as sock:
        assert (
            HttpServer(create_app(backend, Tasks(speech=TASK), "org/demo"), sock).url
            == f"http://[::1]:{sock.getsockname()[1]}"
        )


async def raw(server: HttpServer, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return answer


LONG = b"y" * 70000
CHUNKED = (
    b"POST /v1/audio/speech HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
)


@pytest.mark.parametrize(
    ("request_bytes", "status", "code"),
    [
        (b"nonsense\r\n\r\n", b"400 Bad Request", "invalid_request"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"400 Bad Request", "invalid_request"),
        (b"GET /health HTTP/1.1\r\nno colon here\r\n\r\n", b"400 Bad Request", "invalid_request"),
        (b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: many\r\n\r\n", b"400 Bad Request", "invalid_request"),
        (
            b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: " + b"9" * 30 + b"\r\n\r\n",
            b"400 Bad Request",
            "invalid_request",
        ),
        (b"GET http://[ HTTP/1.1\r\nhost: x\r\n\r\n", b"400 Bad Request", "invalid_request"),
        (CHUNKED + b"no length\r\n", b"400 Bad Request", "invalid_request"),
        (
            b"GET /" + LONG + b" HTTP/1.1\r\nhost: x\r\n\r\n",
            b"431 Request Header Fields Too Large",
            "request_too_large",
        ),
        (
            b"GET /health HTTP/1.1\r\nx: " + LONG + b"\r\n\r\n",
            b"431 Request Header Fields Too Large",
            "request_too_large",
        ),
        (
            b"POST /x HTTP/1.1\r\nx: " + LONG + b"\r\ncontent-length: 2\r\n\r\n{}",
            b"431 Request Header Fields Too Large",
            "request_too_large",
        ),
        (b"GET /health HTTP/1.1\r\nx: " + LONG * 60, b"431 Request Header Fields Too Large", "request_too_large"),
    ],
)
async def test_what_is_no_request_has_the_one_shape_of_errors(backend, request_bytes, status, code):
    server = HttpServer(create_app(backend, Tasks(speech=TASK), "org/demo"), bind("127.0.0.1", 0))
    running = asyncio.create_task(server.run())
    head, _, body = (await raw(server, request_bytes)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 " + status + b"\r\n") and b"content-type: application/json" in head
    error = json.loads(body)["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, code)
    assert len(error["message"]) < 300
    good = await raw(
        server, b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 60000 + b"\r\nconnection: close\r\n\r\n"
    )
    assert good.startswith(b"HTTP/1.1 200 OK\r\n"), "the server goes on, and a long head is no fault"
    server.stop()
    await asyncio.wait_for(running, 5)
