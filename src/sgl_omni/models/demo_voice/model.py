"""The decoder: Llama layers over rows of four codebook columns, for inference only.

The weights are rearranged once at load so that a step has few operations: q, k, v and gate, up are merged;
the RMSNorm scales are folded into the layer that follows; the two halves of a rotary pair lie side by side,
so that rotation is one complex product; query heads lie [group, kv head], the order in which attention
writes its output. Ids that a column may not produce have a head bias of minus infinity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from sgl_omni.models.demo_voice.linear import PackedLinear
from sgl_omni.models.demo_voice.spec import VoiceSpec
from sgl_omni.models.demo_voice.text import ALPHABET

_CHARACTER_INDEX = {c: i for i, c in enumerate(ALPHABET)}


def prompt_rows(text: str, voice: int, spec: VoiceSpec) -> list[list[int]]:
    """Input ids [1 + characters + 1, codebooks]: the voice, a row a character, the separator.

    A character's row holds it and the characters that follow it, one a column.
    """
    k, pad = spec.num_codebooks, spec.pad_id
    ids = [spec.text_offset + _CHARACTER_INDEX[c] for c in text] + [pad] * (k - 1)
    characters = [ids[i : i + k] for i in range(len(text))]
    return [[spec.voice_offset + voice] + [pad] * (k - 1), *characters, [spec.sep_id] + [pad] * (k - 1)]


@dataclass(slots=True)
class _Layer:
    qkv: PackedLinear
    out: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear


class KVCache:
    """Keys and values of ``rows`` sequences of at most ``max_len`` positions, allocated once."""

    def __init__(self, spec: VoiceSpec, rows: int, max_len: int, device: torch.device) -> None:
        self.max_len = max_len
        shape = (spec.num_layers, 2, rows, max_len, spec.num_kv_heads, spec.head_dim)
        self._cache = torch.zeros(shape, device=device)
        flat = self._cache.view(spec.num_layers, 2, rows * max_len, spec.num_kv_heads, spec.head_dim)
        self._flat: list[tuple[Tensor, Tensor]] = [(layer[0], layer[1]) for layer in flat]

    def write(self, layer: int, index: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores k and v [n, kv_heads, head_dim] at the flat positions ``index`` [n] (row * max_len + position)."""
        keys, values = self._flat[layer]
        keys.index_copy_(0, index, k)
        values.index_copy_(0, index, v)

    def read(self, row: int, length: int) -> tuple[Tensor, ...]:
        """Views [1, kv_heads, length, head_dim] of one row: keys and values of layer 0, of layer 1, ..."""
        return self._cache[:, :, row, :length].transpose(2, 3).unsqueeze(2).flatten(0, 1).unbind(0)


class VoiceDecoder:
    """``prefill`` and ``decode`` over a ``KVCache``; both return logits [rows, codebooks, head_vocab]."""

    def __init__(self, spec: VoiceSpec, tensors: dict[str, Tensor], device: torch.device) -> None:
        self.spec = spec
        self.device = device
        self._groups = spec.num_heads // spec.num_kv_heads
        self._q_size = spec.num_heads * spec.head_dim
        self._kv_size = spec.num_kv_heads * spec.head_dim
        weights = {name: tensor.to(device, torch.float32) for name, tensor in tensors.items()}
        self._embedding = weights["model.embed_tokens.weight"]
        self._columns = torch.arange(spec.num_codebooks, device=device) * spec.column_vocab_size
        self._layers = [self._build_layer(weights, f"model.layers.{i}.") for i in range(spec.num_layers)]
        self._head = PackedLinear(weights["lm_head.weight"] * weights["model.norm.weight"], self._head_bias())
        frequencies = spec.rope_theta ** -(torch.arange(0, spec.head_dim, 2, device=device).float() / spec.head_dim)
        angles = torch.arange(spec.max_positions, device=device).float()[:, None] * frequencies
        self._rotations = torch.complex(angles.cos(), angles.sin())[:, None]  # [positions, 1, head_dim / 2]

    @classmethod
    def load(cls, folder: Path, device: str = "cpu") -> VoiceDecoder:
        """Reads ``model.safetensors``; computes in float32 (on a CPU bfloat16 takes 1.6 times as long a step)."""
        return cls(VoiceSpec.load(folder), load_file(folder / "model.safetensors"), torch.device(device))

    def _build_layer(self, weights: dict[str, Tensor], prefix: str) -> _Layer:
        spec = self.spec

        def weight(name: str) -> Tensor:
            return weights[f"{prefix}{name}.weight"]

        def paired(w: Tensor) -> Tensor:
            """[heads * head_dim, in], element i of a head next to element i + head_dim / 2."""
            return w.view(-1, 2, spec.head_dim // 2, w.shape[1]).transpose(1, 2).reshape(w.shape)

        q = paired(weight("self_attn.q_proj")).view(spec.num_kv_heads, self._groups, spec.head_dim, -1)
        q = q.transpose(0, 1).reshape(self._q_size, -1)
        qkv = torch.cat([q, paired(weight("self_attn.k_proj")), weight("self_attn.v_proj")])
        out = weight("self_attn.o_proj").view(-1, spec.num_kv_heads, self._groups, spec.head_dim)
        gate_up = torch.cat([weight("mlp.gate_proj"), weight("mlp.up_proj")])
        return _Layer(
            qkv=PackedLinear(qkv * weight("input_layernorm")),
            out=PackedLinear(out.transpose(1, 2).reshape(-1, self._q_size)),
            gate_up=PackedLinear(gate_up * weight("post_attention_layernorm")),
            down=PackedLinear(weight("mlp.down_proj")),
        )

    def _head_bias(self) -> Tensor:
        """Zero for the codes and, in column 0, the end of audio; minus infinity for every other id."""
        spec = self.spec
        bias = torch.full((spec.num_codebooks, spec.head_vocab_size), float("-inf"), device=self.device)
        bias[:, : spec.codebook_size] = 0.0
        bias[0, spec.eos_id] = 0.0
        return bias.flatten()

    def _embed(self, ids: Tensor) -> Tensor:
        return self._embedding[ids + self._columns].sum(-2)

    def _norm(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.spec.hidden_size,), None, self.spec.rms_norm_eps)

    def _rotated_qkv(self, x: Tensor, layer: _Layer, rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [n, hidden], rotation [n, 1, head_dim / 2] -> q [n, heads, d], k and v [n, kv_heads, d]."""
        spec, n = self.spec, x.shape[0]
        qkv = layer.qkv(self._norm(x))
        pairs = qkv[:, : self._q_size + self._kv_size].view(n, -1, spec.head_dim // 2, 2)
        qk = torch.view_as_real(torch.view_as_complex(pairs) * rotation).view(n, -1, spec.head_dim)
        v = qkv[:, self._q_size + self._kv_size :].view(n, spec.num_kv_heads, spec.head_dim)
        return qk[:, : spec.num_heads], qk[:, spec.num_heads :], v

    def _mlp(self, x: Tensor, layer: _Layer) -> Tensor:
        gate, up = layer.gate_up(self._norm(x)).chunk(2, -1)
        return layer.down(F.silu(gate) * up)

    def _logits(self, x: Tensor) -> Tensor:
        return self._head(self._norm(x)).view(-1, self.spec.num_codebooks, self.spec.head_vocab_size)

    @torch.inference_mode()
    def prefill(self, cache: KVCache, row: int, ids: Sequence[Sequence[int]]) -> Tensor:
        """Runs a whole prompt ids [t, codebooks] from position 0 of a cache row; logits of its last position."""
        t, groups = len(ids), self._groups
        index = torch.arange(row * cache.max_len, row * cache.max_len + t, device=self.device)
        rotation = self._rotations[:t]
        x = self._embed(torch.tensor(ids, device=self.device))
        for i, layer in enumerate(self._layers):
            q, k, v = self._rotated_qkv(x, layer, rotation)
            cache.write(i, index, k, v)
            attended = F.scaled_dot_product_attention(
                q.transpose(0, 1)[None],
                k.repeat(1, groups, 1).transpose(0, 1)[None],
                v.repeat(1, groups, 1).transpose(0, 1)[None],
                is_causal=True,
            )
            x = x + layer.out(attended[0].transpose(0, 1).reshape(t, self._q_size))
            x = x + self._mlp(x, layer)
        return self._logits(x[-1:])

    @torch.inference_mode()
    def decode(
        self, cache: KVCache, rows: Sequence[int], positions: Sequence[int], ids: Sequence[Sequence[int]], width: int
    ) -> Tensor:
        """One step of the cache rows ``rows``, each at its own position; logits of these rows.

        Everything but attention runs at exactly ``width`` rows (the rest are padding), and each row attends
        alone over its exact length, so that no row's result depends on what else runs.
        """
        n, padding = len(rows), width - len(rows)
        position = torch.tensor([*positions, *[0] * padding], device=self.device)
        index = torch.tensor([r * cache.max_len + p for r, p in zip(rows, positions, strict=True)], device=self.device)
        views = [cache.read(r, p + 1) for r, p in zip(rows, positions, strict=True)]
        rotation = self._rotations[position]
        x = self._embed(torch.tensor([*ids, *[[0] * self.spec.num_codebooks] * padding], device=self.device))
        idle = [x.new_zeros(padding, self._q_size)] if padding else []
        for i, layer in enumerate(self._layers):
            q, k, v = self._rotated_qkv(x, layer, rotation)
            cache.write(i, index, k[:n], v[:n])
            queries = q.view(width, 1, self._groups, -1, self.spec.head_dim).transpose(2, 3).unbind(0)
            attended = [
                F.scaled_dot_product_attention(query, view[2 * i], view[2 * i + 1])
                .transpose(1, 2)
                .view(1, self._q_size)
                for query, view in zip(queries[:n], views, strict=True)
            ]
            x = x + layer.out(torch.cat(attended + idle))
            x = x + self._mlp(x, layer)
        return self._logits(x)[:n]
