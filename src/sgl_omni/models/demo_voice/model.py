"""The decoder: Llama layers over rows of four codebook columns, for inference only.

The weights are rearranged once at load so that a step has few operations: q, k, v and gate, up are merged;
the RMSNorm scales are folded into the layer that follows; the two halves of a rotary pair lie side by side,
so that rotation is one complex product. Ids that a column may not produce have a head bias of minus infinity.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from sgl_omni.engine.attention import Attend
from sgl_omni.engine.checkpoint import Checkpoint
from sgl_omni.engine.kv_cache import KVShape
from sgl_omni.engine.model import StepModel
from sgl_omni.engine.request import Request
from sgl_omni.engine.weights import OwnWeights, SharePolicy, WeightStore
from sgl_omni.models.demo_voice.linear import PackedLinear
from sgl_omni.models.demo_voice.spec import VoiceSpec
from sgl_omni.models.demo_voice.text import ALPHABET

SHARE_POLICY = SharePolicy(
    "DemoVoiceForConditionalGeneration",
    remarks="On a CPU each replica packs a copy of the linear layers for oneDNN; embeddings, biases and rotations are "
    "used in place. Elsewhere all are.",
)

_CHARACTER_INDEX = {c: i for i, c in enumerate(ALPHABET)}


def prompt_rows(text: str, voice: int, spec: VoiceSpec) -> list[list[int]]:
    """Input ids [1 + characters + 1, codebooks]: the voice, a row a character, the separator.

    A character's row holds it and the characters that follow it, one a column.
    """
    k, pad = spec.num_codebooks, spec.pad_id
    ids = [spec.text_offset + _CHARACTER_INDEX[c] for c in text] + [pad] * (k - 1)
    characters = [ids[i : i + k] for i in range(len(text))]
    return [[spec.voice_offset + voice] + [pad] * (k - 1), *characters, [spec.sep_id] + [pad] * (k - 1)]


def shapes(spec: VoiceSpec) -> dict[str, Tensor]:
    """The tensors of ``arrange`` on the meta device."""
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    hidden, outputs = spec.hidden_size, spec.num_codebooks * spec.head_vocab_size
    layer = {
        "qkv": (q_size + 2 * kv_size, hidden),
        "out": (hidden, q_size),
        "gate_up": (2 * spec.intermediate_size, hidden),
        "down": (hidden, spec.intermediate_size),
    }
    sizes: dict[str, tuple[int, ...]] = {"embedding": (spec.num_codebooks * spec.column_vocab_size, hidden)}
    sizes |= {f"layers.{i}.{name}": size for i in range(spec.num_layers) for name, size in layer.items()}
    sizes |= {"head": (outputs, hidden), "head_bias": (outputs,)}
    tensors = {name: torch.empty(size, device="meta") for name, size in sizes.items()}
    rotations = torch.empty(spec.max_positions, 1, spec.head_dim // 2, dtype=torch.complex64, device="meta")
    return {**tensors, "rotations": rotations}


def arrange(spec: VoiceSpec, source: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The weights as a step uses them, from those of the checkpoint in float32."""

    def paired(w: Tensor) -> Tensor:
        """[heads * head_dim, in], element i of a head next to element i + head_dim / 2."""
        return w.view(-1, 2, spec.head_dim // 2, w.shape[1]).transpose(1, 2).reshape(w.shape)

    yield "embedding", source["model.embed_tokens.weight"]
    for i in range(spec.num_layers):
        weight = {
            name.removeprefix(f"model.layers.{i}.").removesuffix(".weight"): tensor
            for name, tensor in source.items()
            if name.startswith(f"model.layers.{i}.")
        }
        q, k = paired(weight["self_attn.q_proj"]), paired(weight["self_attn.k_proj"])
        qkv = torch.cat([q, k, weight["self_attn.v_proj"]])
        gate_up = torch.cat([weight["mlp.gate_proj"], weight["mlp.up_proj"]])
        yield f"layers.{i}.qkv", qkv * weight["input_layernorm"]
        yield f"layers.{i}.out", weight["self_attn.o_proj"]
        yield f"layers.{i}.gate_up", gate_up * weight["post_attention_layernorm"]
        yield f"layers.{i}.down", weight["mlp.down_proj"]
    yield "head", source["lm_head.weight"] * source["model.norm.weight"]
    yield "head_bias", _head_bias(spec)
    frequencies = spec.rope_theta ** -(torch.arange(0, spec.head_dim, 2).float() / spec.head_dim)
    angles = torch.arange(spec.max_positions).float()[:, None] * frequencies
    yield "rotations", torch.complex(angles.cos(), angles.sin())[:, None]  # [positions, 1, head_dim / 2]


def _head_bias(spec: VoiceSpec) -> Tensor:
    """Zero for the codes and, in column 0, the end of audio; minus infinity for every other id."""
    bias = torch.full((spec.num_codebooks, spec.head_vocab_size), float("-inf"))
    bias[:, : spec.codebook_size] = 0.0
    bias[0, spec.eos_id] = 0.0
    return bias.flatten()


@dataclass(slots=True)
class _Layer:
    qkv: PackedLinear
    out: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear


class VoiceDecoder(StepModel):
    """The device side of the demo voice: rows of ids in, logits [rows, codebooks, head_vocab] out."""

    def __init__(self, spec: VoiceSpec, weights: Mapping[str, Tensor], store: WeightStore) -> None:
        """``weights``: those of ``arrange``, all on one device, as ``store`` gave them; they may be read-only."""
        self.spec = spec
        self._store = store
        self.columns = spec.num_codebooks
        self._embedding = weights["embedding"]
        self._device = self._embedding.device
        self._q_size = spec.num_heads * spec.head_dim
        self._kv_size = spec.num_kv_heads * spec.head_dim
        self._columns = torch.arange(spec.num_codebooks, device=self._device) * spec.column_vocab_size
        self._layers = [
            _Layer(**{name: PackedLinear(weights[f"layers.{i}.{name}"]) for name in _Layer.__slots__})
            for i in range(spec.num_layers)
        ]
        self._head = PackedLinear(weights["head"], weights["head_bias"])
        self._head_bias = weights["head_bias"]
        self._rotations = weights["rotations"]

    @classmethod
    def load(cls, folder: Path, device: str = "cpu", weights: WeightStore | None = None) -> VoiceDecoder:
        """Reads ``model.safetensors``; computes in float32 (on a CPU bfloat16 takes 1.6 times as long a step)."""
        spec = VoiceSpec.load(folder)

        def fill(targets: Mapping[str, Tensor]) -> None:
            source = load_file(folder / "model.safetensors")
            for name, tensor in arrange(spec, {key: value.float() for key, value in source.items()}):
                targets[name].copy_(tensor)

        store = weights or OwnWeights()
        found = store.obtain(
            shapes(spec), device, fill, policy=SHARE_POLICY, fingerprint=Checkpoint(folder).fingerprint()
        )
        return cls(spec, found, store)

    def verify_weights(self) -> None:
        self._store.verify(self.tensors())

    def tensors(self) -> Mapping[str, Tensor]:
        """Those of ``arrange`` that are used as they were given."""
        linears = {
            f"layers.{i}.{name}": getattr(layer, name)
            for i, layer in enumerate(self._layers)
            for name in _Layer.__slots__
        } | {"head": self._head}
        plain = {name: linear.weight for name, linear in linears.items() if linear.weight is not None}
        used = {"embedding": self._embedding, "rotations": self._rotations, "head_bias": self._head_bias}
        return {**used, **plain}

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def kv_shape(self) -> KVShape:
        return KVShape(self.spec.num_layers, self.spec.num_kv_heads, self.spec.head_dim)

    def embed_ids(self, ids: Tensor) -> Tensor:
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

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        rotation = self._rotations[positions[0]]
        for i, layer in enumerate(self._layers):
            x = x + layer.out(attend(i, *self._rotated_qkv(x, layer, rotation)).view(x.shape[0], self._q_size))
            x = x + self._mlp(x, layer)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        return self._head(self._norm(hidden)).view(-1, self.spec.num_codebooks, self.spec.head_vocab_size)

    def choose(self, logits: Tensor, requests: Sequence[Request]) -> Tensor:
        """Greedy, or by the request's own sampler: its draws are those of the reference implementation."""
        ids = logits.argmax(-1)
        for row, request in enumerate(requests):
            if request.task.sampler is not None:
                ids[row] = torch.tensor(request.task.sampler(logits[row]))
        return ids
