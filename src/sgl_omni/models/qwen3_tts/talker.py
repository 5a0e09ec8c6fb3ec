"""The device side of Qwen3-TTS's talker: text and codes so far in, one frame of codes out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from sgl_omni.engine.attention import Attend
from sgl_omni.engine.checkpoint import Checkpoint, Slot
from sgl_omni.engine.code_predictor import Choose, CodePredictor, CodeSampling, LostRows
from sgl_omni.engine.decoder import Decoder
from sgl_omni.engine.kv_cache import KVShape
from sgl_omni.engine.layers import Projection, parameter
from sgl_omni.engine.model import LoadedModel
from sgl_omni.engine.repetition import penalise_requests
from sgl_omni.engine.request import Request
from sgl_omni.engine.row_state import RowState
from sgl_omni.engine.sampler import SamplingBatch
from sgl_omni.engine.weights import SharePolicy, WeightStore
from sgl_omni.models.qwen3_tts.facts import ARCHITECTURE
from sgl_omni.models.qwen3_tts.spec import TalkerSpec

LEAST_FRAMES = 2
"""The end may not be said before."""

POLICY = SharePolicy(ARCHITECTURE)


class TalkerModel(LoadedModel):
    """Rows of ``num_codes`` ids: the first is chosen from the talker's logits, the others by its code predictor."""

    def __init__(self, spec: TalkerSpec, predictor_sampling: CodeSampling) -> None:
        super().__init__()
        self.spec = spec
        self.columns = spec.num_codes
        self.seen_vocabulary = spec.decoder.vocab_size
        hidden_size, vocabulary = spec.decoder.hidden_size, spec.decoder.vocab_size
        self.decoder = Decoder(spec.decoder)
        self.predictor = CodePredictor(spec.predictor, spec.num_codes - 1, input_size=hidden_size)
        self.codec_embedding = parameter(vocabulary, hidden_size)
        self.head = parameter(vocabulary, hidden_size)
        self.text_embedding = parameter(spec.text_vocab_size, spec.text_hidden_size)
        self.text_projection = Projection(spec.text_hidden_size, spec.text_hidden_size, hidden_size)
        self._predictor_sampling = predictor_sampling

    @classmethod
    def load(
        cls,
        folder: Path,
        predictor_sampling: CodeSampling,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        weights: WeightStore | None = None,
    ) -> TalkerModel:
        """Reads the talker of a checkpoint. Its tensors live where ``weights`` says, by default in its own memory.

        Raises ``StartupError`` for a config that says something else, ``CheckpointError`` for such weights.
        """
        checkpoint = Checkpoint(folder)
        with torch.device("meta"):
            model = cls(TalkerSpec.parse(checkpoint.config()), predictor_sampling)
        return model.take_weights(
            checkpoint,
            weights,
            lambda: checkpoint.load(model.slots(), prefix="talker."),
            device=device,
            dtype=dtype,
            policy=POLICY,
        )

    @property
    def kv_shape(self) -> KVShape:
        return self.decoder.kv_shape

    def embed_text(self, ids: Sequence[int]) -> Tensor:
        """Tokens of text as the talker sees them: [n, hidden]."""
        embedded = F.embedding(torch.tensor(ids, dtype=torch.int64, device=self.device), self.text_embedding)
        projected: Tensor = self.text_projection(embedded)
        return projected

    def embed_codec(self, ids: Sequence[int]) -> Tensor:
        """Ids of the talker's own vocabulary: [n, hidden]."""
        return F.embedding(torch.tensor(ids, dtype=torch.int64, device=self.device), self.codec_embedding)

    def embed_ids(self, ids: Tensor) -> Tensor:
        return F.embedding(ids[:, 0], self.codec_embedding) + self.predictor.embed(ids[:, 1:])

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        hidden: Tensor = self.decoder(x, positions, attend)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.head)[:, None]

    def rule(self, logits: Tensor, requests: Sequence[Request]) -> Tensor:
        logits = penalise_requests(logits, requests)
        steps = torch.tensor([len(request.outputs) for request in requests], device=logits.device)
        return self.allowed(logits, steps)

    def complete(self, rows: Tensor, hidden: Tensor, requests: Sequence[Request]) -> Tensor:
        lost = LostRows(rows)
        choose = lost.noting(self._predictor_sampling.of_batch(SamplingBatch.of(requests, rows.device)))
        return lost.mark(self.whole_rows(rows, hidden, choose))

    def rule_rows(self, logits: Tensor, state: RowState) -> Tensor:
        return self.allowed(state.penalised(logits), state.steps)

    def finish_rows(self, ids: Tensor, hidden: Tensor, state: RowState) -> tuple[Tensor, None]:
        return self.whole_rows(ids, hidden, self._predictor_sampling.of_rows(state)), None

    def allowed(self, logits: Tensor, steps: Tensor) -> Tensor:
        """Logits [n, 1, vocabulary] of which codes are left, and the end where int64 ``steps`` [n] are enough."""
        ids = torch.arange(logits.shape[-1], device=logits.device)
        is_end = ids == self.spec.eos_id
        forbidden = ((ids >= self.spec.first_special) & ~is_end) | (is_end & (steps < LEAST_FRAMES)[:, None, None])
        return logits.masked_fill(forbidden, float("-inf"))

    def whole_rows(self, first: Tensor, hidden: Tensor, choose: Choose) -> Tensor:
        """First codes int64 [n, 1] and the hidden states [n, hidden] they came from -> rows [n, num_codes]."""
        embedded = F.embedding(first[:, 0], self.codec_embedding)
        # The end is no code, and what would follow it is thrown away; its embedding is as good as any.
        return torch.cat([first, self.predictor(hidden, embedded, choose)], 1)

    def slots(self) -> Iterator[Slot]:
        yield from self.decoder.slots("talker.model.")
        yield from self.predictor.slots("talker.code_predictor.")
        yield from self.text_projection.slots("talker.text_projection")
        for name, tensor in (
            ("talker.model.codec_embedding", self.codec_embedding),
            ("talker.model.text_embedding", self.text_embedding),
            ("talker.codec_head", self.head),
        ):
            yield Slot(f"{name}.weight", tensor, tuple(tensor.shape))
