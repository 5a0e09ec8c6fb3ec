"""The device side of a model: what an engine step asks of it, and where a model puts its own rules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from sgl_omni.engine.attention import Attend
from sgl_omni.engine.checkpoint import Checkpoint, Slot
from sgl_omni.engine.cross_attention import SourceShape
from sgl_omni.engine.decoder import Decoder
from sgl_omni.engine.decoder_config import DecoderConfig
from sgl_omni.engine.delay import DelayPattern
from sgl_omni.engine.hidden import LAST
from sgl_omni.engine.inputs import add_arrived
from sgl_omni.engine.inserted import LayerRows
from sgl_omni.engine.kv_cache import KVShape
from sgl_omni.engine.layers import Embedding, parameter
from sgl_omni.engine.request import Chunk, Request
from sgl_omni.engine.row_state import RowState
from sgl_omni.engine.shard import Shard
from sgl_omni.engine.weights import OwnWeights, SharePolicy, WeightStore, load_module, tensors_of

_RULES = ("rule", "choose", "complete", "rule_rows", "finish_rows")


class StepModel(ABC):
    """One step, in the order of the methods. ``columns`` ids make up a row: 1 for tokens, K for frames."""

    columns: int = 1
    axes: int = 1
    """Axes of the positions."""
    pattern: DelayPattern | None = None
    """Where outputs are frames of codes; on a GPU the step itself fills the pattern's ids in."""

    embeds_outputs_apart: bool = False
    """Whether a step gains where all rows are known to be outputs, so that ``embed_outputs`` is called for them."""

    seen_vocabulary: int = 0
    """Ids of column 0 that device rows remember for ``rule_rows``; 0 for none."""

    seen_prompt: bool = False
    """Whether those of a prompt of ids count among them, or outputs only."""

    kept_shape: tuple[int, ...] = ()
    """Of numbers that device rows keep of each request for ``finish_rows``; empty for none."""

    def begin_kept(self, request: Request) -> Tensor:
        """What they are before the next output of a request, which may have some already: float32 ``kept_shape``."""
        raise NotImplementedError

    @property
    def asks_host(self) -> bool:
        """Whether rules of the model look at requests and have no counterpart for device rows, where it cannot run."""
        own = {name for name in _RULES if getattr(type(self), name) is not getattr(StepModel, name)}
        pairs = (("rule", "rule_rows"), ("complete", "finish_rows"))
        return "choose" in own or any(rule in own and counterpart not in own for rule, counterpart in pairs)

    @property
    @abstractmethod
    def kv_shape(self) -> KVShape: ...

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @property
    def source_shape(self) -> SourceShape | None:
        """Of an encoder's output, where the model attends over one; ``forward`` then gets a ``CrossAttend``."""
        return None

    def source_kv(self, source: Tensor) -> Tensor:
        """Keys and values [layers, 2, frames, kv_heads, head_dim] of an encoder's output [frames, width]."""
        raise NotImplementedError

    def verify_weights(self) -> None:
        """Raises ``WeightShareError`` where shared weights are no longer where they were attached.

        To be called right before a CUDA graph is captured, which remembers their addresses.
        """
        return

    @abstractmethod
    def embed_ids(self, ids: Tensor) -> Tensor:
        """ids int64 [n, columns] -> [n, hidden]."""

    def embed_outputs(self, rows: Tensor) -> Tensor:
        """The same for rows that are all outputs, where a model can do with less."""
        return self.embed_ids(rows)

    def embed(self, chunks: Sequence[Chunk]) -> Tensor:
        """Inputs of all rows of the chunks [n, hidden]: prompts, and outputs with what has arrived for them."""
        return add_arrived(embed_rows(self, chunks), chunks)

    @abstractmethod
    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """x [n, hidden], positions int64 [axes, n] -> hidden states [n, hidden].

        A model that keeps hidden states of layers may return more columns; ``logits`` and ``hidden_state`` know them.
        """

    def forward_adding(self, x: Tensor, positions: Tensor, attend: Attend, added: LayerRows) -> Tensor:
        """``forward`` for a pass whose prompts add rows between layers, where a model takes such prompts."""
        raise NotImplementedError(f"{type(self).__name__} adds nothing between layers")

    def hidden_state(self, hidden: Tensor, layer: int) -> Tensor:
        """Of what ``forward`` returned [n, ...], the columns [n, hidden] of a layer that is kept."""
        assert layer == LAST
        return hidden

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden] -> [n, columns that are sampled, vocabulary]."""

    def rule(self, logits: Tensor, requests: Sequence[Request]) -> Tensor:
        """May change the logits: forbid ids, penalise repetition."""
        return logits

    def choose(self, logits: Tensor, requests: Sequence[Request]) -> Tensor | None:
        """Ids int64 [n, columns] by a sampling of the model's own, or none: the engine's sampler."""
        return None

    def complete(self, rows: Tensor, hidden: Tensor, requests: Sequence[Request]) -> Tensor:
        """The whole rows, where only some columns were sampled: a code predictor's inner loop.

        ``LOST`` in all columns of a row of which one was to be chosen from logits that are not finite.
        """
        return rows

    def rule_rows(self, logits: Tensor, state: RowState) -> Tensor:
        """``rule`` in device rows: a function of tensors alone, whose shapes do not depend on their values."""
        return logits

    def finish_rows(self, ids: Tensor, hidden: Tensor, state: RowState) -> tuple[Tensor, Tensor | None]:
        """``complete`` in device rows, likewise: the sampled ids [s, ...] -> whole rows int64 [s, columns].

        What it samples it samples by `RowState.choose_own` or `choose_by`, which note logits that are not finite.
        And int64 [s] to be kept as ``RowState.ends``, where that is the model's own and not its ``pattern``'s.
        """
        return ids, None


def embed_rows(model: StepModel, chunks: Sequence[Chunk]) -> Tensor:
    """Embeds the ids of prompts and outputs in one go, and puts embeddings that were given in their places."""
    if all(chunk.is_decode for chunk in chunks):
        last = [chunk.request.outputs[chunk.start - chunk.request.prompt_length] for chunk in chunks]
        return model.embed_outputs(torch.tensor(last, device=model.device))
    ids: list[Tensor] = []
    given: list[tuple[int, Tensor]] = []
    inserted: list[tuple[Tensor, Tensor]] = []
    row = 0
    for chunk in chunks:
        request, split = chunk.request, min(chunk.stop, chunk.request.prompt_length)
        if chunk.start < split:
            if request.prompt.ids is not None:
                ids.append(request.prompt.ids[chunk.start : split])
                if request.prompt.inserted is not None:
                    places, rows = request.prompt.inserted.rows_between(chunk.start, split)
                    inserted.append((places + row, rows))
            else:
                given.append((row, request.prompt.rows[chunk.start : split]))
                ids.append(torch.zeros(split - chunk.start, model.columns, dtype=torch.int64))
        if chunk.stop > split:
            first = max(chunk.start, split) - request.prompt_length
            outputs = request.outputs.array(first, chunk.stop - request.prompt_length)
            ids.append(torch.from_numpy(outputs).to(torch.int64))
        row += chunk.length
    x = model.embed_ids(torch.cat(ids).to(model.device))
    for start, rows in given:
        x[start : start + rows.shape[0]] = rows.to(x)
    for places, rows in inserted:
        x[places.to(x.device)] = rows.to(x)
    return x


class LoadedModel(nn.Module, StepModel):
    """A step model whose tensors come from a checkpoint, or from a replica that has read it."""

    _weights: WeightStore = OwnWeights()

    def take_weights(
        self,
        checkpoint: Checkpoint,
        weights: WeightStore | None,
        read: Callable[[], None],
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        policy: SharePolicy | None,
    ) -> Self:
        """Gives a model that was built on the meta device its tensors, which live where ``weights`` says, by default in
        memory of their own. ``read`` fills all of them, where nobody has yet, and before that is called once to check
        them (see ``load_module``)."""
        self._weights = weights or OwnWeights()
        load_module(
            self,
            self._weights,
            read,
            device=device,
            dtype=dtype,
            policy=policy,
            fingerprint=checkpoint.fingerprint(),
        )
        return self.eval()

    def verify_weights(self) -> None:
        self._weights.verify(tensors_of(self))

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device


class CausalModel(LoadedModel):
    """Embedding, decoder and one head a column over a table of ids; a plain language model with one column."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        columns: int = 1,
        column_offsets: Sequence[int] = (0,),
        embedding_rows: int | None = None,
        head_size: int | None = None,
        pattern: DelayPattern | None = None,
        shard: Shard | None = None,
        kept_layers: Sequence[int] = (),
    ) -> None:
        """``column_offsets``: where each column's ids begin in the table. Table and head default to the vocabulary.

        ``kept_layers``: layers whose inputs can be asked for as hidden states, beside the last.
        """
        super().__init__()
        self.config = config
        self.columns = columns
        self.axes = config.rope.num_axes
        self.pattern = pattern
        self.embedding = Embedding(embedding_rows or config.vocab_size, config.hidden_size, column_offsets)
        self.decoder = Decoder(config, shard, kept_layers)
        tied = config.tied_embeddings
        self.head = None if tied else parameter(columns * (head_size or config.vocab_size), config.hidden_size)

    @classmethod
    def load(
        cls,
        folder: Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        prefix: str = "model.",
        head: str = "lm_head",
        config: DecoderConfig | None = None,
        within: str = "",
        kept_layers: Sequence[int] = (),
        weights: WeightStore | None = None,
        policy: SharePolicy | None = None,
        shard: Shard | None = None,
    ) -> CausalModel:
        """Reads a checkpoint whose decoder lies below ``prefix`` and whose head is ``<head>.weight``; of its layers
        this ``shard``'s part, by default the whole. Raises ``StartupError`` where they cannot be divided so.

        Of a larger checkpoint, ``config`` is the decoder's and all tensors ``within`` are the model's. Its tensors live
        where ``weights`` says, in memory of their own by default; ``policy`` is asked for where replicas share them.
        """
        checkpoint = Checkpoint(folder)
        with torch.device("meta"):
            model = cls(config or DecoderConfig.parse(checkpoint.config()), kept_layers=kept_layers, shard=shard)
        ignore = ["*.rotary_emb.inv_freq"] + [f"{head}.weight"] * model.config.tied_embeddings
        return model.take_weights(
            checkpoint,
            weights,
            lambda: checkpoint.load(model.slots(prefix, head), prefix=within, ignore=ignore),
            device=device,
            dtype=dtype,
            policy=policy,
        )

    @property
    def kv_shape(self) -> KVShape:
        return self.decoder.kv_shape

    def embed_ids(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embedding(ids)
        return x

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        hidden: Tensor = self.decoder(x, positions, attend)
        return hidden

    def forward_adding(self, x: Tensor, positions: Tensor, attend: Attend, added: LayerRows) -> Tensor:
        hidden: Tensor = self.decoder(x, positions, attend, added)
        return hidden

    @property
    def kept_layers(self) -> tuple[int, ...]:
        """What ``hidden_state`` can be asked for."""
        return (LAST, *self.decoder.kept_layers)

    def hidden_state(self, hidden: Tensor, layer: int) -> Tensor:
        start = self.kept_layers.index(layer) * self.config.hidden_size
        return hidden[:, start : start + self.config.hidden_size]

    def logits(self, hidden: Tensor) -> Tensor:
        weight = self.embedding.weight if self.head is None else self.head
        return nn.functional.linear(self.hidden_state(hidden, LAST), weight).unflatten(-1, (self.columns, -1))

    def slots(self, prefix: str, head: str) -> Iterator[Slot]:
        yield from self.embedding.slots(f"{prefix}{self.config.names.embedding}")
        yield from self.decoder.slots(prefix)
        if self.head is not None:
            yield Slot(f"{head}.weight", self.head, tuple(self.head.shape))
