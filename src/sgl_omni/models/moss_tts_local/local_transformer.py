"""The transformer over the codebooks of one frame: layers with norms, biases and a plain MLP, as GPT-2 has them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sgl_omni.engine.attention import QKV, FusedAttend
from sgl_omni.engine.checkpoint import Slot
from sgl_omni.engine.fixed_cache import FixedAttend, FixedCache
from sgl_omni.engine.kv_cache import KVShape
from sgl_omni.engine.layers import parameter
from sgl_omni.engine.pairs import rotate_pairs, rotation_of
from sgl_omni.models.moss_tts_local.spec import LocalSpec


class _Linear(nn.Module):
    def __init__(self, in_size: int, out_size: int) -> None:
        super().__init__()
        self.weight = parameter(out_size, in_size)
        self.bias = parameter(out_size)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def slots(self, name: str) -> Iterator[Slot]:
        yield Slot(f"{name}.weight", self.weight, tuple(self.weight.shape))
        yield Slot(f"{name}.bias", self.bias, tuple(self.bias.shape))


class _Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = parameter(size)
        self.bias = parameter(size)
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self._eps)

    def slots(self, name: str) -> Iterator[Slot]:
        yield Slot(f"{name}.weight", self.weight, tuple(self.weight.shape))
        yield Slot(f"{name}.bias", self.bias, tuple(self.bias.shape))


class _Layer(nn.Module):
    def __init__(self, index: int, spec: LocalSpec) -> None:
        super().__init__()
        self._index = index
        self._head_dim = spec.head_dim
        self._gated = spec.activation == "silu"
        size = spec.hidden_size
        self.attention_norm = _Norm(size, spec.norm_eps)
        self.qkv = _Linear(size, 3 * size)
        self.out = _Linear(size, size)
        self.mlp_norm = _Norm(size, spec.norm_eps)
        self.up = _Linear(size, spec.intermediate_size)
        self.down = _Linear(spec.intermediate_size, size)

    def forward(self, x: Tensor, rotation: Tensor, attend: FixedAttend) -> Tensor:
        """x [n, count, hidden]: those places of n frames that ``attend`` writes now."""
        merged = self.qkv(self.attention_norm(x))
        x = x + self.out(self._mixed(merged, rotation, attend).reshape(x.shape))
        inner = self.up(self.mlp_norm(x))
        inner = F.silu(inner) if self._gated else F.gelu(inner, approximate="tanh")
        fed: Tensor = self.down(inner)
        return x + fed

    def _mixed(self, merged: Tensor, rotation: Tensor, attend: FixedAttend) -> Tensor:
        """merged [n, count, 3 * hidden] -> [n * count, heads, head_dim]"""
        heads = merged.shape[2] // (3 * self._head_dim)
        if isinstance(attend, FusedAttend):
            qkv = QKV(merged.flatten(0, 1), heads, None, 0.0)
            return attend.from_qkv(self._index, qkv, (rotation.real, rotation.imag))
        merged = merged.unflatten(-1, (-1, self._head_dim))
        q, k = rotate_pairs(merged[:, :, : 2 * heads], rotation).split(heads, 2)
        return attend(self._index, q.flatten(0, 1), k.flatten(0, 1), merged[:, :, 2 * heads :].flatten(0, 1))

    def slots(self, name: str) -> Iterator[Slot]:
        yield from self.attention_norm.slots(f"{name}.ln_1")
        yield from self.qkv.slots(f"{name}.attn.c_attn")
        yield from self.out.slots(f"{name}.attn.c_proj")
        yield from self.mlp_norm.slots(f"{name}.ln_2")
        yield from self.up.slots(f"{name}.mlp.fc_in")
        yield from self.down.slots(f"{name}.mlp.fc_out")


class LocalTransformer(nn.Module):
    """Embeddings of a frame's places in, hidden states of the same places out."""

    def __init__(self, spec: LocalSpec) -> None:
        super().__init__()
        self._spec = spec
        self.layers = nn.ModuleList(_Layer(i, spec) for i in range(spec.num_layers))
        self.norm = _Norm(spec.hidden_size, spec.norm_eps)
        self._rotations: dict[tuple[int, torch.device], Tensor] = {}

    def cache(self, places: int, like: Tensor) -> FixedCache:
        """Room for frames ``like`` [n, ...] of so many places."""
        spec = self._spec
        shape = KVShape(spec.num_layers, spec.num_heads, spec.head_dim, like.dtype)
        return FixedCache(shape, like.shape[0], places, like, neighbours=True)

    def forward(self, x: Tensor, cache: FixedCache, start: int = 0) -> Tensor:
        """x [n, count, hidden] at places from ``start`` on -> [n, count, hidden], normed."""
        count = x.shape[1]
        rotation = self._rotation(cache.length, x.device)[start : start + count]
        attend = cache.at(start, count)
        for layer in self.layers:
            x = layer(x, rotation, attend)
        normed: Tensor = self.norm(x)
        return normed

    def _rotation(self, places: int, device: torch.device) -> Tensor:
        """complex64 [places, head_dim / 2], made once."""
        found = self._rotations.get((places, device))
        if found is None:
            positions = torch.arange(places, device=device)
            found = rotation_of(positions, self._spec.head_dim, self._spec.rope_theta)
            self._rotations[places, device] = found
        return found

    def slots(self, prefix: str) -> Iterator[Slot]:
        """``prefix`` ends with a dot."""
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, _Layer)
            yield from layer.slots(f"{prefix}h.{i}")
        yield from self.norm.slots(f"{prefix}ln_f")
