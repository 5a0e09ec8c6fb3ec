"""Stages that hand tensors on, to be received where they are."""

from __future__ import annotations

import asyncio
import os

from sgl_omni.runtime.stage import FunctionStage, Payload, Request, StreamStage


def make(device: str = "cpu") -> FunctionStage:
    """`count` floats from `first` on, as a tensor of the stage's device."""
    import torch

    async def run(payload: Payload, request: Request) -> Payload:
        await asyncio.sleep(payload.get("before", 0))
        values = torch.arange(payload["count"], dtype=torch.float32, device=device) + payload["first"]
        if payload.get("sparse"):
            values = values.to_sparse()  # which nothing can hand on
        return {"values": values, "first": payload["first"], "after": payload.get("after", 0), "maker": os.getpid()}

    return FunctionStage(run, 64)


def pour(device: str = "cpu") -> FunctionStage:
    """`chunks` tensors of `count` floats, as fast as the receiver takes them."""
    import torch

    async def run(payload: Payload, request: Request) -> Payload:
        for i in range(payload["chunks"]):
            values = torch.arange(payload["count"], dtype=torch.float32, device=device) + i
            await request.emit({"values": values, "first": i})
        return {}

    return FunctionStage(run, 64)


class Catch(StreamStage[dict[str, int]]):
    """Counts the chunks that are what was poured, in order."""

    def open(self, request: Request) -> dict[str, int]:
        return {"right": 0, "next": 0}

    def feed(self, state: dict[str, int], chunk: Payload) -> tuple[()]:
        import torch

        values = chunk["values"]
        right = torch.arange(len(values), dtype=torch.float32, device=values.device) + state["next"]
        state["right"] += bool(torch.equal(values, right)) and chunk["first"] == state["next"]
        state["next"] += 1
        return ()

    def flush(self, state: dict[str, int]) -> tuple[()]:
        return ()

    def result(self, state: dict[str, int], payload: Payload) -> Payload:
        return {**state}


def catch() -> Catch:
    return Catch()


def check(device: str = "cpu") -> FunctionStage:
    """Whether the tensor is what was made, and where it arrived."""
    import torch

    async def run(payload: Payload, request: Request) -> Payload:
        values = payload["values"]
        right = torch.arange(len(values), dtype=torch.float32, device=values.device) + payload["first"]
        equal = bool(torch.equal(values, right))
        values.zero_()
        await asyncio.sleep(payload["after"])
        return {"equal": equal, "untouched": not values.any().item(), "device": str(values.device)}

    return FunctionStage(run, 64)
