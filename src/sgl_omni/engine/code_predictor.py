"""A small decoder that completes a row of codes, one code after another, within a step of the large one.

All requests of the step run together. Shapes depend on the number of rows alone and nothing is decided on the host,
so that the loop can be a part of a captured graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sgl_omni.engine.checkpoint import Slot
from sgl_omni.engine.decoder import Decoder
from sgl_omni.engine.decoder_config import DecoderConfig
from sgl_omni.engine.fixed_cache import FixedCache
from sgl_omni.engine.layers import parameter
from sgl_omni.engine.request import LOST
from sgl_omni.engine.row_state import RowState
from sgl_omni.engine.sampler import SamplingBatch, is_no_choice, sample
from sgl_omni.engine.shard import Shard

Choose = Callable[[Tensor, int], Tensor]
"""Logits [n, vocabulary] of the code at an index of the loop -> ids int64 [n]."""


def greedy(logits: Tensor, index: int) -> Tensor:
    return logits.argmax(-1)


class LostRows:
    """The rows of which a code was to be chosen from logits that are not finite; the loop goes on with some code."""

    def __init__(self, like: Tensor) -> None:
        """``like`` [n, ...]: on the device and of as many rows."""
        self._lost = torch.zeros(like.shape[0], 1, dtype=torch.bool, device=like.device)

    def noting(self, choose: Choose) -> Choose:
        def noted(logits: Tensor, index: int) -> Tensor:
            self._lost |= is_no_choice(logits[:, None])
            return choose(logits, index)

        return noted

    def mark(self, rows: Tensor) -> Tensor:
        """Whole rows int64 [n, columns], ``LOST`` in all columns of these."""
        return rows.masked_fill(self._lost, LOST)


@dataclass(frozen=True, slots=True)
class CodeSampling:
    """How the predictor draws, whatever the large decoder's own options are; only greedy requests stay greedy."""

    temperature: float
    top_k: int
    top_p: float

    def of_batch(self, batch: SamplingBatch) -> Choose:
        if len(batch.random) == 0 or self.temperature == 0:
            return greedy
        own = replace(
            batch,
            temperature=torch.full_like(batch.temperature, self.temperature),
            top_k=torch.full_like(batch.top_k, self.top_k),
            top_p=torch.full_like(batch.top_p, self.top_p),
        )
        return lambda logits, index: sample(logits[:, None], own, 1 + index)[:, 0]

    def of_rows(self, state: RowState) -> Choose:
        choose = state.choose_by(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)
        return lambda logits, index: choose(logits[:, None], 1 + index)[:, 0]


class CodePredictor(nn.Module):
    """``num_codes`` codes a row, each with a head of its own, and an embedding of its own that the next one sees.

    Where the large decoder is of another width, ``input_size``, embeddings are of that width too, and whatever enters
    the small one is projected.
    """

    def __init__(
        self, config: DecoderConfig, num_codes: int, shard: Shard | None = None, *, input_size: int | None = None
    ) -> None:
        super().__init__()
        width = input_size or config.hidden_size
        self.num_codes = num_codes
        self.decoder = Decoder(config, shard)
        self.embedding = parameter(num_codes, config.vocab_size, width)
        self.heads = parameter(num_codes, config.vocab_size, config.hidden_size)
        projects = width != config.hidden_size
        self.projection = parameter(config.hidden_size, width) if projects else None
        self.projection_bias = parameter(config.hidden_size) if projects else None

    def forward(self, hidden: Tensor, first: Tensor, choose: Choose = greedy) -> Tensor:
        """Codes int64 [n, num_codes].

        ``hidden`` [n, width]: what the large decoder made of the rows' inputs; ``first`` [n, width]: the embedding
        of the code that was chosen from it.
        """
        n = hidden.shape[0]
        cache = FixedCache(self.decoder.kv_shape, n, 1 + self.num_codes, hidden)
        x, codes = self._own_width(torch.stack([hidden, first], 1)), []
        for index in range(self.num_codes):
            start = 0 if index == 0 else 1 + index
            out = self.decoder.in_places(x.flatten(0, 1), cache.at(start, x.shape[1]))
            last = out.unflatten(0, (n, -1))[:, -1]
            codes.append(choose(F.linear(last, self.heads[index]), index))
            x = self._own_width(F.embedding(codes[-1], self.embedding[index])[:, None])
        return torch.stack(codes, 1)

    def _own_width(self, x: Tensor) -> Tensor:
        return x if self.projection is None else F.linear(x, self.projection, self.projection_bias)

    def embed(self, codes: Tensor) -> Tensor:
        """Codes int64 [n, num_codes] -> the sum of their embeddings [n, width]."""
        _, vocabulary, width = self.embedding.shape
        offsets = torch.arange(self.num_codes, device=codes.device) * vocabulary
        return F.embedding(codes + offsets, self.embedding.view(-1, width)).sum(1)

    def slots(self, prefix: str) -> Iterator[Slot]:
        """``prefix`` ends with a dot, e.g. ``talker.code_predictor.``."""
        yield from self.decoder.slots(f"{prefix}model.")
        for i in range(self.num_codes):
            yield Slot(f"{prefix}model.codec_embedding.{i}.weight", self.embedding[i], tuple(self.embedding.shape[1:]))
            yield Slot(f"{prefix}lm_head.{i}.weight", self.heads[i], tuple(self.heads.shape[1:]))
        if self.projection is not None and self.projection_bias is not None:
            name = f"{prefix}small_to_mtp_projection"
            yield Slot(f"{name}.weight", self.projection, tuple(self.projection.shape))
            yield Slot(f"{name}.bias", self.projection_bias, tuple(self.projection_bias.shape))
