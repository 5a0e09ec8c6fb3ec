"""A mixture of experts in place of an MLP."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sgl_omni.engine.checkpoint import Slot
from sgl_omni.engine.decoder_config import MoEConfig
from sgl_omni.engine.layers import GatedMLP, parameter
from sgl_omni.engine.ops import whole
from sgl_omni.engine.platform import for_kernels
from sgl_omni.engine.shard import Shard


class MoE(nn.Module):
    """Each row goes through the experts that the router likes best. Every rank holds its columns of every expert."""

    def __init__(self, hidden_size: int, config: MoEConfig, shard: Shard) -> None:
        super().__init__()
        self._config = config
        self._shard = shard
        size = shard.part(config.intermediate_size, "expert columns")
        self.router = parameter(config.num_experts, hidden_size)
        self.gate_up = parameter(config.num_experts, 2 * size, hidden_size)
        self.down = parameter(config.num_experts, hidden_size, size)
        self.shared = GatedMLP(hidden_size, config.shared_size, shard) if config.shared_size else None
        self.shared_gate = parameter(1, hidden_size) if config.shared_size and config.shared_gated else None

    def forward(self, x: Tensor) -> Tensor:
        """x [n, hidden] -> [n, hidden]; maybe as partial sums, one a choice (``ops.partial_linear``)."""
        routed = self._routed(x, *self._route(x))
        if self.shared is None and self._shard.size == 1:
            return routed
        routed = self._shard.reduce(whole(routed, x.dtype))
        if self.shared is None:
            return routed
        shared = whole(self.shared(x), x.dtype)
        return routed + (shared if self.shared_gate is None else F.linear(x, self.shared_gate).sigmoid() * shared)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Experts and their weights, both [n, experts_per_token]."""
        scores = F.linear(x, self.router).softmax(-1, dtype=torch.float32)
        weights, experts = scores.topk(self._config.experts_per_token, -1)
        if self._config.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return experts, weights.to(x.dtype)

    def _routed(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        if for_kernels(x):
            from sgl_omni.engine.kernels import moe

            return moe.routed(x, experts, weights, self.gate_up, self.down)
        return routed_one_by_one(x, experts, weights, self.gate_up, self.down)

    def slots(self, name: str) -> Iterator[Slot]:
        experts, hidden_size, size = self.down.shape
        full, start = self._config.intermediate_size, self._shard.index * size
        yield Slot(f"{name}.gate.weight", self.router, (experts, hidden_size))
        for i in range(experts):
            gate, up = self.gate_up[i].chunk(2)
            yield Slot(f"{name}.experts.{i}.gate_proj.weight", gate, (full, hidden_size), 0, start)
            yield Slot(f"{name}.experts.{i}.up_proj.weight", up, (full, hidden_size), 0, start)
            yield Slot(f"{name}.experts.{i}.down_proj.weight", self.down[i], (hidden_size, full), 1, start)
        if self.shared is not None:
            yield from self.shared.slots(
                f"{name}.shared_expert" if self._config.shared_gated else f"{name}.shared_experts"
            )
        if self.shared_gate is not None:
            yield Slot(f"{name}.shared_expert_gate.weight", self.shared_gate, (1, hidden_size))


def routed_one_by_one(x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """One expert after another, each for the rows that chose it; the arguments are those of ``kernels.moe.routed``."""
    result = torch.zeros_like(x)
    for expert in experts.unique().tolist():
        row, choice = torch.where(experts == expert)
        gate, up = F.linear(x[row], gate_up[expert]).chunk(2, -1)
        done = F.linear(F.silu(gate) * up, down[expert])
        result.index_add_(0, row, done * weights[row, choice, None])
    return result
