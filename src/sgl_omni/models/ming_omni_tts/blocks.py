"""Transformer blocks over a few latents: the flow that makes them from noise, and their sum-up for the next step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sgl_omni.engine.checkpoint import Slot
from sgl_omni.engine.layers import RMSNorm, parameter
from sgl_omni.engine.pairs import rotate_pairs, rotation_of
from sgl_omni.models.ming_omni_tts.spec import TIME_SIZE, BlocksSpec, MingSpec

_NORM_EPS = 1e-6
_ROPE_THETA = 10000.0
_TIME_SCALE = 1000.0
TIMES = tuple(step / 32 for step in (0, 2, 4, 6, 8, 12, 16, 20, 24, 28, 32))
"""Of the flow's ten steps, before they are bent towards the beginning."""


class Linear(nn.Module):
    def __init__(self, in_size: int, out_size: int, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = parameter(out_size, in_size)
        self.bias = parameter(out_size) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def slots(self, name: str) -> Iterator[Slot]:
        yield Slot(f"{name}.weight", self.weight, tuple(self.weight.shape))
        if self.bias is not None:
            yield Slot(f"{name}.bias", self.bias, tuple(self.bias.shape))


class _Block(nn.Module):
    def __init__(self, spec: BlocksSpec) -> None:
        super().__init__()
        width = spec.hidden_size
        self._heads = spec.num_heads
        self.norm1, self.norm2 = RMSNorm(width, _NORM_EPS), RMSNorm(width, _NORM_EPS)
        self.q, self.k, self.v = Linear(width, width), Linear(width, width), Linear(width, width)
        self.out = Linear(width, width)
        self.up, self.down = Linear(width, spec.inner_size), Linear(spec.inner_size, width)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """x [n, places, width]; every place sees all."""
        normed = self.norm1(x)
        q, k, v = (part(normed).unflatten(-1, (self._heads, -1)) for part in (self.q, self.k, self.v))
        q, k = rotate_pairs(q, rotation), rotate_pairs(k, rotation)
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        fed: Tensor = self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return x + fed

    def slots(self, name: str) -> Iterator[Slot]:
        yield from self.norm1.slots(f"{name}.norm1")
        for key, part in (("to_q", self.q), ("to_k", self.k), ("to_v", self.v), ("to_out.0", self.out)):
            yield from part.slots(f"{name}.attn.{key}")
        yield from self.norm2.slots(f"{name}.norm2")
        yield from self.up.slots(f"{name}.mlp.ff.0.0")
        yield from self.down.slots(f"{name}.mlp.ff.2")


class Blocks(nn.Module):
    """Blocks, and a norm and a linear layer after them."""

    def __init__(self, spec: BlocksSpec, in_size: int, out_size: int) -> None:
        super().__init__()
        self._head_dim = spec.hidden_size // spec.num_heads
        self.into = Linear(in_size, spec.hidden_size)
        self.blocks = nn.ModuleList(_Block(spec) for _ in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, _NORM_EPS)
        self.out_of = Linear(spec.hidden_size, out_size)

    def forward(self, x: Tensor) -> Tensor:
        """x [n, places, hidden] -> [n, places, out_size]"""
        rotation = rotation_of(torch.arange(x.shape[1], device=x.device), self._head_dim, _ROPE_THETA)
        for block in self.blocks:
            x = block(x, rotation)
        out: Tensor = self.out_of(self.norm(x))
        return out

    def slots(self, prefix: str) -> Iterator[Slot]:
        """``prefix`` ends with a dot."""
        yield from self.into.slots(f"{prefix}x_embedder")
        for i, block in enumerate(self.blocks):
            assert isinstance(block, _Block)
            yield from block.slots(f"{prefix}blocks.{i}")
        yield from self.norm.slots(f"{prefix}final_layer.norm_final")
        yield from self.out_of.slots(f"{prefix}final_layer.linear")


class Aggregator(nn.Module):
    """The latents of a step as one input of the language model."""

    def __init__(self, spec: MingSpec) -> None:
        super().__init__()
        self.blocks = Blocks(spec.aggregator, spec.latent_size, spec.decoder.hidden_size)
        self.mark = parameter(1, spec.aggregator.hidden_size)

    def forward(self, latents: Tensor) -> Tensor:
        """latents [n, patch, latent_size] -> [n, hidden]"""
        x = self.blocks.into(latents)
        mark = self.mark.expand(x.shape[0], 1, -1)
        out: Tensor = self.blocks(torch.cat([mark, x], 1))
        return out[:, 0]

    def slots(self, prefix: str) -> Iterator[Slot]:
        yield from self.blocks.slots(prefix)
        yield Slot(f"{prefix}word_embedder.weight", self.mark, tuple(self.mark.shape))


class Flow(nn.Module):
    """From noise to latents along a field that knows the language model's state and the latents before.

    The field is the guided one: what the state adds to it counts ``1 + guidance`` times.
    """

    def __init__(self, spec: MingSpec) -> None:
        super().__init__()
        width = spec.flow.hidden_size
        self._patch = spec.patch
        self.blocks = Blocks(spec.flow, spec.latent_size, spec.latent_size)
        self.time1, self.time2 = Linear(TIME_SIZE, width), Linear(width, width)
        self.condition = Linear(spec.decoder.hidden_size, width)

    def forward(self, hidden: Tensor, history: Tensor, noise: Tensor, guidance: float, stirring: Tensor) -> Tensor:
        """hidden [n, hidden], history [n, history, latent_size], noise [n, patch, latent_size] -> latents like it.

        ``stirring`` [steps, n, patch, latent_size] is added after each step, scaled by the root of its length; the last
        of it has no effect.
        """
        times = [1 - math.cos(math.pi / 2 * time) for time in TIMES]
        dtype = hidden.dtype
        conditions = torch.cat([hidden, torch.zeros_like(hidden)])
        before = torch.cat([history, history]).to(dtype)
        x = noise.float()
        for step, (start, end) in enumerate(pairwise(times)):
            with_state, without = self._field(torch.cat([x, x]).to(dtype), start, conditions, before).float().chunk(2)
            x = x + (end - start) * (with_state + (with_state - without) * guidance)
            if end < times[-1]:
                x = x + math.sqrt(end - start) * stirring[step]
        return x

    def _field(self, x: Tensor, time: float, conditions: Tensor, history: Tensor) -> Tensor:
        exponents = torch.arange(TIME_SIZE // 2, device=x.device) * (-math.log(10000) / (TIME_SIZE // 2 - 1))
        angles = _TIME_SCALE * time * exponents.exp()
        embedded = self.time2(F.silu(self.time1(torch.cat([angles.sin(), angles.cos()]).to(x.dtype))))
        first = (embedded + self.condition(conditions))[:, None]
        places = torch.cat([first, self.blocks.into(history), self.blocks.into(x)], 1)
        out: Tensor = self.blocks(places)
        return out[:, -self._patch :]

    def slots(self, prefix: str) -> Iterator[Slot]:
        yield from self.blocks.slots(prefix)
        yield from self.time1.slots(f"{prefix}t_embedder.time_mlp.0")
        yield from self.time2.slots(f"{prefix}t_embedder.time_mlp.2")
        yield from self.condition.slots(f"{prefix}c_embedder.cond_embedder")
