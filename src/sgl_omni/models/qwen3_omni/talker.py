"""The device side of Qwen3-Omni's talker: text and codes so far in, one row of codes out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from sgl_omni.engine.attention import Attend
from sgl_omni.engine.checkpoint import Checkpoint, Slot
from sgl_omni.engine.code_predictor import Choose, CodePredictor, CodeSampling, LostRows, greedy
from sgl_omni.engine.decoder import Decoder
from sgl_omni.engine.kv_cache import KVShape
from sgl_omni.engine.layers import Projection, parameter
from sgl_omni.engine.model import LoadedModel
from sgl_omni.engine.repetition import penalise_requests
from sgl_omni.engine.request import Request
from sgl_omni.engine.row_state import RowState
from sgl_omni.engine.sampler import SamplingBatch
from sgl_omni.engine.weights import SharePolicy, WeightStore
from sgl_omni.models.qwen3_omni.spec import TalkerSpec

_PREDICTOR = CodeSampling(temperature=1.0, top_k=50, top_p=0.8)


class TalkerModel(LoadedModel):
    """Rows of ``num_codes`` ids: the first is chosen from the talker's logits, the others by its code predictor."""

    def __init__(self, spec: TalkerSpec) -> None:
        super().__init__()
        self.spec = spec
        self.columns = spec.num_codes
        self.axes = spec.decoder.rope.num_axes
        self.seen_vocabulary = spec.decoder.vocab_size
        hidden_size, vocabulary = spec.decoder.hidden_size, spec.decoder.vocab_size
        self.decoder = Decoder(spec.decoder)
        self.predictor = CodePredictor(spec.predictor, spec.num_codes - 1)
        self.codec_embedding = parameter(vocabulary, hidden_size)
        self.head = parameter(vocabulary, hidden_size)
        sizes = (spec.thinker_hidden_size, spec.projection_size, hidden_size)
        self.text_projection = Projection(*sizes)
        self.hidden_projection = Projection(*sizes)
        self.text_marks = parameter(3, spec.thinker_hidden_size)
        """The thinker's embeddings of the marks that frame spoken text: begin, end, padding."""

    @classmethod
    def load(
        cls,
        folder: Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        weights: WeightStore | None = None,
        policy: SharePolicy | None = None,
    ) -> TalkerModel:
        """Reads the talker of a whole checkpoint, and three rows of the thinker's embedding.

        Its tensors live where ``weights`` says, in memory of their own by default.
        """
        checkpoint = Checkpoint(folder)
        with torch.device("meta"):
            model = cls(TalkerSpec.parse(checkpoint.config()))
        return model.take_weights(
            checkpoint,
            weights,
            lambda: checkpoint.load(model.slots(), prefix="talker."),
            device=device,
            dtype=dtype,
            policy=policy,
        )

    @torch.inference_mode()
    def marks(self) -> Tensor:
        """Begin, end and padding of spoken text as the talker sees them: [3, hidden]."""
        marks: Tensor = self.text_projection(self.text_marks)
        return marks

    @property
    def kv_shape(self) -> KVShape:
        return self.decoder.kv_shape

    def embed_ids(self, ids: Tensor) -> Tensor:
        return F.embedding(ids[:, 0], self.codec_embedding) + self.predictor.embed(ids[:, 1:])

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        hidden: Tensor = self.decoder(x, positions, attend)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.head)[:, None]

    def rule(self, logits: Tensor, requests: Sequence[Request]) -> Tensor:
        return self.without_specials(penalise_requests(logits, requests))

    def without_specials(self, logits: Tensor) -> Tensor:
        """Logits [..., vocabulary] in which no id is left that is neither a code nor the end."""
        ids = torch.arange(logits.shape[-1], device=logits.device)
        return logits.masked_fill((ids >= self.spec.first_special) & (ids != self.spec.eos_id), float("-inf"))

    def complete(self, rows: Tensor, hidden: Tensor, requests: Sequence[Request]) -> Tensor:
        lost = LostRows(rows)
        choose = lost.noting(_PREDICTOR.of_batch(SamplingBatch.of(requests, rows.device)))
        return lost.mark(self.whole_rows(rows, hidden, choose))

    def rule_rows(self, logits: Tensor, state: RowState) -> Tensor:
        return self.without_specials(state.penalised(logits))

    def finish_rows(self, ids: Tensor, hidden: Tensor, state: RowState) -> tuple[Tensor, None]:
        return self.whole_rows(ids, hidden, _PREDICTOR.of_rows(state)), None

    def whole_rows(self, first: Tensor, hidden: Tensor, choose: Choose = greedy) -> Tensor:
        """First codes int64 [n, 1] and the hidden states [n, hidden] they came from -> rows [n, num_codes]."""
        embedded = F.embedding(first[:, 0], self.codec_embedding)
        return torch.cat([first, self.predictor(hidden, embedded, choose)], 1)

    def slots(self) -> Iterator[Slot]:
        spec = self.spec
        yield from self.decoder.slots("talker.model.")
        yield from self.predictor.slots("talker.code_predictor.")
        yield from self.text_projection.slots("talker.text_projection")
        yield from self.hidden_projection.slots("talker.hidden_projection")
        yield Slot("talker.model.codec_embedding.weight", self.codec_embedding, tuple(self.codec_embedding.shape))
        yield Slot("talker.codec_head.weight", self.head, tuple(self.head.shape))
        table = (spec.thinker_vocab_size, spec.thinker_hidden_size)
        for i, mark in enumerate((spec.tts_bos_id, spec.tts_eos_id, spec.tts_pad_id)):
            yield Slot("thinker.model.embed_tokens.weight", self.text_marks[i : i + 1], table, 0, mark)
