"""A real server under attack: killed children, killed servers, early disconnects, floods and garbage."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from servers import PATIENT, ROOT, Server, serving

DEMO = ("--model-path", "demo-voice")
RESTART = (*DEMO, "--on_process_exit", "restart", "--processes.tts_engine.num_replicas", "2")
RESTART += ("--processes.tts_engine.replica_devices", "0,0")
SPEECH = "/v1/audio/speech"
LONG = "The old bridge was closed for repairs until further notice, and everyone was annoyed. " * 8


def request_of(text: str = LONG) -> dict[str, str]:
    return {"model": "demo-voice", "input": text, "voice": "rms", "response_format": "pcm"}


def speaks(server: Server, text: str) -> bool:
    return httpx.post(f"{server.url}{SPEECH}", json=request_of(text), timeout=PATIENT).status_code == 200


def until(condition: Callable[[], bool], seconds: float) -> float:
    """Seconds that it took `condition` to come true."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds, "the condition did not come true in time"
        time.sleep(0.02)
    return time.monotonic() - begin


async def load(server: Server, count: int, text: str = LONG) -> list[asyncio.Task[tuple[int, str, float]]]:
    """`count` requests in flight, each giving (status, text, moment of its end)."""
    client = httpx.AsyncClient(timeout=PATIENT, limits=httpx.Limits(max_connections=None))

    async def one() -> tuple[int, str, float]:
        request = {**request_of(text), "response_format": "wav", "stream": False}
        try:
            response = await client.post(f"{server.url}{SPEECH}", json=request)
        except httpx.RemoteProtocolError as error:
            return 0, str(error), time.monotonic()
        return response.status_code, response.text if response.status_code != 200 else "", time.monotonic()

    tasks = [asyncio.create_task(one()) for _ in range(count)]
    await asyncio.sleep(0.5)
    return tasks


TABLES = (
    "sgl_omni_instance_requests",
    "sgl_omni_instance_in_flight",
    "sgl_omni_requests_in_flight",
    "sgl_omni_instance_shm_segments_in",
    "sgl_omni_instance_shm_segments_out",
    "sgl_omni_instance_tts_engine_running",
    "sgl_omni_instance_tts_engine_queued",
    "sgl_omni_instance_vocoder_running",
)


def assert_tables_empty(server: Server) -> None:
    until(lambda: not any(server.gauges()[name] for name in TABLES), 60)


@pytest.mark.parametrize("victim", ["preprocessing", "tts_engine", "vocoder"])
async def test_a_killed_child_is_named_to_every_caller_and_the_server_ends(tmp_path: Path, victim: str) -> None:
    with serving(*DEMO, run_folder=tmp_path) as server:
        tasks = await load(server, 8)
        killed = time.monotonic()
        os.kill(server.pid(victim), signal.SIGKILL)
        for status, text, moment in await asyncio.gather(*tasks):
            assert status >= 500
            assert f"instance '{victim}'" in text and "stage" in text and "SIGKILL (exit status -9)" in text
            assert moment - killed < 1.0
        assert server.wait(5) == 1
        assert f"instance '{victim}'" in server.log.split("the pipeline stops")[1]
        server.assert_nothing_left()


async def test_a_caller_in_the_middle_of_a_stream_learns_of_it_too(tmp_path: Path) -> None:
    """Audio is cut off, so that it cannot be taken for whole; events say what happened."""
    with serving(*DEMO, run_folder=tmp_path) as server:
        async with httpx.AsyncClient(timeout=PATIENT) as client:
            begun = {kind: asyncio.Event() for kind in ("audio", "sse")}

            async def listen(stream_format: str) -> str:
                text = ""
                request = {**request_of(), "stream_format": stream_format}
                async with client.stream("POST", f"{server.url}{SPEECH}", json=request) as response:
                    assert response.status_code == 200
                    async for piece in response.aiter_text():
                        text += piece
                        begun[stream_format].set()
                return text

            tasks = [asyncio.create_task(listen(kind)) for kind in begun]
            for event in begun.values():
                await asyncio.wait_for(event.wait(), PATIENT)
            os.kill(server.pid("vocoder"), signal.SIGKILL)
            audio, events = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(audio, httpx.RemoteProtocolError)
        assert isinstance(events, str)
        last = events.strip().splitlines()[-1]
        assert "instance 'vocoder'" in last and "SIGKILL" in last and '"type": "error"' in last
        assert server.wait(5) == 1


async def test_with_restart_one_replica_goes_on_and_the_other_comes_back(tmp_path: Path) -> None:
    with serving(*RESTART, run_folder=tmp_path) as server:
        tasks = await load(server, 8)
        old = server.pid("tts_engine@r1")
        os.kill(old, signal.SIGKILL)
        outcomes = await asyncio.gather(*tasks)
        assert Counter(status == 200 for status, _, _ in outcomes) == {True: 4, False: 4}
        assert all("tts_engine@r1" in text for status, text, _ in outcomes if status != 200)
        for _ in range(3):
            assert speaks(server, "Hello.")
        until(lambda: server.instance("tts_engine@r1")["state"] == "ready", 60)
        assert server.pid("tts_engine@r1") != old
        assert [s for s, _, _ in await asyncio.gather(*await load(server, 6, "Hello again."))] == [200] * 6


async def test_a_killed_server_leaves_no_child_and_the_next_start_cleans(tmp_path: Path) -> None:
    with serving(*DEMO, run_folder=tmp_path) as server:
        tasks = await load(server, 4)
        server.process.kill()
        assert until(lambda: not server.alive(), 2) < 2
        assert {status for status, _, _ in await asyncio.gather(*tasks)} == {0}
        assert len(list(tmp_path.glob("sgl-omni/run-*"))) == 1
        with serving(*DEMO, run_folder=tmp_path) as following:
            assert len(list(tmp_path.glob("sgl-omni/run-*"))) == 1
            assert following.url


async def test_early_disconnects_leave_nothing(tmp_path: Path) -> None:
    """1,000 callers, 64 at a time, that go away before, at or after the first audio."""
    with serving(*DEMO, run_folder=tmp_path) as server:
        rng = np.random.default_rng(1)
        gate = asyncio.Semaphore(64)
        body = b'{"model":"demo-voice","input":"%s","response_format":"pcm"}' % LONG[:180].encode()
        head = (
            b"POST /v1/audio/speech HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        )
        host, port = server.url.removeprefix("http://").split(":")

        async def one(delay: float, cut: int) -> None:
            async with gate:
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write((head % len(body) + body)[:cut])
                try:
                    async with asyncio.timeout(delay):
                        await reader.read(-1)
                except TimeoutError:
                    pass
                writer.transport.abort()

        async def wave(count: int) -> int:
            cuts = rng.choice([10_000, 60, 200], count, p=[0.9, 0.05, 0.05])
            await asyncio.gather(*(one(d, int(c)) for d, c in zip(rng.uniform(0, 0.4, count), cuts, strict=True)))
            assert_tables_empty(server)
            return sum(p.memory_info().rss for p in [*server.members, psutil.Process(server.process.pid)])

        before = await wave(200)
        after = await wave(800)
        assert after < before * 1.05 + 32e6, f"{(after - before) / 1e6:.0f} MB more"
        assert speaks(server, "Still here.")


async def test_two_servers_keep_apart(tmp_path: Path) -> None:
    with serving(*DEMO, run_folder=tmp_path) as first, serving(*DEMO, run_folder=tmp_path) as second:
        assert len(list(tmp_path.glob("sgl-omni/run-*"))) == 2
        tasks = await load(second, 3, LONG[:260])
        first.process.send_signal(signal.SIGTERM)
        assert first.wait(30) == 0
        assert not first.alive() and len(second.alive()) == 3
        assert [status for status, _, _ in await asyncio.gather(*tasks)] == [200] * 3


async def test_sigterm_under_load_drains(tmp_path: Path) -> None:
    with serving(*DEMO, run_folder=tmp_path) as server:
        tasks = await load(server, 6, LONG[:170])
        server.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.1)
        assert [status for status, _, _ in await asyncio.gather(*tasks)] == [200] * 6
        assert server.wait(10) == 0
        server.assert_nothing_left()


async def test_a_child_that_dies_while_the_server_drains_makes_it_a_failure(tmp_path: Path) -> None:
    with serving(*DEMO, run_folder=tmp_path) as server:
        tasks = await load(server, 4)
        victim = server.pid("vocoder")
        server.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.2)
        os.kill(victim, signal.SIGKILL)
        assert all("instance 'vocoder'" in text for _, text, _ in await asyncio.gather(*tasks))
        assert server.wait(10) == 1
        server.assert_nothing_left()


@pytest.mark.alone
async def test_sigterm_under_load_ends_within_the_drain_timeout(tmp_path: Path) -> None:
    with serving(*DEMO, "--drain-timeout", "1", run_folder=tmp_path) as server:
        tasks = await load(server, 12)
        begin = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.wait(10) == 0
        assert time.monotonic() - begin < 4
        server.assert_nothing_left()
        assert all(status != 200 for status, _, _ in await asyncio.gather(*tasks))


@pytest.mark.alone
async def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with serving(*DEMO, run_folder=tmp_path) as server:
        tasks = await load(server, 12)
        server.process.send_signal(signal.SIGINT)
        await asyncio.sleep(0.3)
        begin = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        server.wait(10)
        assert time.monotonic() - begin < 2
        server.assert_nothing_left()
        await asyncio.gather(*tasks)


@pytest.mark.alone
def test_idle_stop_is_quick_and_idle_costs_nothing(tmp_path: Path) -> None:
    with serving(*DEMO, run_folder=tmp_path) as server:
        members = [*server.members, psutil.Process(server.process.pid)]
        assert speaks(server, "Hello.")
        time.sleep(1)
        before = sum(sum(p.cpu_times()[:2]) for p in members)
        time.sleep(5)
        assert sum(sum(p.cpu_times()[:2]) for p in members) - before <= 0.05 * 5, "no polling loop may run"
        begin = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.wait(10) == 0
        assert time.monotonic() - begin < 2
        server.assert_nothing_left()


def test_a_signal_during_the_start_ends_it(tmp_path: Path) -> None:
    server = Server(*DEMO, run_folder=tmp_path)
    until(lambda: bool(psutil.Process(server.process.pid).children()), 60)
    server.members = psutil.Process(server.process.pid).children()
    server.process.send_signal(signal.SIGTERM)
    assert server.wait(10) == 0
    server.assert_nothing_left()


def test_a_port_in_use_is_said_before_any_process_starts(tmp_path: Path) -> None:
    with serving(*DEMO, run_folder=tmp_path) as server:
        port = server.url.rpartition(":")[2]
        command = [sys.executable, "-m", "sgl_omni.cli.main", "serve", *DEMO, "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=ROOT)
        assert done.returncode == 1
        assert f"cannot listen on 127.0.0.1:{port}" in done.stderr and "Traceback" not in done.stderr


def test_a_full_server_answers_503_with_retry_after(tmp_path: Path) -> None:
    async def flood(server: Server) -> None:
        tasks = await load(server, 12, LONG[:260])
        outcomes = await asyncio.gather(*tasks)
        assert Counter(status for status, _, _ in outcomes) == {200: 4, 503: 8}
        assert all("4 requests are in flight" in text for status, text, _ in outcomes if status == 503)

    with serving(*DEMO, "--max-in-flight", "4", run_folder=tmp_path) as server:
        asyncio.run(flood(server))


def test_a_request_timeout_is_a_504(tmp_path: Path) -> None:
    with serving(*DEMO, "--request-timeout", "0.3", run_folder=tmp_path) as server:
        request = {**request_of(), "response_format": "wav", "stream": False}
        response = httpx.post(f"{server.url}{SPEECH}", json=request, timeout=PATIENT)
        assert response.status_code == 504 and "within 0.3 s" in response.json()["error"]["message"]
        assert_tables_empty(server)


BROKEN = """
stages:
  first:
    factory_path: stages.tag
    process: first
    next: second
  second:
    factory_path: stages.broken_factory
    process: second
    terminal: true
"""


def test_a_factory_that_raises_fails_the_start_with_its_traceback(tmp_path: Path) -> None:
    config = tmp_path / "broken.yaml"
    config.write_text(BROKEN)
    server = Server("--config", str(config), run_folder=tmp_path, cwd=Path(__file__).parent)
    assert server.wait(30) == 1
    assert "error: stage 'second' (second) could not be built: OSError" in server.log
    assert "in broken_factory" in server.log and "the checkpoint is not where it should be" in server.log
    assert server.log.count("Traceback") == 1, "the child's traceback and no other"
    server.assert_nothing_left()


def test_what_the_planner_refuses_never_starts_a_process(tmp_path: Path) -> None:
    config = tmp_path / "wrong.yaml"
    config.write_text(BROKEN.replace("next: second", "next: sekond").replace("process: first", "proces: first"))
    server = Server("--config", str(config), run_folder=tmp_path, cwd=Path(__file__).parent)
    assert server.wait(30) == 2
    assert "'sekond'" in server.log and "write instead: second" in server.log
    assert "wrong.yaml:5: unknown key 'stages.first.proces'" in server.log and "Traceback" not in server.log
    assert not list(tmp_path.glob("sgl-omni/run-*"))
