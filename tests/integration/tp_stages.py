"""Tensor-parallel engine stages for the tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from sgl_omni.engine.engine import AutoregressiveEngine, EngineSettings
from sgl_omni.engine.interface import EngineOutput, Payload
from sgl_omni.engine.model import CausalModel
from sgl_omni.engine.shard import Shard
from sgl_omni.engine.task import InputSpec, TokenTask
from sgl_omni.runtime.stage import EngineStage, FunctionStage, Request


class Moody(TokenTask):
    """Does what a request's `do` says, in one rank or in all."""

    def __init__(self, model: CausalModel, shard: Shard) -> None:
        inputs = InputSpec(vocab_sizes=(model.config.vocab_size,), hidden_size=model.config.hidden_size)
        super().__init__(inputs, eos_ids=model.config.eos_ids)
        self.shard = shard
        self.odd: set[str] = set()
        self.failing: set[str] = set()

    def parse(self, request_id: str, payload: Payload) -> Any:
        if payload.get("do") == "differ":
            self.odd.add(request_id)
        if payload.get("fail_in_rank") == self.shard.index:
            self.failing.add(request_id)
        return super().parse(request_id, payload)

    def take(self, request: Any, row: list[int]) -> bool:
        if request.id in self.failing:
            raise RuntimeError("this rank was told to fail")
        if request.id in self.odd and self.shard.index:
            row = [row[0] ^ 1]
        return super().take(request, row)


def decoder(
    model_path: str,
    gpu_id: int | None = None,
    device: str = "cpu",
    engine: dict[str, Any] | None = None,
    shard: Shard | None = None,
    tp_rank: int = 0,
    tp_size: int = 1,
    nccl_port: int | None = None,
) -> EngineStage:
    shard = shard or Shard()
    assert (shard.index, shard.size) == (tp_rank, tp_size)
    assert (nccl_port is None) == (tp_size == 1)
    torch.set_num_threads(1)
    model = CausalModel.load(Path(model_path), device, shard=shard)
    return EngineStage(AutoregressiveEngine.build(model, Moody(model, shard), EngineSettings.parse(engine or {})))


class Drawing:
    """Answers each request with its seed, and with a draw from a generator that it did not seed."""

    def __init__(self) -> None:
        self._waiting: list[tuple[str, Payload]] = []

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def add(self, request_id: str, payload: Payload) -> None:
        self._waiting.append((request_id, payload))

    def abort(self, request_id: str) -> None:
        self._waiting = [item for item in self._waiting if item[0] != request_id]

    def step(self) -> list[EngineOutput]:
        waiting, self._waiting = self._waiting, []
        order = list({"a", "b", "c", "d", "e", "f", "g", "h"})
        return [
            EngineOutput(
                name,
                result={
                    "seed": payload["seed"],
                    "draw": int(torch.randint(1 << 30, ())),
                    "order": order,
                    "bulk": int(payload["bulk"].sum()) if "bulk" in payload else None,
                    "text": len(payload.get("text", "")),
                },
            )
            for name, payload in waiting
        ]

    def stats(self) -> dict[str, float]:
        return {"running": 0, "queued": len(self._waiting)}


def drawing(shard: Shard | None = None) -> EngineStage:
    return EngineStage(Drawing())


def no_engine(shard: Shard | None = None) -> FunctionStage:
    def run(payload: Payload, request: Request) -> Payload:
        return payload

    return FunctionStage(run)


def unshardable(model_path: str, tp_rank: int = 0, how: str = "raise", shard: Shard | None = None) -> EngineStage:
    """Rank 1 cannot be built while rank 0 waits for it in a sum."""
    if tp_rank == 1 and how == "raise":
        raise OSError("this rank's part of the checkpoint is missing")
    if tp_rank == 1:
        os._exit(3)
    assert shard is not None
    shard.reduce(torch.ones(4))
    return drawing()
