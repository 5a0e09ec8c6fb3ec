"""Whisper's decoder: learned positions, layer norms, and attention over the encoder's output in every layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sgl_omni.engine.attention import Attend
from sgl_omni.engine.checkpoint import Checkpoint, Slot
from sgl_omni.engine.cross_attention import CrossAttend, SourceShape
from sgl_omni.engine.device_rows import Field
from sgl_omni.engine.kv_cache import KVShape
from sgl_omni.engine.layers import parameter
from sgl_omni.engine.model import LoadedModel
from sgl_omni.engine.request import Request
from sgl_omni.engine.row_state import RowState
from sgl_omni.engine.weights import SharePolicy, WeightStore
from sgl_omni.models.whisper.rules import WhisperRules, next_times_rows
from sgl_omni.models.whisper.spec import ARCHITECTURE, WhisperSpec

SHARE_POLICY = SharePolicy(ARCHITECTURE, remarks="tables of the ids that may not be said")


class _Linear(nn.Module):
    """Linear layers of one input side by side, each with a bias or, as Whisper's keys, without."""

    def __init__(self, in_size: int, parts: Mapping[str, int], without_bias: Sequence[str] = ()) -> None:
        super().__init__()
        self._parts = dict(parts)
        self._without_bias = frozenset(without_bias)
        self.weight = parameter(sum(parts.values()), in_size)
        self.bias = parameter(sum(parts.values()))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def slots(self, name: str) -> Iterator[Slot]:
        sizes = list(self._parts.values())
        for part, weight, bias in zip(self._parts, self.weight.split(sizes), self.bias.split(sizes), strict=True):
            yield Slot(f"{name}.{part}.weight", weight, tuple(weight.shape))
            if part not in self._without_bias:
                yield Slot(f"{name}.{part}.bias", bias, tuple(bias.shape))


class _LayerNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = parameter(size)
        self.bias = parameter(size)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias)

    def slots(self, name: str) -> Iterator[Slot]:
        yield Slot(f"{name}.weight", self.weight, tuple(self.weight.shape))
        yield Slot(f"{name}.bias", self.bias, tuple(self.bias.shape))


class WhisperLayer(nn.Module):
    def __init__(self, index: int, spec: WhisperSpec) -> None:
        super().__init__()
        width = spec.width
        self._index = index
        self._heads = spec.num_heads
        self.self_norm = _LayerNorm(width)
        self.qkv = _Linear(width, {"q_proj": width, "k_proj": width, "v_proj": width}, ["k_proj"])
        self.self_out = _Linear(width, {"out_proj": width})
        self.cross_norm = _LayerNorm(width)
        self.cross_q = _Linear(width, {"q_proj": width})
        self.cross_kv = _Linear(width, {"k_proj": width, "v_proj": width}, ["k_proj"])
        self.cross_out = _Linear(width, {"out_proj": width})
        self.feed_norm = _LayerNorm(width)
        self.feed_in = _Linear(width, {"fc1": spec.feed_size})
        self.feed_out = _Linear(spec.feed_size, {"fc2": width})

    def forward(self, x: Tensor, attend: CrossAttend) -> Tensor:
        q, k, v = (self._by_head(part) for part in self.qkv(self.self_norm(x)).chunk(3, -1))
        x = x + self.self_out(attend(self._index, q, k, v).flatten(1))
        q = self._by_head(self.cross_q(self.cross_norm(x)))
        x = x + self.cross_out(attend.cross(self._index, q).flatten(1))
        return x + self.feed_out(F.gelu(self.feed_in(self.feed_norm(x))))

    def source_kv(self, source: Tensor) -> Tensor:
        """source [frames, width] -> keys and values [2, frames, heads, head_dim]."""
        return torch.stack([self._by_head(part) for part in self.cross_kv(source).chunk(2, -1)])

    def _by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self._heads, -1))

    def slots(self, name: str) -> Iterator[Slot]:
        yield from self.self_norm.slots(f"{name}.self_attn_layer_norm")
        yield from self.cross_norm.slots(f"{name}.encoder_attn_layer_norm")
        yield from self.feed_norm.slots(f"{name}.final_layer_norm")
        for part in (self.qkv, self.self_out):
            yield from part.slots(f"{name}.self_attn")
        for part in (self.cross_q, self.cross_kv, self.cross_out):
            yield from part.slots(f"{name}.encoder_attn")
        for part in (self.feed_in, self.feed_out):
            yield from part.slots(name)


class WhisperDecoder(LoadedModel):
    """Tokens in, logits over tokens out; the head is the embedding.

    A request's ``frame_limit`` is its sequence's plan, and its ``frame_end`` its ``times``; see ``rules``.
    """

    def __init__(self, spec: WhisperSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embedding = parameter(spec.vocab_size, spec.width)
        self.position_embedding = parameter(spec.max_positions, spec.width)
        self.layers = nn.ModuleList(WhisperLayer(i, spec) for i in range(spec.num_layers))
        self.norm = _LayerNorm(spec.width)
        self._rules: WhisperRules | None = None

    @classmethod
    def load(
        cls,
        folder: Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        weights: WeightStore | None = None,
    ) -> WhisperDecoder:
        """Reads the decoder of a checkpoint, and not its encoder; its tensors live where ``weights`` says."""
        checkpoint = Checkpoint(folder)
        with torch.device("meta"):
            model = cls(WhisperSpec.load(folder))

        def read() -> None:
            for name, value in model.named_parameters():
                if name.endswith("bias"):
                    value.zero_()  # those of keys are not on disk
            checkpoint.load(model.slots(), prefix="model.decoder.")

        return model.take_weights(checkpoint, weights, read, device=device, dtype=dtype, policy=SHARE_POLICY)

    @property
    def kv_shape(self) -> KVShape:
        spec = self.spec
        return KVShape(spec.num_layers, spec.num_heads, spec.width // spec.num_heads, self.embedding.dtype)

    @property
    def source_shape(self) -> SourceShape:
        return SourceShape(self.kv_shape, self.spec.max_frames)

    def source_kv(self, source: Tensor) -> Tensor:
        source = source.to(self.embedding)
        kept = [layer.source_kv(source) for layer in self.layers if isinstance(layer, WhisperLayer)]
        return torch.stack(kept)

    def embed_ids(self, ids: Tensor) -> Tensor:
        return F.embedding(ids[:, 0], self.embedding)

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        assert isinstance(attend, CrossAttend)
        x = x + F.embedding(positions[0], self.position_embedding)
        for layer in self.layers:
            x = layer(x, attend)
        normed: Tensor = self.norm(x)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embedding)[:, None]

    def rule(self, logits: Tensor, requests: Sequence[Request]) -> Tensor:
        facts = [(request.frame_limit, len(request.outputs), request.frame_end) for request in requests]
        plans, steps, times = torch.tensor(facts, dtype=torch.int64, device=logits.device).T
        return self.rules(logits, plans, steps, times)

    def rule_rows(self, logits: Tensor, state: RowState) -> Tensor:
        plans = state.fields[:, Field.LIMIT].to(torch.int64)
        return self.rules(logits, plans, state.steps, state.ends)

    def finish_rows(self, ids: Tensor, hidden: Tensor, state: RowState) -> tuple[Tensor, Tensor | None]:
        return ids, next_times_rows(state.ends, ids[:, 0], self.spec.timestamp_begin)

    @property
    def rules(self) -> WhisperRules:
        if self._rules is None:
            self._rules = WhisperRules(self.spec, self.device)
        return self._rules

    def slots(self) -> Iterator[Slot]:
        prefix = "model.decoder."
        yield Slot(f"{prefix}embed_tokens.weight", self.embedding, tuple(self.embedding.shape))
        table = self.position_embedding
        yield Slot(f"{prefix}embed_positions.weight", table, tuple(table.shape))
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, WhisperLayer)
            yield from layer.slots(f"{prefix}layers.{i}")
        yield from self.norm.slots(f"{prefix}layer_norm")
