"""Stages that the runtime tests put into pipelines; imported by the worker processes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sgl_omni.engine.interface import EngineOutput
from sgl_omni.errors import InvalidRequest, NotFinite, StartupError
from sgl_omni.runtime.stage import BatchStage, EngineStage, FunctionStage, Payload, Request, StreamStage


def tag(name: str = "tag", concurrency: int = 64) -> FunctionStage:
    """Appends its name and pid to the payload's trail."""

    async def run(payload: Payload, request: Request) -> Payload:
        return {**payload, "trail": [*payload.get("trail", []), name], "pids": [*payload.get("pids", []), os.getpid()]}

    return FunctionStage(run, concurrency)


def plain(name: str = "plain", concurrency: int = 4) -> FunctionStage:
    """The same in a thread."""

    def run(payload: Payload, request: Request) -> Payload:
        return {**payload, "trail": [*payload.get("trail", []), name], "pids": [*payload.get("pids", []), os.getpid()]}

    return FunctionStage(run, concurrency)


def rehearsed(fails: str = "", concurrency: int = 4) -> FunctionStage:
    """Puts how often it was rehearsed, and whether in a thread of requests, into the payload."""
    threads: list[str] = []

    def run(payload: Payload, request: Request) -> Payload:
        return {**payload, "rehearsals": len(threads), "here": threading.current_thread().name in threads}

    def rehearse() -> None:
        threads.append(threading.current_thread().name)
        if fails == "damaged":
            raise NotFinite("the features are")
        if fails == "broken":
            raise OSError("the library is of another version")

    return FunctionStage(run, concurrency, rehearse)


def obey(concurrency: int = 64) -> FunctionStage:
    """Does what the payload's `do` says."""

    async def run(payload: Payload, request: Request) -> Payload:
        match payload.get("do"):
            case "raise":
                raise RuntimeError("the stage was told to raise")
            case "invalid":
                raise InvalidRequest("the stage refuses this input", "input")
            case "damaged":
                raise NotFinite("the features are")
            case "sleep":
                await asyncio.sleep(payload["seconds"])
            case "object":
                return {"bad": {"inner": object()}}
            case "none":
                return None  # type: ignore[return-value]
            case "exit":
                os._exit(payload["status"])
            case "stream":
                for i in range(payload["count"]):
                    await request.emit({"i": i})
        return payload

    return FunctionStage(run, concurrency)


def sleepy_thread(concurrency: int = 1) -> FunctionStage:
    """Blocks a thread for the seconds that the payload says."""

    def run(payload: Payload, request: Request) -> Payload:
        end = time.monotonic() + payload.get("seconds", 0)
        while time.monotonic() < end and not request.aborted:
            time.sleep(0.005)
        return payload

    return FunctionStage(run, concurrency)


def double() -> FunctionStage:
    """Doubles an array in place: what a stage receives is its own."""

    async def run(payload: Payload, request: Request) -> Payload:
        payload["data"] *= 2
        return payload

    return FunctionStage(run, 64)


def merge_trails(inputs: dict[str, Payload]) -> Payload:
    return {"trail": sorted(t for p in inputs.values() for t in p["trail"]), "sources": sorted(inputs)}


def route_by_payload(request_id: str, payload: Payload) -> Any:
    return payload["to"]


def batch(max_size: int = 4, max_wait_ms: float = 20.0) -> BatchStage:
    """Answers with the size of its batch; an input of `bad` fails alone, one of `all` fails the whole batch."""

    def run(payloads: list[Payload]) -> Sequence[Payload | Exception]:
        if any(p.get("all") for p in payloads):
            raise RuntimeError("the whole batch fails")
        return [ValueError("bad input") if p.get("bad") else {**p, "batch": len(payloads)} for p in payloads]

    return BatchStage(run, max_size, max_wait_ms)


def stream_source(stream_count: int = 5) -> FunctionStage:
    """Streams `count` numbered chunks, then passes the payload on."""

    async def run(payload: Payload, request: Request) -> Payload:
        for i in range(payload.get("count", stream_count)):
            await request.emit({"i": i, "data": np.full(payload.get("size", 1), i, dtype=np.float32)})
            await asyncio.sleep(payload.get("pause", 0))
        return payload

    return FunctionStage(run, 64)


class Squares(StreamStage[dict[str, Any]]):
    """Streams each number's square on; its result counts them."""

    concurrency = 2

    def __init__(self, unlucky: int, close_seconds: float) -> None:
        self.open_states = 0
        self._unlucky = unlucky
        self._close_seconds = close_seconds

    def open(self, request: Request) -> dict[str, Any]:
        self.open_states += 1
        return {"count": 0}

    def feed(self, state: dict[str, Any], chunk: Payload) -> Iterable[Payload]:
        if chunk["i"] == self._unlucky:
            raise RuntimeError("unlucky chunk")
        state["count"] += 1
        yield {"square": chunk["i"] ** 2, "mean": float(chunk["data"].mean())}

    def flush(self, state: dict[str, Any]) -> Iterable[Payload]:
        yield {"square": -1, "mean": 0.0}

    def result(self, state: dict[str, Any], payload: Payload) -> Payload:
        return {**payload, "count_seen": state["count"], "pid": os.getpid(), "still_open": self.open_states - 1}

    def close(self, state: dict[str, Any]) -> None:
        time.sleep(self._close_seconds)
        self.open_states -= 1


def squares(unlucky: int = 1313, close_seconds: float = 0.0) -> Squares:
    return Squares(unlucky, close_seconds)


class CountingEngine:
    """Each step gives one token to every running request, `n` tokens in all; at most `rows` run."""

    def __init__(self, rows: int, step_ms: float) -> None:
        self._rows = rows
        self._step_ms = step_ms
        self._waiting: deque[tuple[str, Payload]] = deque()
        self._running: dict[str, list[int]] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, request_id: str, payload: Payload) -> None:
        if payload["n"] > 1000:
            raise InvalidRequest("n is at most 1000", "n")
        self._waiting.append((request_id, payload))

    def abort(self, request_id: str) -> None:
        if self._running.get(request_id, [0, 0, 0])[1] == 666:
            raise RuntimeError("the engine cannot abort this")
        self._running.pop(request_id, None)
        self._waiting = deque(item for item in self._waiting if item[0] != request_id)

    def step(self) -> list[EngineOutput]:
        while self._waiting and len(self._running) < self._rows:
            request_id, payload = self._waiting.popleft()
            self._running[request_id] = [0, payload["n"], payload.get("poison", -1)]
        time.sleep(self._step_ms / 1000)
        outputs = []
        for request_id, state in list(self._running.items()):
            if state[0] == state[2]:
                raise RuntimeError("poisoned step")
            output = EngineOutput(request_id, chunks=[{"i": state[0], "data": np.full(4, state[0], np.float32)}])
            state[0] += 1
            if state[0] == state[1]:
                output.result = {"tokens": state[0]}
                del self._running[request_id]
            outputs.append(output)
        return outputs

    def stats(self) -> dict[str, float]:
        return {"running": len(self._running), "queued": len(self._waiting)}


def engine(rows: int = 8, step_ms: float = 1.0) -> EngineStage:
    return EngineStage(CountingEngine(rows, step_ms))


class AddingEngine:
    """Adds up the numbers that arrive, and streams each sum; ``enough`` numbers end a request early."""

    def __init__(self, enough: int, unlucky: int) -> None:
        self._enough, self._unlucky = enough, unlucky
        self._open: dict[str, bool] = {}
        self._sums: dict[str, list[int]] = {}
        self._sent: dict[str, int] = {}

    @property
    def has_work(self) -> bool:
        return any(self._is_due(name) for name in self._sums)

    def _is_due(self, name: str) -> bool:
        return self._sent[name] < len(self._sums[name]) or not self._open[name]

    def add(self, request_id: str, payload: Payload) -> None:
        self._open[request_id] = bool(payload.get("input_open"))
        self._sums[request_id], self._sent[request_id] = [], 0
        self.extend(request_id, payload)

    def extend(self, request_id: str, payload: Payload) -> None:
        sums = self._sums.get(request_id)
        if sums is None:
            return  # it has ended
        if payload.get("i") == 1000 + self._unlucky:
            raise RuntimeError("a number that breaks this engine")
        if payload.get("i") == self._unlucky:
            self.abort(request_id)
            raise InvalidRequest("an unlucky number", param="i")
        if "i" in payload and len(sums) < self._enough:
            sums.append((sums[-1] if sums else 0) + payload["i"])

    def finish_input(self, request_id: str) -> None:
        if request_id in self._open:
            self._open[request_id] = False

    def abort(self, request_id: str) -> None:
        for table in (self._open, self._sums, self._sent):
            table.pop(request_id, None)

    def step(self) -> list[EngineOutput]:
        outputs = []
        for name in [name for name in self._sums if self._is_due(name)]:
            new = self._sums[name][self._sent[name] :]
            self._sent[name] += len(new)
            chunks: list[Payload] = [{"sum": value} for value in new]
            done = not self._open[name] or len(self._sums[name]) >= self._enough
            result = {"count": self._sent[name]} if done else None
            outputs.append(EngineOutput(name, chunks=chunks, result=result))
            if done:
                self.abort(name)
        return outputs

    def stats(self) -> dict[str, float]:
        return {"running": len(self._sums), "queued": 0}


def adding_engine(enough: int = 10**9, unlucky: int = 1313) -> EngineStage:
    return EngineStage(AddingEngine(enough, unlucky))


def refusing_factory() -> FunctionStage:
    raise StartupError("/models/m/model.safetensors: a.weight is [3], not [4]")


def broken_factory() -> FunctionStage:
    raise OSError("the checkpoint is not where it should be")


def dying_factory(status: int = 3) -> FunctionStage:
    print("last words of the child", file=sys.stderr, flush=True)
    os._exit(status)


def dying_later() -> FunctionStage:
    threading.Timer(0.5, os._exit, (9,)).start()
    return tag()


def dying_once(mark: str) -> FunctionStage:
    """Dies after it was ready, unless the file ``mark``, which it then leaves, is there."""
    if Path(mark).exists():
        return tag()
    Path(mark).touch()
    return dying_later()


def slow_factory(seconds: float = 60.0) -> FunctionStage:
    time.sleep(seconds)
    return tag()


def no_stage() -> int:
    return 42


def with_grandchild() -> FunctionStage:
    """Has a child process of its own, whose pid it tells."""
    child = subprocess.Popen(["sleep", "1000"])

    async def run(payload: Payload, request: Request) -> Payload:
        return {"grandchild": child.pid}

    return FunctionStage(run, 8)


MPS_LIMITS = ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")


def mps_client(attach: bool = True) -> FunctionStage:
    """Attaches to the stand-in's daemon as a CUDA process would; tells what of the GPU its environment shows."""
    if attach:
        program = ["nvidia-cuda-mps-control"]
        subprocess.run(program, input=f"attach {os.getpid()}\n", text=True, check=True, capture_output=True)

    async def run(payload: Payload, request: Request) -> Payload:
        if payload.get("seconds"):
            await asyncio.sleep(payload["seconds"])
        limits = {key: os.environ.get(key) for key in MPS_LIMITS}
        return {"visible": os.environ.get("CUDA_VISIBLE_DEVICES"), "pid": os.getpid(), **limits}

    return FunctionStage(run, 64)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def misbehave(what: str) -> Any:
    """What an author should not do, and may."""
    match what:
        case "stop iteration":
            raise StopIteration
        case "cancelled":
            raise asyncio.CancelledError
        case "generator exit":
            raise GeneratorExit
        case "surrogate":
            raise ValueError(os.fsdecode(b"\xff"))
        case "unprintable":
            raise Unprintable
        case "number as param":
            raise InvalidRequest("bad", 5)  # type: ignore[arg-type]
        case "large beside arrays":
            return {"a": [bytes(60_000)] * 5000}
        case "surrogate text":
            return {"array": np.zeros(100_000), "text": "\ud800"}
    return None


def naughty_thread() -> FunctionStage:
    return FunctionStage(lambda payload, request: misbehave(payload["what"]) if "what" in payload else payload, 8)


def naughty_batch() -> BatchStage:
    return BatchStage(lambda payloads: [misbehave(p["what"]) if "what" in p else p for p in payloads], 8, 1.0)


class NaughtyStream(Squares):
    def flush(self, state: dict[str, Any]) -> Iterable[Payload]:
        return []

    def result(self, state: dict[str, Any], payload: Payload) -> Payload:
        found: Payload = misbehave(payload["what"]) if "what" in payload else payload
        return found


def naughty_stream() -> NaughtyStream:
    return NaughtyStream(1313, 0.0)


def stuck(concurrency: int = 64) -> FunctionStage:
    """Blocks its whole event loop where the payload says so, as a call into a library may."""

    async def run(payload: Payload, request: Request) -> Payload:
        if payload.get("do") == "block":
            time.sleep(3600)
        return payload

    return FunctionStage(run, concurrency)


class StuckEngine(CountingEngine):
    """Its first step never ends, as one that waits for a GPU that hangs."""

    def step(self) -> Sequence[EngineOutput]:
        time.sleep(3600)
        return []


def stuck_engine() -> EngineStage:
    return EngineStage(StuckEngine(1, 1.0))
