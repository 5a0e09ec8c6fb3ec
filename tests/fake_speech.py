"""A pipeline that speaks whatever a script says, for tests of the server in front of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace

import httpx
import numpy as np

from sgl_omni.errors import Overloaded, RequestAborted

RATE = 16000
TONE = (0.4 * np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE)).astype(np.float32)

Script = Callable[[dict], AsyncIterator[np.ndarray]]


class FakeHandle:
    """Streams what its script yields, from a task of its own as the real pipeline does."""

    def __init__(self, id: str, payload: dict, script: Script) -> None:
        self.id = id
        self.payload = payload
        self.aborted: str | None = None
        self._chunks: asyncio.Queue = asyncio.Queue()
        self._work = asyncio.create_task(self._speak(script))

    async def _speak(self, script: Script) -> None:
        try:
            async for audio in script(self.payload):
                payload = {"audio": audio, "sample_rate": RATE}
                self._chunks.put_nowait(SimpleNamespace(stage="vocoder", payload=payload))
            self._chunks.put_nowait(None)
        except Exception as error:  # noqa: BLE001 - whatever a script raises is the request's error
            self._chunks.put_nowait(error)

    async def __aiter__(self):
        while (item := await self._chunks.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item

    async def result(self) -> dict[str, dict]:
        return {"vocoder": {"finish_reason": "stop", "input_tokens": 3, "output_tokens": 25}}

    def abort(self, reason: str) -> None:
        if self.aborted or self._work.done():
            return
        self.aborted = reason
        self._work.cancel()
        self._chunks.put_nowait(RequestAborted(reason))


async def speak(payload: dict) -> AsyncIterator[np.ndarray]:
    for part in np.split(TONE, 10):
        yield part
        await asyncio.sleep(0)


def failing(error: Exception, after: int = 0) -> Script:
    async def script(payload: dict) -> AsyncIterator[np.ndarray]:
        for _ in range(after):
            yield TONE[:1600]
            await asyncio.sleep(0.01)
        raise error

    return script


async def endless(payload: dict) -> AsyncIterator[np.ndarray]:
    while True:
        yield TONE[:1600]
        await asyncio.sleep(0.005)


async def slow(payload: dict) -> AsyncIterator[np.ndarray]:
    await asyncio.sleep(0.5)
    yield TONE


async def mute(payload: dict) -> AsyncIterator[np.ndarray]:
    await asyncio.Event().wait()
    yield TONE


class FakeBackend:
    def __init__(self) -> None:
        self.script: Script = speak
        self.full = False
        self.handles: list[FakeHandle] = []

    def submit(self, payload, *, outputs=None, request_id=None, timeout=None) -> FakeHandle:
        if self.full:
            raise Overloaded("8 requests are in flight, the most this server takes", retry_after=2.3)
        self.handles.append(FakeHandle(f"{request_id}.{len(self.handles)}", payload, self.script))
        return self.handles[-1]

    def health(self) -> dict:
        return {"status": "ready", "model": "demo", "instances": []}

    async def refresh(self) -> None:
        return

    def stats(self) -> dict:
        return {}


async def until(condition: Callable[[], bool], seconds: float = 2.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def metric(http: httpx.AsyncClient, line: str) -> float:
    text = (await http.get("/metrics")).text
    return next(float(each.rsplit(" ", 1)[1]) for each in text.splitlines() if each.startswith(line + " "))
