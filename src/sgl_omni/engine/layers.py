"""The parts of a decoder layer. Each knows which tensors on disk fill it, and holds its shard of them only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sgl_omni.engine.attention import QKV, AnyAttend, FusedAttend
from sgl_omni.engine.checkpoint import Slot
from sgl_omni.engine.ops import add_norm, embed, gated_linear, partial_linear, rms_norm
from sgl_omni.engine.rope import rotate
from sgl_omni.engine.shard import Shard


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)


class RMSNorm(nn.Module):
    """Over the last dimension, in float32, scaled by a weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = parameter(size)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """The sum, and its norm; see ``ops.add_norm``."""
        return add_norm(x, delta, self.weight, self.eps)

    def slots(self, name: str) -> Iterator[Slot]:
        yield Slot(f"{name}.weight", self.weight, tuple(self.weight.shape))


class Projection(nn.Module):
    """Two linear layers with biases and SiLU between them: from one model's width to another's."""

    def __init__(self, input_size: int, inner_size: int, output_size: int) -> None:
        super().__init__()
        self.first = parameter(inner_size, input_size)
        self.first_bias = parameter(inner_size)
        self.second = parameter(output_size, inner_size)
        self.second_bias = parameter(output_size)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, self.first, self.first_bias)), self.second, self.second_bias)

    def slots(self, name: str) -> Iterator[Slot]:
        for i, weight, bias in ((1, self.first, self.first_bias), (2, self.second, self.second_bias)):
            yield Slot(f"{name}.linear_fc{i}.weight", weight, tuple(weight.shape))
            yield Slot(f"{name}.linear_fc{i}.bias", bias, tuple(bias.shape))


class Embedding(nn.Module):
    """A table [rows, hidden]. Ids [n, columns] are summed over the columns, each with an offset of its own."""

    def __init__(self, rows: int, hidden_size: int, offsets: Sequence[int] = (0,)) -> None:
        super().__init__()
        self.weight = parameter(rows, hidden_size)
        self._offsets = tuple(offsets)
        self._offsets_on_device: Tensor | None = None

    def forward(self, ids: Tensor) -> Tensor:
        if len(self._offsets) == 1:
            return F.embedding(ids[:, 0], self.weight)
        return embed(ids, self._device_offsets(ids), self.weight)

    def _device_offsets(self, ids: Tensor) -> Tensor:
        if self._offsets_on_device is None:  # once: a copy from the host cannot be captured into a graph
            self._offsets_on_device = torch.tensor(self._offsets, device=ids.device)
        return self._offsets_on_device

    def slots(self, name: str) -> Iterator[Slot]:
        yield Slot(f"{name}.weight", self.weight, tuple(self.weight.shape))


@dataclass(frozen=True, slots=True)
class Columns:
    """One of the layers on disk that are merged: of its ``total`` outputs, ``start`` to ``start + count`` are ours."""

    name: str
    total: int
    start: int
    count: int


class MergedLinear(nn.Module):
    """Several linear layers of the same input as one product; each is split by its outputs."""

    def __init__(self, in_size: int, parts: Sequence[Columns], *, bias: bool = False) -> None:
        super().__init__()
        self._parts = tuple(parts)
        self.sizes = [part.count for part in parts]
        self.weight = parameter(sum(self.sizes), in_size)
        self.bias = parameter(sum(self.sizes)) if bias else None

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [n, in] -> one [n, count] a part."""
        return F.linear(x, self.weight, self.bias).split(self.sizes, -1)

    def merged(self, x: Tensor) -> Tensor:
        """All parts side by side; maybe as partial sums (``ops.partial_linear``)."""
        return partial_linear(x, self.weight, self.bias)

    def slots(self, name: str) -> Iterator[Slot]:
        weights = self.weight.split(self.sizes)
        for part, weight in zip(self._parts, weights, strict=True):
            yield Slot(f"{name}.{part.name}.weight", weight, (part.total, weight.shape[1]), 0, part.start)
        if self.bias is None:
            return
        for part, bias in zip(self._parts, self.bias.split(self.sizes), strict=True):
            yield Slot(f"{name}.{part.name}.bias", bias, (part.total,), 0, part.start)


class RowLinear(nn.Module):
    """A linear layer that is split by its inputs; the ranks' results are summed."""

    def __init__(self, in_size: int, out_size: int, shard: Shard, *, bias: bool = False) -> None:
        super().__init__()
        self._shard = shard
        self._in_size = in_size
        self.weight = parameter(out_size, shard.part(in_size, "inputs"))
        self.bias = parameter(out_size) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [n, in] -> [n, out]; alone, maybe as partial sums (``ops.partial_linear``)."""
        if self._shard.size == 1:
            return partial_linear(x, self.weight, self.bias)
        bias = self.bias if self._shard.index == 0 else None  # or it would be summed too
        return self._shard.reduce(F.linear(x, self.weight, bias))

    def slots(self, name: str) -> Iterator[Slot]:
        out_size, columns = self.weight.shape
        yield Slot(f"{name}.weight", self.weight, (out_size, self._in_size), 1, self._shard.index * columns)
        if self.bias is not None:
            yield Slot(f"{name}.bias", self.bias, (out_size,))


class Attention(nn.Module):
    """Grouped-query attention with merged q, k and v, and optionally a norm on each head of q and k."""

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        shard: Shard,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm_eps: float | None = None,
        window: int | None = None,
        qkv_name: str | None = None,
        out_name: str = "o_proj",
    ) -> None:
        """``qkv_name``: on disk, q, k and v are one layer of that name."""
        super().__init__()
        self._layer = layer
        self._head_dim = head_dim
        self._window = window
        self._norm_eps = qk_norm_eps or 0.0
        self._heads = heads = shard.part(num_heads, "attention heads")
        first_kv, kv_heads = shard.kv_heads(num_kv_heads)
        total = num_heads + 2 * num_kv_heads
        columns = [
            Columns(part, count * head_dim, start * head_dim, own * head_dim)
            if qkv_name is None
            else Columns(qkv_name, total * head_dim, (before + start) * head_dim, own * head_dim)
            for part, count, before, start, own in (
                ("q_proj", num_heads, 0, shard.index * heads, heads),
                ("k_proj", num_kv_heads, num_heads, first_kv, kv_heads),
                ("v_proj", num_kv_heads, num_heads + num_kv_heads, first_kv, kv_heads),
            )
        ]
        self._out_name = out_name
        self.qkv = MergedLinear(hidden_size, columns, bias=qkv_bias)
        self.out = RowLinear(num_heads * head_dim, hidden_size, shard, bias=out_bias)
        self.q_norm = None if qk_norm_eps is None else RMSNorm(head_dim, qk_norm_eps)
        self.k_norm = None if qk_norm_eps is None else RMSNorm(head_dim, qk_norm_eps)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: AnyAttend) -> Tensor:
        if isinstance(attend, FusedAttend):
            norms = None if self.q_norm is None or self.k_norm is None else (self.q_norm.weight, self.k_norm.weight)
            qkv = QKV(self.qkv.merged(x), self._heads, norms, self._norm_eps)
            return self.out(attend.from_qkv(self._layer, qkv, rotation, window=self._window).flatten(1))
        q, k, v = (part.unflatten(-1, (-1, self._head_dim)) for part in self.qkv(x))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, rotation), rotate(k, rotation)
        return self.out(attend(self._layer, q, k, v, window=self._window).flatten(1))

    def slots(self, name: str) -> Iterator[Slot]:
        yield from self.qkv.slots(name)
        yield from self.out.slots(f"{name}.{self._out_name}")
        if self.q_norm is not None and self.k_norm is not None:
            yield from self.q_norm.slots(f"{name}.q_norm")
            yield from self.k_norm.slots(f"{name}.k_norm")


class GatedMLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int, shard: Shard, *, bias: bool = False) -> None:
        super().__init__()
        size = shard.part(intermediate_size, "MLP columns")
        columns = [Columns(name, intermediate_size, shard.index * size, size) for name in ("gate_proj", "up_proj")]
        self.gate_up = MergedLinear(hidden_size, columns, bias=bias)
        self.down = RowLinear(intermediate_size, hidden_size, shard, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gated_linear(x, self.gate_up.weight, self.gate_up.bias))

    def slots(self, name: str) -> Iterator[Slot]:
        yield from self.gate_up.slots(name)
        yield from self.down.slots(f"{name}.down_proj")
