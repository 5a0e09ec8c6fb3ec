"""The router in front of real connections: stand-in workers for each way to fail, demo-voice servers for the whole."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import uvloop

from running import eventually
from servers import ROOT, Server, fetch, serving
from sgl_omni.listening import bind, url_of
from sgl_omni.router.app import Router, RouterOptions
from sgl_omni.router.dispatch import Limits
from sgl_omni.router.health import Thresholds
from sgl_omni.router.probe import Probing
from sgl_omni.router.workers import is_own, parse_address
from worker_stand_in import AUDIO, EVENT, StandIn

FAST = Probing(interval=0.05, timeout=1.0, load_interval=0.05)


class Running:
    """A router in this process, and a client of it."""

    def __init__(self, router: Router, url: str) -> None:
        self.router = router
        self.url = url
        self.client = httpx.AsyncClient(base_url=url, timeout=20, limits=httpx.Limits(max_connections=None))

    def state(self, worker: StandIn) -> str:
        found = self.router.workers.get(worker.url)
        return "unknown" if found is None else str(found.health.state)

    async def who(self) -> str:
        return (await self.client.get("/who")).text


@pytest.fixture(scope="module")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """The loop that the command runs on."""
    return uvloop.EventLoopPolicy()


Begin = Callable[..., Awaitable[Running]]


@pytest.fixture
async def begin() -> AsyncIterator[Begin]:
    """Starts a router over stand-ins; afterwards no request may be left in it."""
    running: list[Running] = []
    workers: list[StandIn] = []

    async def start(*stand_ins: StandIn, probing: Probing = FAST, **options: Any) -> Running:
        sock = bind("127.0.0.1", 0)
        router = Router(RouterOptions(probing=probing, **options))
        await router.start(sock)
        found = Running(router, url_of(sock))
        running.append(found)
        for worker in stand_ins:
            workers.append(worker)
            if worker.server is None:
                await worker.start()
            router.add_worker(parse_address(worker.url))
        await eventually(lambda: all(found.state(w) == "up" for w in stand_ins))
        return found

    yield start
    for one in running:
        await one.client.aclose()
        await eventually(lambda one=one: one.router.dispatcher.idle)
        assert all(worker.in_flight == 0 for worker in one.router.workers)
        await one.router.stop()
    for worker in workers:
        await worker.stop()


async def test_bodies_pass_byte_for_byte_with_an_id(begin: Begin) -> None:
    worker = StandIn()
    router = await begin(worker)
    body = bytes(range(256)) * 40
    answer = await router.client.post("/v1/x?y=%20z", content=body, headers={"X-Request-Id": "mine-1", "X-A": "b"})
    assert answer.content == body == worker.got[0].body
    assert answer.headers["x-request-id"] == "mine-1" == worker.got[0].headers["x-request-id"]
    assert answer.headers["x-own"] == "yes" and answer.reason_phrase == "Some Reason"
    assert worker.got[0].line == "POST /v1/x?y=%20z HTTP/1.1" and worker.got[0].headers["x-a"] == "b"
    other = await router.client.get("/who", headers={"X-Request-Id": "not sane"})
    assert re.fullmatch("req-[0-9a-f]{32}", other.headers["x-request-id"])


async def test_streams_pass_byte_for_byte(begin: Begin) -> None:
    router = await begin(StandIn())
    for path, expected in (("/audio", AUDIO), ("/sized", AUDIO), ("/events", EVENT * 3)):
        answers = await asyncio.gather(*(router.client.get(path) for _ in range(8)))
        assert all(answer.content == expected for answer in answers), path


async def test_large_and_chunked_request_bodies_pass(begin: Begin) -> None:
    worker = StandIn()
    router = await begin(worker)
    large = os.urandom(3_000_000)

    async def parts() -> AsyncIterator[bytes]:
        for i in range(0, len(large), 70_001):
            yield large[i : i + 70_001]

    assert (await router.client.post("/echo", content=large)).content == large
    assert (await router.client.post("/echo", content=parts())).content == large
    small = await router.client.post("/echo", content=aiter_of(b"ab", b"cd"))
    assert small.content == b"abcd" and worker.got[-1].headers["content-length"] == "4"


async def aiter_of(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


async def test_what_comes_is_passed_on_at_once(begin: Begin) -> None:
    worker = StandIn()
    router = await begin(worker)
    async with router.client.stream("GET", "/trickle") as answer:
        pieces = answer.aiter_raw()
        assert await anext(pieces) == b"first"
        worker.go.set()
        assert await anext(pieces) == b"second"


async def test_a_slow_reader_slows_its_worker_only(begin: Begin) -> None:
    router = await begin(StandIn())
    reader, writer = await asyncio.open_connection("127.0.0.1", int(router.url.rpartition(":")[2]), limit=4096)
    for _ in range(20):
        writer.write(b"GET /sized HTTP/1.1\r\nhost: x\r\n\r\n")
    await asyncio.sleep(0.2)
    assert await router.who() == "a"
    for _ in range(20):
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(len(AUDIO)) == AUDIO
    writer.close()


async def raw(router: Running, request: bytes) -> bytes:
    """All that comes back until the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(router.url.rpartition(":")[2]))
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return answer


async def test_http_1_0_and_head_and_expect(begin: Begin) -> None:
    router = await begin(StandIn())
    head, _, body = (await raw(router, b"GET /audio HTTP/1.0\r\n\r\n")).partition(b"\r\n\r\n")
    assert body == AUDIO and b"transfer-encoding" not in head.lower()
    answer = await raw(router, b"HEAD /sized HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert answer.endswith(b"\r\n\r\n") and b"%d" % len(AUDIO) in answer
    request = b"POST /e HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok"
    answer = await raw(router, request)
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200") and answer.endswith(b"\r\n\r\nok")


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nhost: x\r\ncontent-length: x\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 70000 + b"\r\n\r\n", b"431"),
        (b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n", b"501"),
    ],
)
async def test_what_is_not_plain_http_is_refused(begin: Begin, request_bytes: bytes, status: bytes) -> None:
    worker = StandIn()
    router = await begin(worker)
    answer = await raw(router, request_bytes)
    assert answer.startswith(b"HTTP/1.1 " + status) and b'"error"' in answer
    assert worker.got == []


async def test_pipelined_requests_are_answered_in_order(begin: Begin) -> None:
    router = await begin(StandIn("a"), StandIn("b"))
    request = b"".join(b"POST /%d HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n%02d" % (i, i) for i in range(30))
    answer = await raw(router, request + b"GET /live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert re.findall(rb"\r\n\r\n(\d\d)HTTP", answer) == [b"%02d" % i for i in range(30)]
    assert answer.endswith(b"live\n")


async def test_a_worker_that_breaks_off_gives_an_error_and_never_a_clean_end(begin: Begin) -> None:
    router = await begin(StandIn())
    with pytest.raises(httpx.RemoteProtocolError):
        await router.client.get("/break/audio")
    events = (await router.client.get("/break/events")).content
    whole, _, last = events.partition(b"event: error\n")
    assert whole == EVENT, "a part of an event must not be passed on"
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "worker_lost"
    before = await router.client.get("/break/before")
    assert before.status_code == 502 and before.json()["error"]["code"] == "worker_lost"
    # To a client that knows the end by the connection's, only a reset says that it is not the end.
    with pytest.raises(ConnectionResetError):
        await raw(router, b"GET /break/audio HTTP/1.0\r\n\r\n")


async def test_own_errors_of_a_worker_never_evict_it(begin: Begin) -> None:
    worker = StandIn()
    router = await begin(worker, thresholds=Thresholds(failures=1))
    for status in (400, 404, 429, 500, 503) * 4:
        answer = await router.client.get(f"/status/{status}")
        assert (answer.status_code, answer.text) == (status, "own words")
    assert router.state(worker) == "up"
    assert [g.line.split()[1] for g in worker.got].count("/status/500") == 4, "an answered request is not tried again"


async def test_a_refused_connection_is_tried_elsewhere_and_evicts_at_once(begin: Begin) -> None:
    dead, alive = StandIn("dead"), StandIn("alive")
    router = await begin(dead, alive, probing=Probing(interval=60))
    await dead.stop()
    assert [await router.who() for _ in range(6)] == ["alive"] * 6
    assert router.state(dead) == "down"
    assert router.router.dispatcher.tally.retries == 1
    await dead.start()


async def test_a_worker_that_is_lost_before_it_answers_costs_nobody_an_answer(begin: Begin) -> None:
    doomed, other = StandIn("doomed"), StandIn("other")
    router = await begin(doomed, other, policy="fill_first", thresholds=Thresholds(failures=99))
    doomed.dying = True
    bodies = [b"%d" % i * 1000 for i in range(8)]
    answers = [await router.client.post("/x", content=body, headers={"X-Request-Id": "same"}) for body in bodies]
    assert [(a.status_code, a.content) for a in answers] == [(200, body) for body in bodies]
    assert [(g.body, g.headers["x-request-id"]) for g in doomed.got] == [(body, "same") for body in bodies]
    assert doomed.got == other.got
    assert (await router.client.get("/who")).text == "other"
    assert router.router.dispatcher.tally.retries == len(bodies) + 1
    outcomes = {w.address.url: w.outcomes for w in router.router.workers}
    assert (outcomes[doomed.url]["lost"], outcomes[other.url]["ok"]) == (9, 9)


async def test_a_request_has_two_workers_at_most(begin: Begin) -> None:
    workers = [StandIn(name) for name in "abc"]
    router = await begin(*workers, thresholds=Thresholds(failures=99))
    for worker in workers:
        worker.dying = True
    answers = [await router.client.post("/x", content=b"x") for _ in range(4)]
    assert [(a.status_code, a.json()["error"]["code"]) for a in answers] == [(502, "worker_lost")] * 4
    assert sum(len(worker.got) for worker in workers) == 8


async def test_what_was_passed_on_as_it_came_is_never_sent_twice(begin: Begin) -> None:
    doomed, other = StandIn("doomed"), StandIn("other")
    router = await begin(doomed, other, policy="fill_first")
    doomed.dying = True

    async def upload() -> AsyncIterator[bytes]:
        for _ in range(30):
            yield b"x" * 10000
            await asyncio.sleep(0.001)

    answer = await router.client.post("/x", content=upload())
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "worker_lost")
    assert (len(doomed.got), other.got) == (1, [])


async def test_eviction_and_return_by_half_open(begin: Begin) -> None:
    sick, well = StandIn("sick"), StandIn("well")
    router = await begin(sick, well)
    sick.healthy = False
    await eventually(lambda: router.state(sick) == "down")
    assert {await router.who() for _ in range(4)} == {"well"}
    sick.healthy = True
    await eventually(lambda: router.state(sick) == "half_open")
    trial = asyncio.ensure_future(router.client.get("/slow"))
    other = asyncio.ensure_future(router.client.get("/slow"))
    await eventually(
        lambda: len(sick.got) + len(well.got) >= 6 and any(g.line.startswith("GET /slow") for g in sick.got)
    )
    assert {await router.who() for _ in range(4)} == {"well"}, "one trial at a time"
    sick.go.set()
    well.go.set()
    await asyncio.gather(trial, other)
    await eventually(lambda: router.state(sick) == "up")
    assert {await router.who() for _ in range(4)} == {"sick", "well"}


async def test_a_client_that_goes_away_takes_its_request_along(begin: Begin) -> None:
    worker = StandIn()
    router = await begin(worker)
    for path in ("/trickle", "/slow"):
        worker.gone.clear()
        with pytest.raises(httpx.ReadTimeout):
            await router.client.get(path, timeout=httpx.Timeout(5, read=0.2))
        await asyncio.wait_for(worker.gone.wait(), 5)
    await eventually(lambda: router.router.dispatcher.in_flight == 0)
    found = router.router.workers.get(worker.url)
    assert found is not None and found.outcomes["aborted"] == 2 and found.health.state == "up"


async def test_a_full_queue_answers_503_and_others_get_their_turn(begin: Begin) -> None:
    worker = StandIn()
    router = await begin(worker, limits=Limits(max_connections=2, queue=3))
    calls = [asyncio.ensure_future(router.client.get("/slow")) for _ in range(5)]
    await eventually(lambda: router.router.dispatcher.queued == 3)
    full = await router.client.get("/who")
    assert full.status_code == 503 and full.headers["retry-after"] == "1"
    assert full.json()["error"]["code"] == "overloaded"
    assert len(worker.got) == 2
    calls[-1].cancel()
    await eventually(lambda: router.router.dispatcher.queued == 2)
    worker.go.set()
    assert [r.text for r in await asyncio.gather(*calls[:-1])] == ["a"] * 4
    assert len(worker.got) == 4, "one that gave up in the queue never reaches a worker"


async def test_waiting_too_long_in_the_queue_is_a_503(begin: Begin) -> None:
    worker = StandIn()
    router = await begin(worker, limits=Limits(max_connections=1, queue_seconds=0.2))
    first = asyncio.ensure_future(router.client.get("/slow"))
    await eventually(lambda: router.router.dispatcher.in_flight == 1)
    assert (await router.client.get("/who")).status_code == 503
    worker.go.set()
    assert (await first).status_code == 200


async def test_a_silent_worker_is_given_up(begin: Begin) -> None:
    worker = StandIn()
    router = await begin(worker, limits=Limits(silence_seconds=0.2))
    answer = await router.client.get("/slow")
    assert answer.status_code == 502 and "nothing came from it" in answer.json()["error"]["message"]
    await asyncio.wait_for(worker.gone.wait(), 5)


async def test_workers_come_and_go_by_http(begin: Begin) -> None:
    router = await begin()
    assert (await router.client.get("/ready")).status_code == 503
    none = await router.client.get("/who")
    assert none.status_code == 503 and "POST its url to /workers" in none.json()["error"]["message"]
    one, two = await StandIn("one").start(), await StandIn("two").start()
    added = await router.client.post("/workers", json={"urls": [one.url, two.url + "/"]})
    assert added.status_code == 201
    assert [w["url"] for w in added.json()["workers"]] == [one.url, two.url]
    await eventually(lambda: router.state(one) == router.state(two) == "up")
    assert (await router.client.get("/ready")).text == "ready\n"
    removed = await router.client.delete("/workers", params={"url": one.url})
    assert removed.status_code == 200
    await eventually(lambda: router.state(one) == "unknown")
    assert {await router.who() for _ in range(3)} == {"two"}
    again = await router.client.delete("/workers", params={"url": one.url})
    assert again.status_code == 404 and one.url in again.json()["error"]["message"]
    await one.stop()
    await two.stop()


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"url": 3}', b'{"uri": "http://a:1"}', b'{"url": "https://a:1"}'])
async def test_a_worker_that_is_no_address_is_refused(begin: Begin, body: bytes) -> None:
    router = await begin()
    answer = await router.client.post("/workers", content=body)
    assert answer.status_code == 400 and "http://host:port" in answer.json()["error"]["message"]
    assert len(router.router.workers) == 0


async def test_a_drained_worker_ends_its_requests_and_gets_no_more(begin: Begin) -> None:
    leaving, staying = StandIn("leaving"), StandIn("staying")
    router = await begin(leaving, staying)
    slow = [asyncio.ensure_future(router.client.get("/slow")) for _ in range(2)]
    await eventually(lambda: len(leaving.got) == 1 and len(staying.got) == 1)
    await router.client.request("DELETE", "/workers", json={"url": leaving.url})
    assert {await router.who() for _ in range(4)} == {"staying"}
    assert router.state(leaving) == "up", "it is still there for its request"
    leaving.go.set()
    staying.go.set()
    assert sorted(r.text for r in await asyncio.gather(*slow)) == ["leaving", "staying"]
    await eventually(lambda: router.state(leaving) == "unknown")


async def test_the_router_drains(begin: Begin) -> None:
    worker = StandIn()
    router = await begin(worker)
    slow = asyncio.ensure_future(router.client.get("/slow"))
    await eventually(lambda: router.router.dispatcher.in_flight == 1)
    draining = asyncio.ensure_future(router.router.drain(10))
    await asyncio.sleep(0)
    late = await router.client.get("/who")
    assert late.status_code == 503 and late.headers["connection"] == "close"
    assert (await router.client.get("/ready")).status_code == 503
    assert (await router.client.get("/live")).status_code == 200
    worker.go.set()
    assert (await slow).text == "a"
    await asyncio.wait_for(draining, 5)
    with pytest.raises(httpx.ConnectError):
        await router.client.get("/live")


async def test_a_drain_that_takes_too_long_cuts(begin: Begin) -> None:
    worker = StandIn()
    router = await begin(worker)
    slow = asyncio.ensure_future(router.client.get("/slow"))
    await eventually(lambda: router.router.dispatcher.in_flight == 1)
    await router.router.drain(0.1)
    assert (await slow).status_code == 503
    await asyncio.wait_for(worker.gone.wait(), 5)


async def test_least_work_keeps_short_requests_away_from_a_long_one(begin: Begin) -> None:
    one, other = StandIn("one"), StandIn("other")
    router = await begin(one, other, policy="least_work")
    long = asyncio.ensure_future(router.client.post("/slow", json={"input": "x" * 3000}))
    await eventually(lambda: len(one.got) + len(other.got) == 1)
    busy, free = (one, other) if one.got else (other, one)
    for _ in range(5):
        await router.client.post("/who", json={"input": "short"})
    assert [g.line.split()[1] for g in free.got] == ["/who"] * 5
    busy.go.set()
    await long


async def test_the_numbers_add_up(begin: Begin) -> None:
    one, two = StandIn("one"), StandIn("two")
    router = await begin(one, two)
    for path in ("/who", "/who", "/status/404", "/status/500"):
        await router.client.get(path)
    lines = (await router.client.get("/metrics")).text.splitlines()
    assert f'sgl_omni_router_requests_total{{outcome="ok",worker="{one.url}"}} 1.0' in lines
    total = sum(float(x.rpartition(" ")[2]) for x in lines if x.startswith("sgl_omni_router_requests_total"))
    heads = [x for x in lines if x.startswith("sgl_omni_router_first_byte_seconds_count")]
    assert total == 4 and sum(float(x.rpartition(" ")[2]) for x in heads) == 4


# The command, in processes of its own.


@contextmanager
def routing(*arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A ready `sgl-omni router` that has to end well and leave nothing."""
    command = [sys.executable, "-m", "sgl_omni.cli.main", "router", "--port", "0", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stderr is not None
    try:
        url = next(found[1] for line in process.stderr if (found := re.search(r"ready: router on (\S+)", line)))
        members = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]
        yield url, process
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        assert not [m for m in members if m.is_running() and m.status() != psutil.STATUS_ZOMBIE]
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


async def test_two_processes_share_a_port_and_their_workers() -> None:
    one = await StandIn("one").start()
    with routing("--processes", "2", "--health-interval", "0.1") as (url, process):
        async with httpx.AsyncClient(base_url=url, limits=httpx.Limits(max_keepalive_connections=0)) as client:
            assert len(psutil.Process(process.pid).children()) == 2
            await client.post("/workers", json={"url": one.url})
            await asyncio.sleep(0.5)
            answers = await asyncio.gather(*(client.get("/who") for _ in range(60)))
            assert {a.text for a in answers} == {"one"}
            health = (await client.get("/health")).json()
            assert health["processes"] == 2 and health["workers"][0]["outcomes"]["ok"] == 60
            used = [c.cpu_times().user for c in psutil.Process(process.pid).children()]
            assert len(used) == 2
            taken = await asyncio.to_thread(
                subprocess.run,
                [sys.executable, "-m", "sgl_omni.cli.main", "router", "--port", url.rpartition(":")[2]],
                capture_output=True,
                text=True,
                timeout=30,
            )
            assert taken.returncode == 1 and "choose another --port" in taken.stderr
    await one.stop()


def test_what_a_killed_router_leaves_is_removed_by_the_next(own_run_folder: Path) -> None:
    base = own_run_folder / "sgl-omni"
    with routing("--processes", "2") as (_, process):
        children = psutil.Process(process.pid).children()
        process.kill()
        process.wait()
        psutil.wait_procs(children, 5)
        (left,) = base.glob("router-*")
    with routing("--processes", "2"):
        (living,) = base.glob("router-*")
        assert living != left
        with routing("--processes", "2"):
            assert living in base.glob("router-*") and len(list(base.glob("router-*"))) == 2
    assert not list(base.glob("router-*"))


async def test_a_router_is_no_worker_of_its_own(begin: Begin) -> None:
    router = await begin(StandIn())
    port = router.url.rpartition(":")[2]
    for url in (router.url, f"localhost:{port}"):
        answer = await router.client.post("/workers", json={"url": url})
        assert answer.status_code == 400 and "is this router's own address" in answer.json()["error"]["message"]
    assert len((await router.client.get("/workers")).json()["workers"]) == 1


def test_own_addresses_are_known_by_every_name() -> None:
    for url in ("127.0.0.1:80", "localhost:80", "127.0.0.2:80"):
        assert is_own(parse_address(url), "0.0.0.0", 80), url
    assert is_own(parse_address("[::1]:80"), "::", 80) or not socket.has_ipv6
    assert is_own(parse_address("0.0.0.0:80"), "127.0.0.1", 80), "a connection to it comes to the loopback"
    assert not is_own(parse_address("0.0.0.0:80"), "127.0.0.2", 80)
    assert not is_own(parse_address("127.0.0.1:81"), "0.0.0.0", 80)
    assert not is_own(parse_address("192.0.2.1:80"), "0.0.0.0", 80), "another machine's"
    assert not is_own(parse_address("127.0.0.2:80"), "127.0.0.1", 80)
    assert not is_own(parse_address("nobody.invalid:80"), "0.0.0.0", 80)


def test_a_router_without_workers_says_so() -> None:
    with routing("--worker-urls", " , ") as (_, process):
        assert process.stderr is not None
        assert "there is no worker yet; POST /workers adds one" in process.stderr.readline()


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_router_that_is_told_to_call_itself_does_not_start(processes: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "sgl_omni.cli.main", "router", "--port", port, "--processes", processes]
    done = subprocess.run([*command, "--worker-urls", f"localhost:{port}"], capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert f"worker http://localhost:{port} is this router's own address" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_router_process_that_dies_ends_the_router() -> None:
    with routing("--processes", "2") as (_, process):
        os.kill(psutil.Process(process.pid).children()[0].pid, signal.SIGKILL)
        assert process.wait(20) == 1


def test_addresses_are_refused_by_place(tmp_path: Path) -> None:
    file = tmp_path / "workers"
    file.write_text("# mine\nhttp://127.0.0.1:1\nnonsense  # here\n")
    command = [sys.executable, "-m", "sgl_omni.cli.main", "router", "--worker-file", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2 and f"{file}:3" in done.stderr and "'nonsense'" in done.stderr


# Real servers.

SPEECH = {"model": "demo-voice", "voice": "rms", "response_format": "pcm"}
LONG = "The children walked to school in the rain this morning, and nobody had an umbrella. " * 12


@pytest.fixture(scope="module")
def voices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(serving("--model-path", "demo-voice", run_folder=tmp_path_factory.mktemp(f"r{i}")))
            for i in range(2)
        ]


def test_speech_is_the_same_directly_and_through_the_router(voices: list[Server]) -> None:
    urls = ",".join(voice.url for voice in voices)
    with routing("--worker-urls", urls, "--policy", "least_work", "--health-interval", "0.2") as (url, _):
        wait_ready(url)
        for fields in ({}, {"response_format": "wav"}, {"stream_format": "sse"}, {"stream": False}):
            request = {**SPEECH, **fields, "input": "Good morning."}
            answers = [
                httpx.post(f"{at}/v1/audio/speech", json=request, timeout=60) for at in (voices[0].url, url, url)
            ]
            assert len({answer.content for answer in answers}) == 1 and answers[0].status_code == 200, fields
        workers = fetch(f"{url}/workers").json()["workers"]
        assert all(w["load"]["kv_free"] > 0.5 for w in workers), "what real servers report of themselves is understood"
        from openai import OpenAI

        client = OpenAI(base_url=f"{url}/v1", api_key="none")
        assert [m.id for m in client.models.list()] == ["demo-voice"]


def test_an_abort_through_the_router_frees_the_server(voices: list[Server]) -> None:
    with routing("--worker-urls", voices[0].url, "--health-interval", "0.2") as (url, _):
        wait_ready(url)
        with httpx.stream("POST", f"{url}/v1/audio/speech", json={**SPEECH, "input": LONG}, timeout=60) as answer:
            assert answer.status_code == 200
            pieces = answer.iter_raw()  # kept: one that is dropped closes its connection
            next(pieces)
            assert voices[0].gauges()["sgl_omni_requests_in_flight"] == 1
        end = time.monotonic() + 60
        while voices[0].gauges()["sgl_omni_requests_in_flight"]:
            assert time.monotonic() < end, "the server still works for a client that is gone"
            time.sleep(0.02)


def test_a_server_killed_in_mid_stream_is_an_error_event_and_the_next_requests_go_elsewhere(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    with ExitStack() as stack:
        doomed, other = (stack.enter_context(serving("--model-path", "demo-voice", run_folder=f)) for f in folders)
        urls = f"{doomed.url},{other.url}"
        policy = ("--policy", "fill_first")
        url, _ = stack.enter_context(routing("--worker-urls", urls, *policy, "--health-interval", "0.2"))
        wait_ready(url, workers=2)
        request = {**SPEECH, "input": LONG, "stream_format": "sse"}
        with httpx.stream("POST", f"{url}/v1/audio/speech", json=request, timeout=60) as answer:
            pieces = answer.iter_raw()
            text = next(pieces)
            os.kill(doomed.process.pid, signal.SIGKILL)
            text += b"".join(pieces)
        assert text.count(b"event: error\n") == 1 and b'"worker_lost"' in text.rpartition(b"event: error")[2]
        assert b"speech.audio.done" not in text
        for _ in range(3):
            again = httpx.post(f"{url}/v1/audio/speech", json={**SPEECH, "input": "Hello."}, timeout=60)
            assert again.status_code == 200
        doomed.process.wait()


def wait_ready(url: str, workers: int = 1) -> None:
    end = time.monotonic() + 60
    while sum(w["state"] == "up" for w in fetch(f"{url}/workers").json()["workers"]) < workers:
        assert time.monotonic() < end
        time.sleep(0.05)
