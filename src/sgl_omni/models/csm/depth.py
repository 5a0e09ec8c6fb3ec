"""The decoder over the codebooks of one frame: a frame's first code in, the others out, one after another."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sgl_omni.engine.checkpoint import Slot
from sgl_omni.engine.code_predictor import Choose, greedy
from sgl_omni.engine.decoder import Decoder
from sgl_omni.engine.fixed_cache import FixedCache
from sgl_omni.engine.layers import parameter
from sgl_omni.models.csm.spec import CsmSpec


class DepthDecoder(nn.Module):
    """Place 0 of a frame is the backbone's hidden state, place k its code of codebook k - 1; from place k on a head of
    its own says the next code. Codes are embedded by the backbone's table, and all that enters is projected."""

    def __init__(self, spec: CsmSpec) -> None:
        super().__init__()
        self._spec = spec
        self.decoder = Decoder(spec.depth)
        self.projection = parameter(spec.depth.hidden_size, spec.backbone.hidden_size)
        self.heads = parameter(spec.num_codebooks - 1, spec.depth.hidden_size, spec.num_codes)

    def forward(self, hidden: Tensor, first: Tensor, table: Tensor, choose: Choose = greedy) -> Tensor:
        """Codes int64 [n, codebooks], of which ``first`` int64 [n] are given.

        ``hidden`` [n, backbone's width]: what the backbone made of the rows; ``table`` [codebooks * vocabulary, the
        same width]: its embeddings of codes. ``choose`` is asked with the codebook's number.
        """
        n, spec = hidden.shape[0], self._spec
        cache = FixedCache(self.decoder.kv_shape, n, spec.num_codebooks, hidden)
        codes, tables = [first], table.split(spec.vocab_size)
        x = torch.stack([hidden, F.embedding(first, tables[0])], 1)
        for book in range(1, spec.num_codebooks):
            start = 0 if book == 1 else book
            entered = F.linear(x, self.projection).flatten(0, 1)
            out = self.decoder.in_places(entered, cache.at(start, x.shape[1]))
            last = out.unflatten(0, (n, -1))[:, -1]
            codes.append(choose(last @ self.heads[book - 1], book))
            x = F.embedding(codes[-1], tables[book])[:, None]
        return torch.stack(codes, 1)

    def slots(self, prefix: str) -> Iterator[Slot]:
        """``prefix`` ends with a dot."""
        books, width, _ = self.heads.shape
        yield from self.decoder.slots(f"{prefix}model.")
        yield Slot(f"{prefix}model.inputs_embeds_projector.weight", self.projection, tuple(self.projection.shape))
        yield Slot(f"{prefix}codebooks_head.weight", self.heads, (books, width, self._spec.vocab_size), dim=2)
