"""Causal transformers between patches, run piece by piece and for several recordings together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sgl_omni.engine.checkpoint import Slot
from sgl_omni.engine.layers import parameter
from sgl_omni.engine.pairs import rotate_pairs_in_place, rotation_of
from sgl_omni.engine.platform import for_kernels
from sgl_omni.models.moss_tts_local.codec_spec import BlockSpec, TransformerSpec
from sgl_omni.models.moss_tts_local.stream_memory import StreamMemory, ring

_NORM_EPS = 1e-5
_ALIGNED = 8
"""Elements that a row of the mask has a multiple of: torch's attention would copy others, in each layer."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """The next frames of several streams: for each, int64 [batch], its slot of the memory, the frames before, and how
    many there are of those that it is filled up to."""

    slots: Tensor
    seen: Tensor
    lengths: Tensor


@dataclass(frozen=True, slots=True)
class _Window:
    """What the layers of a transformer look at, the same for all of them.

    Each piece stands at the end of ``known`` places, the ones before which are remembered. ``reads``
    int64 [batch * known] and ``writes`` int64 [batch * places] are places of a layer's memory, ``mask``
    [batch, 1, places, known] is added to the scores, ``rotation`` complex64 [batch, places, head_dim / 2].
    """

    reads: Tensor
    writes: Tensor
    mask: Tensor
    rotation: Tensor


def _added(x: Tensor, y: Tensor, scale: Tensor | None) -> Tensor:
    return x + y if scale is None else torch.addcmul(x, y, scale)


def _rotate_and_keep(merged: Tensor, rotation: Tensor, writes: Tensor, known: Tensor, kept: Tensor) -> None:
    """Rotates q, and puts the rotated k and v at the ends of ``known`` and to their places; shapes as the kernel's."""
    if for_kernels(merged):
        from sgl_omni.engine.kernels.rings import rotate_and_keep

        return rotate_and_keep(merged, rotation, writes, known, kept)
    heads, places = known.shape[2] // 2, merged.shape[1]
    rotate_pairs_in_place(merged[:, :, : 2 * heads], rotation)
    new = merged[:, :, heads:]
    known[:, -places:] = new
    kept.index_copy_(0, writes, new.view(len(writes), kept.shape[1]))
    return None


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

    def forward(self, x: Tensor, kept: Tensor, window: _Window) -> Tensor:
        """x [batch, places, width]; ``kept``: the memory's places of this layer."""
        width = (self._spec.width,)
        normed = F.layer_norm(x, width, self.norm1, self.norm1_bias, _NORM_EPS)
        x = _added(x, self._attention(normed, kept, window), self.scale1)
        inner = F.gelu(F.linear(F.layer_norm(x, width, self.norm2, self.norm2_bias, _NORM_EPS), self.up))
        return _added(x, F.linear(inner, self.down), self.scale2)

    def _attention(self, x: Tensor, kept: Tensor, window: _Window) -> Tensor:
        heads, size, (batch, places, _) = self._spec.num_heads, self._spec.head_dim, x.shape
        merged = F.linear(x, self.qkv).view(batch, places, 3 * heads, size)
        known = kept.index_select(0, window.reads).view(batch, -1, 2 * heads, size)
        _rotate_and_keep(merged, window.rotation, window.writes, known, kept)
        q, k, v = (part.transpose(1, 2) for part in (merged[:, :, :heads], known[:, :, :heads], known[:, :, heads:]))
        mixed = F.scaled_dot_product_attention(q, k, v, window.mask)
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

    def forward(self, x: Tensor, memory: StreamMemory, index: int, pieces: Pieces) -> Tensor:
        """x [batch, places, in_size] of the stack's block ``index``."""
        window = self._window(x, pieces, memory.strides[index])
        x = F.linear(x, self.into)
        for i, layer in enumerate(self.layers):
            x = layer(x, memory.layers[index, i], window)
        return F.linear(x, self.out_of)

    def _window(self, x: Tensor, pieces: Pieces, stride: int) -> _Window:
        """Of pieces with so many places as x [batch, places, in_size] has; all else of ``pieces`` in places too."""
        spec, (batch, places, _), kept = self._spec, x.shape, ring(self._spec)
        slots, seen, lengths = (each[:, None] for each in (pieces.slots, pieces.seen, pieces.lengths))
        known = -(-(spec.context - 1 + places) // _ALIGNED) * _ALIGNED
        at = torch.arange(places - known, places, device=x.device)
        new, all_known = at[-places:], seen + at
        remembered = (new < lengths) & (new >= lengths - kept)
        distance = new[:, None] - at
        far = (distance < 0) | (distance >= spec.context) | (all_known[:, None] < 0)
        return _Window(
            reads=(slots * stride + all_known % kept).flatten(),
            writes=(slots * remembered * stride + all_known[:, -places:] % kept).flatten(),  # others are nobody's
            mask=x.new_zeros(batch, 1, places, known).masked_fill_(far[:, None], -math.inf),
            rotation=rotation_of(all_known[:, -places:], spec.head_dim, spec.rope_theta),
        )

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

    def memory(self, slots: int) -> StreamMemory:
        return StreamMemory(self._blocks, slots, next(self.parameters()))

    def forward(self, x: Tensor, memory: StreamMemory, pieces: Pieces) -> Tensor:
        """``pieces``: whose they are, in frames. No step here depends on a number in them."""
        places = self._frame_places
        for i, block in enumerate(self._blocks):
            if isinstance(block, TransformerSpec):
                within = Pieces(pieces.slots, pieces.seen * places, pieces.lengths * places)
                x = self.transformers[str(i)](x, memory, i, within)
            elif self._down:
                x, places = x.unflatten(1, (-1, block.size)).transpose(2, 3).flatten(2), places // block.size
            else:
                x, places = x.unflatten(2, (-1, block.size)).transpose(2, 3).flatten(1, 2), places * block.size
        return x

    def piece_bytes(self, frames: int) -> int:
        """Memory that a piece of so many frames takes on its way, in the layer where that is most.

        A place has its residual stream and what is added to it, q, k and v, q and k in float32 twice, and two inner
        states; beside them lie the places that are looked at, and the mask while it is made.
        """
        size = next(self.parameters()).element_size()
        places, largest = self._frame_places * frames, 0
        for block in self._blocks:
            if not isinstance(block, TransformerSpec):
                places = places // block.size if self._down else places * block.size
                continue
            own = places * (block.width * (6 * size + 2 * 2 * 4) + 2 * block.inner_size * size)
            known = block.context - 1 + places
            largest = max(largest, own + known * (2 * block.width + places) * size + known * places)
        return largest

    def slots(self, prefix: str) -> Iterator[Slot]:
        """``prefix`` ends with a dot."""
        for i, transformer in self.transformers.items():
            assert isinstance(transformer, _Transformer)
            yield from transformer.slots(f"{prefix}{i}")
