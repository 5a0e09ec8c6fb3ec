"""The device side of CSM: text and frames so far in, one frame of codes out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from sgl_omni.engine.attention import Attend
from sgl_omni.engine.checkpoint import Checkpoint, CheckpointError, Slot
from sgl_omni.engine.code_predictor import Choose, LostRows, greedy
from sgl_omni.engine.decoder import Decoder
from sgl_omni.engine.kv_cache import KVShape
from sgl_omni.engine.layers import Embedding, parameter
from sgl_omni.engine.model import LoadedModel
from sgl_omni.engine.request import Request
from sgl_omni.engine.row_state import RowState
from sgl_omni.engine.sampler import SamplingBatch, sample
from sgl_omni.engine.weights import SharePolicy, WeightStore
from sgl_omni.models.csm.depth import DepthDecoder
from sgl_omni.models.csm.files import ARCHITECTURE, TABLES, UNREAD
from sgl_omni.models.csm.spec import CsmSpec

SHARE_POLICY = SharePolicy(ARCHITECTURE)
_NOT_READ = ("codec_model.*", *UNREAD)


class CsmModel(LoadedModel):
    """Rows of a text id and ``num_codebooks`` codes.

    The backbone chooses a frame's first code, and the depth decoder the others, each by the request's own options. A
    frame's text id says whether it ends the audio: where all codes but the last are the one that means the end.
    """

    embeds_outputs_apart = True

    def __init__(self, spec: CsmSpec) -> None:
        super().__init__()
        self.spec = spec
        self.columns = 1 + spec.num_codebooks
        self.decoder = Decoder(spec.backbone)
        self.depth = DepthDecoder(spec)
        width = spec.backbone.hidden_size
        offsets = [book * spec.vocab_size for book in range(spec.num_codebooks)]
        self.codes = Embedding(spec.num_codebooks * spec.vocab_size, width, offsets)
        self.text = parameter(spec.text_vocab_size, width)
        self.head = parameter(spec.num_codes, width)

    @classmethod
    def load(
        cls,
        folder: Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        weights: WeightStore | None = None,
    ) -> CsmModel:
        """Reads all of a checkpoint but its codec. Raises ``CheckpointError`` for what is missing or ill-shaped."""
        checkpoint = Checkpoint(folder)
        with torch.device("meta"):
            model = cls(CsmSpec.parse(checkpoint.config()))
        tables = [name for name in TABLES if name in checkpoint.names()] or [TABLES[0]]
        return model.take_weights(
            checkpoint,
            weights,
            lambda: model._read(checkpoint, *tables),
            device=device,
            dtype=dtype,
            policy=SHARE_POLICY,
        )

    def _read(self, checkpoint: Checkpoint, table: str, other: str | None = None) -> None:
        """``table`` and ``other``: names on disk of the embeddings of codes. Two that differ are of another model."""
        checkpoint.load(self.slots(table), ignore=_NOT_READ)
        if other is None:
            return
        is_check = self.codes.weight.is_meta
        twin = torch.empty_like(self.codes.weight, device="meta" if is_check else "cpu")
        checkpoint.load([Slot(other, twin, tuple(twin.shape))], prefix=other)
        if not is_check and not torch.equal(twin, self.codes.weight.cpu()):
            raise CheckpointError(f"{checkpoint.folder}: {table} and {other} differ, which is not supported")

    @property
    def kv_shape(self) -> KVShape:
        return self.decoder.kv_shape

    def embed_ids(self, ids: Tensor) -> Tensor:
        first = ids[:, :1]
        is_frame = (first == self.spec.audio_id) | (first == self.spec.audio_end_id)
        return torch.where(is_frame, self.embed_outputs(ids), F.embedding(ids[:, 0], self.text))

    def embed_outputs(self, rows: Tensor) -> Tensor:
        """Outputs are frames, all of them."""
        x: Tensor = self.codes(rows[:, 1:])
        return x

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        hidden: Tensor = self.decoder(x, positions, attend)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Of the frame's first code: [n, 1, codes]."""
        return F.linear(hidden, self.head)[:, None]

    def complete(self, rows: Tensor, hidden: Tensor, requests: Sequence[Request]) -> Tensor:
        batch = SamplingBatch.of(requests, rows.device)
        lost = LostRows(rows)
        choose = lost.noting(lambda logits, book: sample(logits[:, None], batch, book)[:, 0])
        return lost.mark(self.whole_rows(rows, hidden, choose))

    def finish_rows(self, ids: Tensor, hidden: Tensor, state: RowState) -> tuple[Tensor, None]:
        choose = state.choose_own()
        return self.whole_rows(ids, hidden, lambda logits, book: choose(logits[:, None], book)[:, 0]), None

    def whole_rows(self, first: Tensor, hidden: Tensor, choose: Choose = greedy) -> Tensor:
        """First codes int64 [n, 1] and the hidden states [n, hidden] they came from -> rows [n, columns]."""
        codes = self.depth(hidden, first[:, 0], self.codes.weight, choose)
        ends = (codes[:, :-1] == self.spec.end_code).all(1)
        kind = torch.full_like(ends, self.spec.audio_id, dtype=torch.int64).masked_fill(ends, self.spec.audio_end_id)
        return torch.cat([kind[:, None], codes], 1)

    def slots(self, table: str) -> Iterator[Slot]:
        """``table``: the name on disk of the embeddings of codes."""
        spec, width = self.spec, self.spec.backbone.hidden_size
        yield from self.decoder.slots("backbone_model.")
        yield from self.depth.slots("depth_decoder.")
        yield Slot(table, self.codes.weight, tuple(self.codes.weight.shape))
        yield Slot("embed_text_tokens.weight", self.text, tuple(self.text.shape))
        yield Slot("lm_head.weight", self.head, (spec.vocab_size, width))
