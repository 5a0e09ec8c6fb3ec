"""The device side of MOSS-TTS-Local: text and frames so far in, one frame of codes out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from sgl_omni.engine.attention import Attend
from sgl_omni.engine.checkpoint import Checkpoint, Slot
from sgl_omni.engine.code_predictor import Choose, LostRows, greedy
from sgl_omni.engine.decoder import Decoder
from sgl_omni.engine.kv_cache import KVShape
from sgl_omni.engine.layers import Embedding, parameter
from sgl_omni.engine.model import LoadedModel
from sgl_omni.engine.request import Request
from sgl_omni.engine.row_state import RowState
from sgl_omni.engine.sampler import SamplingBatch, sample
from sgl_omni.engine.weights import SharePolicy, WeightStore
from sgl_omni.models.moss_tts_local.files import UNREAD
from sgl_omni.models.moss_tts_local.local_transformer import LocalTransformer
from sgl_omni.models.moss_tts_local.spec import MossSpec

SHARE_POLICY = SharePolicy("MossTTSLocalModel")
_CONTINUE = 0
"""Of the two outcomes of the decision, the one that another frame follows."""


class MossModel(LoadedModel):
    """Rows of a text id and ``num_codebooks`` codes.

    A step's hidden state begins a frame: the local transformer turns it into the decision whether there is another
    frame, and into the first code; each code then makes the next. The text id of a row is the decision: the slot of
    a frame, or the end. Embeddings are also the heads of their codes.
    """

    def __init__(self, spec: MossSpec) -> None:
        super().__init__()
        self.spec = spec
        self.columns = 1 + spec.num_codebooks
        self.decoder = Decoder(spec.decoder)
        self.local = LocalTransformer(spec.local)
        self.embedding = Embedding(spec.table_rows, spec.decoder.hidden_size, spec.column_offsets)
        self.decision = parameter(2, spec.decoder.hidden_size)

    @classmethod
    def load(
        cls,
        folder: Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        weights: WeightStore | None = None,
    ) -> MossModel:
        """Reads a checkpoint. Heads, which equal the embeddings, are left on disk if they are there."""
        checkpoint = Checkpoint(folder)
        with torch.device("meta"):
            model = cls(MossSpec.parse(checkpoint.config()))

        def read() -> None:
            checkpoint.load(model.slots(), ignore=UNREAD)
            for book in range(model.spec.num_codebooks):
                model._codes(book, with_pad=True)[-1].zero_()

        return model.take_weights(checkpoint, weights, read, device=device, dtype=dtype, policy=SHARE_POLICY)

    @property
    def kv_shape(self) -> KVShape:
        return self.decoder.kv_shape

    def embed_ids(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embedding(ids)
        return x

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        hidden: Tensor = self.decoder(x, positions, attend)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Of the frame's first code: [n, 1, codebook_size]."""
        begun = self.local(hidden[:, None], self.local.cache(1, hidden))[:, 0]
        return F.linear(begun, self._codes(0))[:, None]

    def complete(self, rows: Tensor, hidden: Tensor, requests: Sequence[Request]) -> Tensor:
        batch, lost = SamplingBatch.of(requests, rows.device), LostRows(rows)
        plain = replace(
            batch,
            temperature=torch.ones_like(batch.temperature),
            top_k=torch.zeros_like(batch.top_k),
            top_p=torch.ones_like(batch.top_p),
        )
        found = self.whole_rows(
            rows,
            hidden,
            lost.noting(lambda logits, book: sample(logits[:, None], batch, book)[:, 0]),
            lost.noting(lambda logits, column: sample(logits[:, None], plain, column)[:, 0]),
        )
        return lost.mark(found)

    def finish_rows(self, ids: Tensor, hidden: Tensor, state: RowState) -> tuple[Tensor, None]:
        choose, decide = state.choose_own(), state.choose_by(temperature=1.0, top_k=0, top_p=1.0)
        rows = self.whole_rows(
            ids,
            hidden,
            lambda logits, book: choose(logits[:, None], book)[:, 0],
            lambda logits, column: decide(logits[:, None], column)[:, 0],
        )
        return rows, None

    def whole_rows(self, first: Tensor, hidden: Tensor, choose: Choose = greedy, decide: Choose = greedy) -> Tensor:
        """First codes int64 [n, 1] and the hidden states [n, hidden] they came from -> rows [n, columns].

        ``choose`` is asked for the code of each further codebook, ``decide`` for the decision, whose draw has the
        number after the codebooks'.
        """
        spec = self.spec
        cache = self.local.cache(max(2, spec.num_codebooks), hidden)
        codes = [first[:, 0]]
        out = self.local(torch.stack([hidden, self._embedded(codes[0], 0)], 1), cache)
        decision = decide(F.linear(out[:, 0], self.decision), spec.num_codebooks)
        last = out[:, 1]
        for book in range(1, spec.num_codebooks):
            codes.append(choose(F.linear(last, self._codes(book)), book))
            if book + 1 < spec.num_codebooks:
                last = self.local(self._embedded(codes[-1], book)[:, None], cache, book + 1)[:, 0]
        slot, end = torch.full_like(decision, spec.slot_id), torch.full_like(decision, spec.end_id)
        return torch.stack([torch.where(decision == _CONTINUE, slot, end), *codes], 1)

    def slots(self) -> Iterator[Slot]:
        spec, table = self.spec, self.embedding.weight
        text = (spec.decoder.vocab_size, spec.decoder.hidden_size)
        yield from self.decoder.slots("transformer.")
        yield from self.local.slots("local_transformer.")
        yield Slot("transformer.embed_tokens.weight", table[: spec.decoder.vocab_size], text)
        for book in range(spec.num_codebooks):
            codes = self._codes(book)
            yield Slot(f"audio_embeddings.{book}.weight", codes, tuple(codes.shape))
        if spec.binary_decision:
            yield Slot("local_text_lm_head.weight", self.decision, tuple(self.decision.shape))
            return
        for i, outcome in enumerate((spec.slot_id, spec.end_id)):
            yield Slot("transformer.embed_tokens.weight", self.decision[i : i + 1], text, 0, outcome)

    def _codes(self, book: int, *, with_pad: bool = False) -> Tensor:
        """A codebook's embeddings [codebook_size, hidden]."""
        start = self.spec.column_offsets[1 + book]
        return self.embedding.weight[start : start + self.spec.codebook_size + with_pad]

    def _embedded(self, codes: Tensor, book: int) -> Tensor:
        return F.embedding(codes, self._codes(book))
