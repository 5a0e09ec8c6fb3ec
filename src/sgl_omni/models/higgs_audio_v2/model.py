"""The device side of Higgs Audio v2.

A row is [1 + codebooks] ids: a text id and codes that do not matter, or a placeholder and the codes of an audio row.
Both kinds share attention and the residual stream; norms and MLPs are separate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sgl_omni.engine.attention import Attend
from sgl_omni.engine.checkpoint import Checkpoint, Slot
from sgl_omni.engine.decoder import attention_of
from sgl_omni.engine.decoder_config import DecoderConfig
from sgl_omni.engine.delay import forced_ids
from sgl_omni.engine.kv_cache import KVShape
from sgl_omni.engine.layers import Embedding, GatedMLP, RMSNorm, parameter
from sgl_omni.engine.model import LoadedModel
from sgl_omni.engine.ops import whole
from sgl_omni.engine.request import Request
from sgl_omni.engine.rope import Rope
from sgl_omni.engine.row_state import RowState
from sgl_omni.engine.shard import Shard
from sgl_omni.engine.weights import SharePolicy, WeightStore
from sgl_omni.models.higgs_audio_v2.spec import UNREAD, HiggsSpec

POLICY = SharePolicy("HiggsAudioV2ForConditionalGeneration")


class _Feed(nn.Module):
    """The norms and the MLP of one kind of rows."""

    def __init__(self, config: DecoderConfig, shard: Shard) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, shard, bias=config.mlp_bias)

    def slots(self, name: str, prefix: str) -> Iterator[Slot]:
        yield from self.input_norm.slots(f"{name}.{prefix}input_layernorm")
        yield from self.mlp_norm.slots(f"{name}.{prefix}post_attention_layernorm")
        yield from self.mlp.slots(f"{name}.{prefix}mlp")


class HiggsLayer(nn.Module):
    def __init__(self, index: int, config: DecoderConfig, shard: Shard) -> None:
        super().__init__()
        self.attention = attention_of(index, config, shard)
        self.text = _Feed(config, shard)
        self.audio = _Feed(config, shard)

    def forward(
        self,
        x: Tensor,
        delta: Tensor | None,
        is_audio: Tensor | None,
        rotation: tuple[Tensor, Tensor],
        attend: Attend,
    ) -> tuple[Tensor, Tensor]:
        """Takes and returns the residual stream and what is still to be added to it.

        ``is_audio`` bool [n, 1], or none where every row is audio, which spares the text MLP.
        """
        text, audio = self.text, self.audio
        x, normed = audio.input_norm.add(x, delta)
        if is_audio is None:
            x, normed = audio.mlp_norm.add(x, self.attention(normed, rotation, attend))
            return x, audio.mlp(normed)
        normed = torch.where(is_audio, normed, text.input_norm.add(x, None)[1])
        x, normed = audio.mlp_norm.add(x, self.attention(normed, rotation, attend))
        fed = whole(text.mlp(text.mlp_norm.add(x, None)[1]), x.dtype)
        return x, torch.where(is_audio, whole(audio.mlp(normed), x.dtype), fed)

    def slots(self, name: str) -> Iterator[Slot]:
        yield from self.attention.slots(f"{name}.self_attn")
        yield from self.text.slots(name, "")
        yield from self.audio.slots(name, "audio_")


class HiggsModel(LoadedModel):
    """Text and audio rows in, logits [n, codebooks, codebook_size] out.

    Rows that ``embed_ids`` made are [n, hidden + 1]: the last column is 1 for audio and 0 for text. Rows that
    ``embed_outputs`` made are [n, hidden]: a model only ever outputs audio.
    """

    embeds_outputs_apart = True

    def __init__(self, spec: HiggsSpec, shard: Shard | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.columns = 1 + spec.num_codebooks
        config = spec.decoder
        self._shard = shard or Shard()
        self.text_embedding = Embedding(config.vocab_size, config.hidden_size)
        offsets = [k * spec.codebook_size for k in range(spec.num_codebooks)]
        self.audio_embedding = Embedding(len(offsets) * spec.codebook_size, config.hidden_size, offsets)
        self.layers = nn.ModuleList(HiggsLayer(i, config, self._shard) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.head = parameter(len(offsets) * spec.codebook_size, config.hidden_size)
        self._rope: Rope | None = None

    @classmethod
    def load(
        cls,
        folder: Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        weights: WeightStore | None = None,
    ) -> HiggsModel:
        """Reads a checkpoint; a text head, which generation has no use for, is left on disk.

        Its tensors live where ``weights`` says, in memory of their own by default.
        """
        checkpoint = Checkpoint(folder)
        with torch.device("meta"):
            model = cls(HiggsSpec.parse(checkpoint.config()))
        return model.take_weights(
            checkpoint,
            weights,
            lambda: checkpoint.load(model.slots(), ignore=UNREAD),
            device=device,
            dtype=dtype,
            policy=POLICY,
        )

    @property
    def kv_shape(self) -> KVShape:
        config = self.spec.decoder
        _, heads = self._shard.kv_heads(config.num_kv_heads)
        return KVShape(config.num_layers, heads, config.head_dim, self.norm.weight.dtype)

    def embed_ids(self, ids: Tensor) -> Tensor:
        is_audio = (ids[:, :1] == self.spec.placeholder) | (ids[:, :1] == self.spec.delay_placeholder)
        x = torch.where(is_audio, self.audio_embedding(ids[:, 1:]), self.text_embedding(ids[:, :1]))
        return torch.cat([x, is_audio.to(x.dtype)], 1)

    def embed_outputs(self, rows: Tensor) -> Tensor:
        x: Tensor = self.audio_embedding(rows[:, 1:])
        return x

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        config = self.spec.decoder
        if self._rope is None:
            self._rope = Rope(config.rope, config.head_dim, x.device)
        rotation = self._rope(positions, x.dtype)
        is_audio = None if x.shape[1] == config.hidden_size else x[:, config.hidden_size :] > 0
        x, delta = x[:, : config.hidden_size].contiguous(), None
        for layer in self.layers:
            x, delta = layer(x, delta, is_audio, rotation, attend)
        _, normed = self.norm.add(x, delta)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.head).view(-1, self.spec.num_codebooks, self.spec.codebook_size)

    def complete(self, rows: Tensor, hidden: Tensor, requests: Sequence[Request]) -> Tensor:
        steps = torch.tensor([len(request.outputs) for request in requests], device=rows.device)
        ends = torch.tensor([request.frame_end for request in requests], device=rows.device)
        return self.whole_rows(rows, steps, ends)

    def finish_rows(self, ids: Tensor, hidden: Tensor, state: RowState) -> tuple[Tensor, Tensor]:
        steps, ends = state.steps, state.ends
        rows = self.whole_rows(ids, steps, ends)
        ended = (rows[:, 1:] == self.spec.stream_eos_id).any(1)
        return rows, torch.where((ends < 0) & ended, steps, ends)

    def whole_rows(self, codes: Tensor, steps: Tensor, eos_rows: Tensor) -> Tensor:
        """Codes [n, codebooks] as sampled -> output rows [n, 1 + codebooks].

        ``steps`` int64 [n]: outputs so far; ``eos_rows`` int64 [n]: the first of them with an end id, or -1.
        """
        spec = self.spec
        delays = torch.arange(1, self.columns, device=codes.device)
        forced = forced_ids(steps, eos_rows, delays, spec.stream_bos_id, spec.stream_eos_id)
        codes = torch.where(forced >= 0, forced, codes)
        return torch.cat([torch.full_like(codes[:, :1], spec.placeholder), codes], 1)

    def slots(self) -> Iterator[Slot]:
        yield from self.text_embedding.slots("model.embed_tokens")
        yield from self.audio_embedding.slots("model.embed_audio_tokens.embed_audio_tokens")
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, HiggsLayer)
            yield from layer.slots(f"model.layers.{i}")
        yield from self.norm.slots("model.norm")
        yield Slot("audio_lm_head.weight", self.head, tuple(self.head.shape))
