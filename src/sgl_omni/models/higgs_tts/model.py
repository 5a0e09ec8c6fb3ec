"""The device side of Higgs TTS 3: a Qwen3 decoder between one table of all codebooks' ids and the same table as head.

A row is [1 + codebooks] ids: a text id and codes that do not matter, or ``AUDIO`` and the codes of an audio row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from sgl_omni.engine.attention import Attend
from sgl_omni.engine.checkpoint import Checkpoint, Slot
from sgl_omni.engine.decoder import Decoder
from sgl_omni.engine.kv_cache import KVShape
from sgl_omni.engine.layers import Embedding, parameter
from sgl_omni.engine.model import LoadedModel
from sgl_omni.engine.request import Request
from sgl_omni.engine.row_state import RowState
from sgl_omni.engine.weights import SharePolicy, WeightStore
from sgl_omni.models.higgs_tts.checkpoint import CODEC_PREFIX
from sgl_omni.models.higgs_tts.spec import HiggsTts3Spec

AUDIO = -1
"""In the place of a text id: this row is codes."""

POLICY = SharePolicy("HiggsMultimodalQwen3ForConditionalGeneration")


class HiggsTts3Model(LoadedModel):
    """Text and audio rows in, logits [n, codebooks, codebook_size] out."""

    embeds_outputs_apart = True

    def __init__(self, spec: HiggsTts3Spec) -> None:
        super().__init__()
        self.spec = spec
        self.columns = 1 + spec.num_codebooks
        config = spec.decoder
        offsets = [k * spec.codebook_size for k in range(spec.num_codebooks)]
        rows = spec.num_codebooks * spec.codebook_size
        self.text_embedding = Embedding(config.vocab_size, config.hidden_size)
        self.audio_embedding = Embedding(rows, config.hidden_size, offsets)
        self.decoder = Decoder(config)
        self.head = None if spec.tied else parameter(rows, config.hidden_size)

    @classmethod
    def load(
        cls,
        folder: Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        weights: WeightStore | None = None,
    ) -> HiggsTts3Model:
        """Reads a checkpoint without the audio tokenizer that it holds too.

        Its tensors live where ``weights`` says, in memory of their own by default.
        """
        checkpoint = Checkpoint(folder)
        with torch.device("meta"):
            model = cls(HiggsTts3Spec.parse(checkpoint.config()))
        ignored = [f"{CODEC_PREFIX}*", "*.rotary_emb.inv_freq", *["tied.head.*"] * model.spec.tied]
        return model.take_weights(
            checkpoint,
            weights,
            lambda: checkpoint.load(model.slots(), ignore=ignored),
            device=device,
            dtype=dtype,
            policy=POLICY,
        )

    @property
    def kv_shape(self) -> KVShape:
        return self.decoder.kv_shape

    def embed_ids(self, ids: Tensor) -> Tensor:
        text = self.text_embedding(ids[:, :1].clamp(min=0))
        return torch.where(ids[:, :1] == AUDIO, self.audio_embedding(ids[:, 1:]), text)

    def embed_outputs(self, rows: Tensor) -> Tensor:
        x: Tensor = self.audio_embedding(rows[:, 1:])
        return x

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        hidden: Tensor = self.decoder(x, positions, attend)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        weight = self.audio_embedding.weight if self.head is None else self.head
        return F.linear(hidden, weight).view(-1, self.spec.num_codebooks, self.spec.codebook_size)

    def complete(self, rows: Tensor, hidden: Tensor, requests: Sequence[Request]) -> Tensor:
        steps = torch.tensor([len(request.outputs) for request in requests], device=rows.device)
        return self.whole_rows(rows, steps)

    def finish_rows(self, ids: Tensor, hidden: Tensor, state: RowState) -> tuple[Tensor, Tensor]:
        return self.whole_rows(ids, state.steps), state.ends

    def whole_rows(self, codes: Tensor, steps: Tensor) -> Tensor:
        """Codes [n, codebooks] as sampled -> output rows [n, 1 + codebooks].

        ``steps`` int64 [n]: outputs so far. Codebook k begins in row k; before, it holds the begin id. After the end
        the model goes on as it likes, until the last frame is complete.
        """
        waiting = torch.arange(self.spec.num_codebooks, device=codes.device) > steps[:, None]
        codes = torch.where(waiting, self.spec.stream_bos_id, codes)
        return torch.cat([torch.full_like(codes[:, :1], AUDIO), codes], 1)

    def slots(self) -> Iterator[Slot]:
        yield from self.text_embedding.slots("tied.embedding.text_embedding")
        yield from self.audio_embedding.slots("tied.embedding.modality_embeddings.0.embedding")
        yield from self.decoder.slots("body.")
        if self.head is not None:
            yield Slot("tied.head.modality_heads.0.weight", self.head, tuple(self.head.shape))
