"""Causal transformers between patches, run piece by piece: what a piece needs of those before it is in its stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sgl_omni.engine.checkpoint import Slot
from sgl_omni.engine.layers import parameter
from sgl_omni.models.moss_tts_local.codec_spec import BlockSpec, TransformerSpec
from sgl_omni.models.moss_tts_local.pairs import rotate_pairs, rotation_of

_NORM_EPS = 1e-5


@dataclass(slots=True)
class CodecStream:
    """Of one recording: keys and values [2, heads, places, head_dim] of each layer, places seen by each transformer."""

    kept: dict[tuple[int, int], Tensor] = field(default_factory=dict[tuple[int, int], Tensor])
    seen: dict[int, int] = field(default_factory=dict[int, int])


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

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], before: Tensor | None) -> tuple[Tensor, Tensor]:
        """x [places, width] and the keys and values before them -> x, and those to keep for the next piece."""
        width = (self._spec.width,)
        mixed, kept = self._attention(F.layer_norm(x, width, self.norm1, self.norm1_bias, _NORM_EPS), rotation, before)
        x = x + (mixed if self.scale1 is None else mixed * self.scale1)
        inner = F.gelu(F.linear(F.layer_norm(x, width, self.norm2, self.norm2_bias, _NORM_EPS), self.up))
        fed = F.linear(inner, self.down)
        return x + (fed if self.scale2 is None else fed * self.scale2), kept

    def _attention(self, x: Tensor, rotation: tuple[Tensor, Tensor], before: Tensor | None) -> tuple[Tensor, Tensor]:
        spec = self._spec
        q, k, v = F.linear(x, self.qkv).view(-1, 3, spec.num_heads, spec.head_dim).unbind(1)
        q, k = rotate_pairs(q, rotation), rotate_pairs(k, rotation)
        known = torch.stack([k, v]).transpose(1, 2)
        if before is not None:
            known = torch.cat([before, known], 2)
        places = torch.arange(known.shape[2], device=x.device)
        distance = places[-x.shape[0] :, None] - places
        mask = (distance >= 0) & (distance < spec.context)
        mixed = F.scaled_dot_product_attention(q.transpose(0, 1)[None], known[0][None], known[1][None], mask)[0]
        kept = known[:, :, max(0, known.shape[2] - spec.context + 1) :]
        return F.linear(mixed.transpose(0, 1).flatten(1), self.out), kept.contiguous()

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

    def forward(self, x: Tensor, stream: CodecStream, index: int) -> Tensor:
        spec = self._spec
        start = stream.seen.get(index, 0)
        stream.seen[index] = start + x.shape[0]
        positions = torch.arange(start, start + x.shape[0], device=x.device)
        rotation = rotation_of(positions, spec.head_dim, spec.rope_theta)
        x = F.linear(x, self.into)
        for i, layer in enumerate(self.layers):
            x, stream.kept[index, i] = layer(x, rotation, stream.kept.get((index, i)))
        return F.linear(x, self.out_of)

    def slots(self, name: str) -> Iterator[Slot]:
        yield Slot(f"{name}.input_proj.weight", self.into, tuple(self.into.shape))
        yield Slot(f"{name}.output_proj.weight", self.out_of, tuple(self.out_of.shape))
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, _Layer)
            yield from layer.slots(f"{name}.transformer.layers.{i}")


class CodecStack(nn.Module):
    """The encoder (``down``) or the decoder: [places, channels] in, as many places as its patches make of them out."""

    def __init__(self, blocks: Sequence[BlockSpec], *, down: bool) -> None:
        super().__init__()
        self._blocks = tuple(blocks)
        self._down = down
        self.transformers = nn.ModuleDict(
            {str(i): _Transformer(block) for i, block in enumerate(blocks) if isinstance(block, TransformerSpec)}
        )

    def forward(self, x: Tensor, stream: CodecStream) -> Tensor:
        """The next piece of the stream; in an encoder a whole number of frames."""
        for i, block in enumerate(self._blocks):
            if isinstance(block, TransformerSpec):
                x = self.transformers[str(i)](x, stream, i)
            elif self._down:
                x = x.unflatten(0, (-1, block.size)).transpose(1, 2).flatten(1)
            else:
                x = x.unflatten(1, (-1, block.size)).transpose(1, 2).flatten(0, 1)
        return x

    def slots(self, prefix: str) -> Iterator[Slot]:
        """``prefix`` ends with a dot."""
        for i, transformer in self.transformers.items():
            assert isinstance(transformer, _Transformer)
            yield from transformer.slots(f"{prefix}{i}")
