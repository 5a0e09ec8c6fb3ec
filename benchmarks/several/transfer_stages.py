"""A stage that hands tensors on and one that takes them, for what a transfer costs."""

from __future__ import annotations

from typing import Any

from sgl_omni.runtime.stage import FunctionStage, Payload, Request, StreamStage

CONCURRENCY = 16


def create_source(device: str = "cpu") -> FunctionStage:
    """A tensor of ``bytes`` that lies ready on the stage's device: as the payload, or as each of ``chunks`` chunks."""
    import torch

    ready: dict[int, Any] = {}

    async def give(payload: Payload, request: Request) -> Payload:
        size = payload["bytes"]
        if size and size not in ready:
            ready[size] = (torch.arange(size, dtype=torch.int64, device=device) % 251).to(torch.uint8)
        data = ready.get(size)
        for _ in range(payload["chunks"]):
            await request.emit({"data": data, "check": payload["check"]})
        return {"data": None if payload["chunks"] else data, "check": payload["check"]}

    return FunctionStage(give, concurrency=CONCURRENCY)


class Sink(StreamStage[dict[str, int]]):
    """Brings what arrives to its device, where a stage would compute with it, and counts it."""

    concurrency = CONCURRENCY

    def __init__(self, device: str) -> None:
        import torch

        self._device = torch.device(device)

    def open(self, request: Request) -> dict[str, int]:
        return {"bytes": 0, "tensors": 0, "wrong": 0}

    def feed(self, state: dict[str, int], chunk: Payload) -> tuple[()]:
        import torch

        data = chunk["data"]
        if data is None:
            return ()
        here = data.to(self._device)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        state["bytes"] += here.nbytes
        state["tensors"] += 1
        if chunk["check"]:
            right = torch.arange(here.numel(), dtype=torch.int64, device=self._device) % 251
            state["wrong"] += int((here.long() != right).sum())
        return ()

    def flush(self, state: dict[str, int]) -> tuple[()]:
        return ()

    def result(self, state: dict[str, int], payload: Payload) -> Payload:
        self.feed(state, payload)
        return {**state}


def create_sink(device: str = "cpu") -> Sink:
    return Sink(device)
