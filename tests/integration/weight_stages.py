"""Engine stages for the tests of weight sharing."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sgl_omni.engine.engine import AutoregressiveEngine, EngineSettings
from sgl_omni.engine.interface import Payload
from sgl_omni.engine.model import CausalModel
from sgl_omni.engine.task import InputSpec, TokenTask
from sgl_omni.engine.weights import Fill, SharePolicy, WeightStore
from sgl_omni.gpu.weights.share import SharedWeights
from sgl_omni.gpu.weights.shm import ShmBackend
from sgl_omni.runtime.stage import EngineStage
from stages import CountingEngine

POLICY = SharePolicy("LlamaForCausalLM")


class CarelessTask(TokenTask):
    """Writes into a weight when a request says so."""

    def __init__(self, model: CausalModel) -> None:
        inputs = InputSpec(vocab_sizes=(model.config.vocab_size,), hidden_size=model.config.hidden_size)
        super().__init__(inputs, eos_ids=model.config.eos_ids)
        self.model = model
        self.curious: set[str] = set()

    def parse(self, request_id: str, payload: Payload) -> Any:
        if payload.get("tell_pid"):
            self.curious.add(request_id)
        if payload.get("write"):
            self.model.embedding.weight.add_(1)
        return super().parse(request_id, payload)

    def result(self, request: Any) -> Payload:
        told = {"pid": os.getpid()} if request.id in self.curious else {}
        return {**super().result(request), **told}


class MortalShm(ShmBackend):
    """Memory that counts as gone when its leader is, as CUDA IPC's is."""

    outlives_leader = False


class GatedWeights:
    """Whoever asks for weights leaves a file of its pid; whoever loads them waits for a file `go` and fails if it holds
    a message."""

    def __init__(self, weights: WeightStore, folder: Path) -> None:
        self._weights = weights
        self._folder = folder

    def obtain(self, wanted: Mapping[str, Tensor], device: Any, fill: Fill, **about: Any) -> dict[str, Tensor]:
        (self._folder / f"asks-{os.getpid()}").touch()

        def gated(targets: Mapping[str, Tensor]) -> None:
            go = self._folder / "go"
            while not go.exists():
                time.sleep(0.02)
            if message := go.read_text():
                raise OSError(message)
            fill(targets)

        return self._weights.obtain(wanted, device, gated, **about)

    def verify(self, tensors: Mapping[str, Tensor]) -> None:
        self._weights.verify(tensors)

    def refuse_update(self) -> None:
        self._weights.refuse_update()


def decoder(
    model_path: str,
    gpu_id: int | None = None,
    device: str = "cpu",
    engine: dict[str, Any] | None = None,
    weights: WeightStore | None = None,
    mortal: bool = False,
    gate: str | None = None,
) -> EngineStage:
    torch.set_num_threads(1)
    if gate is not None and weights is not None:
        weights = GatedWeights(weights, Path(gate))
    if mortal and isinstance(weights, SharedWeights):
        weights._choose_backend = lambda _: MortalShm()
    model = CausalModel.load(Path(model_path), device, weights=weights, policy=POLICY)
    model.verify_weights()
    return EngineStage(AutoregressiveEngine.build(model, CarelessTask(model), EngineSettings.parse(engine or {})))


def oblivious(gpu_id: int | None = None, engine: dict[str, Any] | None = None) -> EngineStage:
    """Does not know that weights may be shared."""
    return EngineStage(CountingEngine(1, 1.0))


class Roomy(CountingEngine):
    def __init__(self, tokens: int) -> None:
        super().__init__(1, 1.0)
        self._tokens = tokens

    def stats(self) -> dict[str, float]:
        return {**super().stats(), "kv_capacity_tokens": self._tokens}


def uneven(folder: str, gpu_id: int | None = None, engine: dict[str, Any] | None = None) -> EngineStage:
    """The first to come has room for 100 tokens, everyone else for 200."""
    try:
        (Path(folder) / "first").touch(exist_ok=False)
    except FileExistsError:
        return EngineStage(Roomy(200))
    return EngineStage(Roomy(100))
