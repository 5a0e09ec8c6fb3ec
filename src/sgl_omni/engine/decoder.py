"""A decoder of the Llama and Qwen kind, of any shape that ``DecoderConfig`` can say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from sgl_omni.engine.attention import AnyAttend, Attend
from sgl_omni.engine.checkpoint import Slot
from sgl_omni.engine.decoder_config import DecoderConfig
from sgl_omni.engine.fixed_cache import FixedAttend
from sgl_omni.engine.inserted import LayerRows
from sgl_omni.engine.kv_cache import KVShape
from sgl_omni.engine.layers import Attention, GatedMLP, RMSNorm
from sgl_omni.engine.moe import MoE
from sgl_omni.engine.ops import whole
from sgl_omni.engine.rope import Rope
from sgl_omni.engine.shard import Shard
from sgl_omni.errors import StartupError


def attention_of(layer: int, config: DecoderConfig, shard: Shard) -> Attention:
    return Attention(
        layer,
        config.hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        shard,
        qkv_bias=config.qkv_bias,
        out_bias=config.out_bias,
        qk_norm_eps=config.norm_eps if config.qk_norm else None,
        window=config.windows[layer],
        qkv_name=config.names.qkv,
        out_name=config.names.out,
    )


class DecoderLayer(nn.Module):
    def __init__(self, index: int, config: DecoderConfig, shard: Shard) -> None:
        super().__init__()
        self._attention_name = config.names.attention
        self.input_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = attention_of(index, config, shard)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp: MoE | GatedMLP
        if config.sparse[index] and config.moe is not None:
            self.mlp = MoE(config.hidden_size, config.moe, shard)
        else:
            self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, shard, bias=config.mlp_bias)

    def forward(
        self, x: Tensor, delta: Tensor | None, rotation: tuple[Tensor, Tensor], attend: AnyAttend
    ) -> tuple[Tensor, Tensor]:
        """Takes and returns the residual stream and what is still to be added to it, so that a norm adds it."""
        x, normed = self.input_norm.add(x, delta)
        x, normed = self.mlp_norm.add(x, self.attention(normed, rotation, attend))
        return x, self.mlp(normed)

    def slots(self, name: str) -> Iterator[Slot]:
        yield from self.input_norm.slots(f"{name}.input_layernorm")
        yield from self.attention.slots(f"{name}.{self._attention_name}")
        yield from self.mlp_norm.slots(f"{name}.post_attention_layernorm")
        yield from self.mlp.slots(f"{name}.mlp")


class Decoder(nn.Module):
    """Layers and the last norm: embeddings in, hidden states out. Embedding and heads belong to the model."""

    def __init__(self, config: DecoderConfig, shard: Shard | None = None, kept_layers: Sequence[int] = ()) -> None:
        """``kept_layers``: layers whose inputs are returned too. Raises ``StartupError`` for one that is not there."""
        super().__init__()
        for layer in kept_layers:
            if not 0 <= layer < config.num_layers:
                raise StartupError(f"the decoder has layers 0..{config.num_layers - 1}, not {layer}")
        self.config = config
        self.kept_layers = tuple(kept_layers)
        self.shard = shard or Shard()
        self.layers = nn.ModuleList(DecoderLayer(i, config, self.shard) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self._rope: Rope | None = None

    @property
    def kv_shape(self) -> KVShape:
        _, heads = self.shard.kv_heads(self.config.num_kv_heads)
        return KVShape(self.config.num_layers, heads, self.config.head_dim, self.norm.weight.dtype)

    def forward(self, x: Tensor, positions: Tensor, attend: Attend, added: LayerRows | None = None) -> Tensor:
        """x [n, hidden], positions int64 [axes, n] -> [n, hidden], normed; then, side by side, each kept layer's.

        ``added``: rows that are added to what the first layers hand on.
        """
        return self._turned(x, self._rope_on(x.device)(positions, x.dtype), attend, added)

    def in_places(self, x: Tensor, attend: FixedAttend) -> Tensor:
        """The same of x [rows * count, hidden], the places of a ``FixedCache`` that ``attend`` writes now."""
        return self._turned(x, attend.rotation(self._rope_on(x.device).table(attend.length, x.dtype)), attend)

    def _rope_on(self, device: torch.device) -> Rope:
        if self._rope is None:  # not before: until the weights are loaded the module is on the meta device
            self._rope = Rope(self.config.rope, self.config.head_dim, device)
        return self._rope

    def _turned(
        self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: AnyAttend, added: LayerRows | None = None
    ) -> Tensor:
        kept = {}
        delta: Tensor | None = None
        for i, layer in enumerate(self.layers):
            if i in self.kept_layers:
                kept[i] = x.clone() if delta is None else x + whole(delta, x.dtype)
            x, delta = layer(x, delta, rotation, attend)
            if added is not None and i < len(added.rows):
                x = x.index_add(0, added.at, added.rows[i].to(x.dtype))
        _, normed = self.norm.add(x, delta)
        return torch.cat([normed, *(kept[i] for i in self.kept_layers)], 1) if kept else normed

    def slots(self, prefix: str) -> Iterator[Slot]:
        """``prefix`` ends with a dot, e.g. ``model.``."""
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            yield from layer.slots(f"{prefix}layers.{i}")
        yield from self.norm.slots(f"{prefix}norm")


def materialise(module: nn.Module, device: torch.device | str, dtype: torch.dtype) -> None:
    """Gives a module that was built on the meta device real, still undefined, storage."""
    module.to(dtype)
    module.to_empty(device=device)
