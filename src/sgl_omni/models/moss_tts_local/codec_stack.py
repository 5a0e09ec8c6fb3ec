"""Causal transformers between patches, run piece by piece and for several recordings together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sgl_omni.engine.checkpoint import Slot
from sgl_omni.engine.layers import parameter
from sgl_omni.engine.pairs import rotate_pairs, rotation_of
from sgl_omni.models.moss_tts_local.codec_spec import BlockSpec, TransformerSpec

_NORM_EPS = 1e-5


class StreamMemory:
    """What later pieces need of earlier ones: of each layer, keys and values of the last places of every recording.

    A recording has a row of each tensor [rows, 2, heads, places, head_dim]; the place seen last is the last one.
    """

    def __init__(self, blocks: Sequence[BlockSpec], like: Tensor) -> None:
        self._like = like
        self.layers = {
            (i, layer): like.new_zeros(0, 2, block.num_heads, block.context - 1, block.head_dim)
            for i, block in enumerate(blocks)
            if isinstance(block, TransformerSpec)
            for layer in range(block.num_layers)
        }
        self._free: list[int] = []
        self.rows = 0

    def take(self) -> int:
        """A row for a new recording; there are twice as many where none is left."""
        if not self._free:
            more = max(1, self.rows)
            for key, kept in self.layers.items():
                self.layers[key] = torch.cat([kept, kept.new_zeros(more, *kept.shape[1:])])
            self._free = list(range(self.rows + more - 1, self.rows - 1, -1))
            self.rows += more
        return self._free.pop()

    def leave(self, row: int) -> None:
        self._free.append(row)


class _Layer(nn.Module):
    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        width = spec.width
        self._spec = spec
        self.norm1, self.norm1_bias = parameter(width), parameter(width)
        self.norm2, self.norm2_bias = parameter(width), parameter(width)
        self.qkv, self.out = parameter(3 * width, width), parameter(width, width)
        self.up, self.down = parameter(spec.inner_size, width), parameter(width, spec.inner_size)
        self.scale1 = parameter(width) if spec.scaled else None
        self.scale2 = parameter(width) if spec.scaled else None

    def forward(self, x: Tensor, rotation: Tensor, kept: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
        """x [batch, places, width], ``kept`` of this layer and whose ``rows`` of it these are; see ``_Transformer``."""
        width = (self._spec.width,)
        normed = F.layer_norm(x, width, self.norm1, self.norm1_bias, _NORM_EPS)
        mixed = self._attention(normed, rotation, kept, rows, mask)
        x = x + (mixed if self.scale1 is None else mixed * self.scale1)
        inner = F.gelu(F.linear(F.layer_norm(x, width, self.norm2, self.norm2_bias, _NORM_EPS), self.up))
        fed = F.linear(inner, self.down)
        return x + (fed if self.scale2 is None else fed * self.scale2)

    def _attention(self, x: Tensor, rotation: Tensor, kept: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
        spec, (batch, places, _) = self._spec, x.shape
        merged = F.linear(x, self.qkv).view(batch, places, 3 * spec.num_heads, spec.head_dim)
        q, k = rotate_pairs(merged[:, :, : 2 * spec.num_heads], rotation).split(spec.num_heads, 2)
        known = torch.cat([kept[rows], torch.stack([k, merged[:, :, -spec.num_heads :]], 1).transpose(2, 3)], 3)
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), known[:, 0], known[:, 1], mask)
        kept.index_copy_(0, rows, known[:, :, :, places:])
        return F.linear(mixed.transpose(1, 2).flatten(2), self.out)

    def slots(self, name: str) -> Iterator[Slot]:
        named = {
            "norm1.weight": self.norm1,
            "norm1.bias": self.norm1_bias,
            "norm2.weight": self.norm2,
            "norm2.bias": self.norm2_bias,
            "self_attn.in_proj.weight": self.qkv,
            "self_attn.out_proj.weight": self.out,
            "ffn.0.weight": self.up,
            "ffn.2.weight": self.down,
            "layer_scale_1.scale": self.scale1,
            "layer_scale_2.scale": self.scale2,
        }
        for key, tensor in named.items():
            if tensor is not None:
                yield Slot(f"{name}.{key}", tensor, tuple(tensor.shape))


class _Transformer(nn.Module):
    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self._spec = spec
        self.into = parameter(spec.width, spec.in_size)
        self.out_of = parameter(spec.out_size, spec.width)
        self.layers = nn.ModuleList(_Layer(spec) for _ in range(spec.num_layers))

    def forward(self, x: Tensor, memory: StreamMemory, index: int, rows: Tensor, seen: Tensor) -> Tensor:
        """x [batch, places, in_size] of the recordings with these ``rows`` of the memory, after ``seen`` places."""
        spec, places = self._spec, x.shape[1]
        before = spec.context - 1
        rotation = rotation_of(seen[:, None] + torch.arange(places, device=x.device), spec.head_dim, spec.rope_theta)
        at = torch.arange(before + places, device=x.device)
        distance = at[before:, None] - at
        near = (distance >= 0) & (distance < spec.context)
        mask = (near & (at >= before - seen[:, None, None]))[:, None]
        x = F.linear(x, self.into)
        for i, layer in enumerate(self.layers):
            x = layer(x, rotation, memory.layers[index, i], rows, mask)
        return F.linear(x, self.out_of)

    def slots(self, name: str) -> Iterator[Slot]:
        yield Slot(f"{name}.input_proj.weight", self.into, tuple(self.into.shape))
        yield Slot(f"{name}.output_proj.weight", self.out_of, tuple(self.out_of.shape))
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, _Layer)
            yield from layer.slots(f"{name}.transformer.layers.{i}")


class CodecStack(nn.Module):
    """The encoder or the decoder: [batch, places, channels] in, as many places as its patches make of them out."""

    def __init__(self, blocks: Sequence[BlockSpec], *, down: bool, frame_places: int) -> None:
        """``down``: patches make fewer places; ``frame_places``: of the input, in a frame."""
        super().__init__()
        self._blocks = tuple(blocks)
        self._down = down
        self._frame_places = frame_places
        self.transformers = nn.ModuleDict(
            {str(i): _Transformer(block) for i, block in enumerate(blocks) if isinstance(block, TransformerSpec)}
        )

    def memory(self) -> StreamMemory:
        return StreamMemory(self._blocks, next(self.parameters()))

    def forward(self, x: Tensor, memory: StreamMemory, rows: Tensor, frames: Tensor) -> Tensor:
        """The next frames of the recordings with these ``rows`` of the memory, after so many ``frames`` [batch]."""
        places = self._frame_places
        for i, block in enumerate(self._blocks):
            if isinstance(block, TransformerSpec):
                x = self.transformers[str(i)](x, memory, i, rows, frames * places)
            elif self._down:
                x, places = x.unflatten(1, (-1, block.size)).transpose(2, 3).flatten(2), places // block.size
            else:
                x, places = x.unflatten(2, (-1, block.size)).transpose(2, 3).flatten(1, 2), places * block.size
        return x

    def slots(self, prefix: str) -> Iterator[Slot]:
        """``prefix`` ends with a dot."""
        for i, transformer in self.transformers.items():
            assert isinstance(transformer, _Transformer)
            yield from transformer.slots(f"{prefix}{i}")
