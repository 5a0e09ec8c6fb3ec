"""Runs one step of a model: scheduled chunks in, one row of ids out for each that reached its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sgl_omni.engine.attention import AttentionBackend, AttentionSpan, TorchAttention
from sgl_omni.engine.cross_attention import SourceAttend, SourcePool
from sgl_omni.engine.hidden import collect
from sgl_omni.engine.inserted import layer_rows
from sgl_omni.engine.kv_cache import KVCache
from sgl_omni.engine.model import StepModel
from sgl_omni.engine.request import LOST, Chunk, Request
from sgl_omni.engine.sampler import SamplingBatch, is_no_choice, sample


class Runner(Protocol):
    def run(self, chunks: Sequence[Chunk]) -> list[list[int] | None]:
        """For each chunk the next output's ids, ``LOST`` where its logits are not finite, or none where the prompt is
        not through."""
        ...


class LaunchedStep(Protocol):
    @property
    def owners(self) -> Sequence[tuple[Request, int]]:
        """Whose outputs it yields, and the sequence that each was at then. Repetitions have the same list."""
        ...

    def rows(self) -> npt.NDArray[np.int64]:
        """Waits for the step; ids [owners, columns], which the runner soon writes over."""
        ...

    def read(self) -> list[tuple[Request, list[int]]]:
        """Waits for the step. Requests that have ended since, or gone on to another sequence, are left out."""
        ...


@runtime_checkable
class AheadRunner(Protocol):
    """A runner whose device works on one step while the host launches the next."""

    def launch(self, chunks: Sequence[Chunk]) -> LaunchedStep: ...

    def repeat(self) -> LaunchedStep:
        """The last step again, each request one row further. It had decoding requests only."""
        ...

    def stats(self) -> dict[str, float]: ...


class ModelRunner:
    """Runs all chunks of a step in one forward pass; or, with ``group_rows``, batch-invariantly.

    Matrix products may round differently at different row counts. With ``group_rows`` every product of a decode
    step has exactly that many rows (padding included) and every prompt chunk runs by itself, so a request's
    results do not depend on what else runs, as far as the device's products treat rows alike.
    """

    def __init__(
        self,
        model: StepModel,
        cache: KVCache,
        attention: AttentionBackend | None = None,
        *,
        group_rows: int | None = None,
        sources: SourcePool | None = None,
    ) -> None:
        """``sources``: where a model attends over encoders' outputs, the places of these."""
        self._sources = sources
        self._model = model
        self._cache = cache
        self._attention = attention or TorchAttention()
        self._group_rows = group_rows

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> list[list[int] | None]:
        if self._group_rows is None:
            return self._forward(chunks, sum(chunk.length for chunk in chunks))
        results: list[list[int] | None] = [None] * len(chunks)
        for group, width in _groups(chunks, self._group_rows):
            rows = self._forward([chunks[i] for i in group], width)
            for i, row in zip(group, rows, strict=True):
                results[i] = row
        return results

    def _forward(self, chunks: Sequence[Chunk], width: int) -> list[list[int] | None]:
        """One pass over ``width`` rows, those beyond the chunks' own being padding."""
        model = self._model
        for chunk in chunks if self._sources is not None else ():
            self._sources.admit(chunk.request, model)
        x = model.embed(chunks)
        padding = width - x.shape[0]
        if padding:
            x = torch.cat([x, x.new_zeros(padding, x.shape[1])])
        spans = [AttentionSpan(chunk.start, chunk.stop, chunk.request.pages) for chunk in chunks]
        attend = self._attention.begin(self._cache, spans)
        if self._sources is not None:
            attend = SourceAttend(self._sources, attend, chunks)
        positions, added = self._positions(chunks, padding), layer_rows(chunks, x.device)
        hidden = (
            model.forward(x, positions, attend) if added is None else model.forward_adding(x, positions, attend, added)
        )
        collect(model, hidden, chunks)
        ends = _ends(chunks)
        results: list[list[int] | None] = [None] * len(chunks)
        if not ends:
            return results
        rows = self._next_rows(hidden, list(ends.values()), [chunks[i].request for i in ends], padding)
        for i, row in zip(ends, rows, strict=True):
            results[i] = row
        return results

    def _next_rows(
        self, hidden: Tensor, ends: Sequence[int], requests: Sequence[Request], padding: int
    ) -> list[list[int]]:
        model, n = self._model, len(ends)
        if n + padding < hidden.shape[0]:
            hidden = hidden[torch.tensor(ends, device=hidden.device)]
        logits = model.logits(hidden)[:n]
        is_lost = is_no_choice(logits)
        logits = model.rule(logits, requests)
        rows = model.choose(logits, requests)
        if rows is None:
            rows = sample(logits, SamplingBatch.of(requests, logits.device))
        result: list[list[int]] = model.complete(rows, hidden[:n], requests).masked_fill(is_lost, LOST).tolist()
        return result

    def _positions(self, chunks: Sequence[Chunk], padding: int) -> Tensor:
        """int64 [axes, rows]."""
        if all(chunk.request.prompt.positions is None for chunk in chunks):
            flat = [p for chunk in chunks for p in range(chunk.start, chunk.stop)] + [0] * padding
            return torch.tensor([flat], device=self._cache.device).expand(self._model.axes, -1)
        parts = [_positions(chunk, self._model.axes) for chunk in chunks]
        parts.append(torch.zeros(self._model.axes, padding, dtype=torch.int64))
        return torch.cat(parts, 1).to(self._cache.device)


def _groups(chunks: Sequence[Chunk], rows: int) -> Iterator[tuple[Sequence[int], int]]:
    """Chunks that run together, by their index, and the rows of that pass."""
    decodes = [i for i, chunk in enumerate(chunks) if chunk.is_decode]
    for start in range(0, len(decodes), rows):
        yield decodes[start : start + rows], rows
    for i, chunk in enumerate(chunks):
        if not chunk.is_decode:
            yield [i], chunk.length


def _ends(chunks: Sequence[Chunk]) -> dict[int, int]:
    """Of each chunk that yields an output, by its index, the last of its rows in the pass."""
    ends, row = {}, -1
    for i, chunk in enumerate(chunks):
        row += chunk.length
        if chunk.yields_output:
            ends[i] = row
    return ends


def _positions(chunk: Chunk, axes: int) -> Tensor:
    prompt = chunk.request.prompt
    split = min(chunk.stop, len(prompt))
    after = torch.arange(max(chunk.start, split), chunk.stop) - len(prompt) + prompt.end_position
    if chunk.start >= split:
        return after.expand(axes, -1)
    given = torch.arange(len(prompt))[None] if prompt.positions is None else prompt.positions
    return torch.cat([given[:, chunk.start : split].expand(axes, -1), after.expand(axes, -1)], 1)
