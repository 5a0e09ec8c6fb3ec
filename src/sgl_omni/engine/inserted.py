"""Rows of a prompt that another stage made: they stand in the places of ids, and some are added between layers too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sgl_omni.errors import InvalidRequest, NotFinite

if TYPE_CHECKING:
    from sgl_omni.engine.request import Chunk


class LayerRows(NamedTuple):
    """What is added between layers in one pass: ``rows`` [levels, k, hidden] to the pass's rows ``at`` int64 [k].

    Level i is added to what layer i hands on.
    """

    at: Tensor
    rows: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Inserted:
    """``rows`` [m, hidden] stand at the prompt's places ``at`` int64 [m] instead of what their ids say.

    ``layered`` [levels, k, hidden] are added between layers at the places ``layered_at`` int64 [k]. Places ascend.
    ``tags`` int64 [m], if any, say of each inserted row and of all that is added at its place what they were made of,
    so that pages are known by them and not by the many numbers in the rows.
    """

    at: Tensor
    rows: Tensor
    layered_at: Tensor
    layered: Tensor
    tags: Tensor | None = None

    def check(self, length: int) -> None:
        """Raises ``InvalidRequest`` where this does not fit a prompt of so many rows, and ``NotFinite``."""
        for places, rows, name in (
            (self.at, self.rows, "inserted_embeddings"),
            (self.layered_at, self.layered, "layered_embeddings"),
        ):
            if places.dim() != 1 or places.shape[0] != rows.shape[-2]:
                raise InvalidRequest(f"{name} must have one row a place, not {[*rows.shape]}", param=name)
            ascends = bool((places[1:] > places[:-1]).all())
            if len(places) and not (ascends and int(places[0]) >= 0 and int(places[-1]) < length):
                raise InvalidRequest(f"the places of {name} must ascend within the prompt's {length} rows", param=name)
            if not bool(torch.isfinite(rows).all()):
                raise NotFinite(f"{name} are")
        if self.tags is not None and self.tags.shape != self.at.shape:
            raise InvalidRequest(f"inserted_tags must be one a place, not {[*self.tags.shape]}", param="inserted_tags")

    def rows_between(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Of the prompt's rows ``start`` to ``stop``: places int64 [n] counted from ``start``, and their rows."""
        return _between(self.at, start, stop), self.rows[_part(self.at, start, stop)]

    def layered_between(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Likewise what is added between layers: places int64 [n], and rows [levels, n, hidden]."""
        return _between(self.layered_at, start, stop), self.layered[:, _part(self.layered_at, start, stop)]

    def content(self, start: int, stop: int) -> list[Tensor]:
        """All that tells the prompt's rows ``start`` to ``stop`` from others, for a hash."""
        if self.tags is not None:
            tags = self.tags[_part(self.at, start, stop)]
            return [_between(self.at, start, stop), tags, _between(self.layered_at, start, stop)]
        return [*self.rows_between(start, stop), *self.layered_between(start, stop)]


def layer_rows(chunks: Sequence[Chunk], device: torch.device, first: int = 0) -> LayerRows | None:
    """What the prompts of a pass add between layers, if anything; the chunks' rows begin at row ``first`` of it."""
    places: list[Tensor] = []
    parts: list[Tensor] = []
    at = first
    for chunk in chunks:
        inserted = chunk.request.prompt.inserted
        if inserted is not None:
            own, rows = inserted.layered_between(chunk.start, chunk.stop)
            if len(own):
                places.append(own + at)
                parts.append(rows.to(device))
        at += chunk.length
    return LayerRows(torch.cat(places).to(device), torch.cat(parts, 1)) if places else None


def _between(places: Tensor, start: int, stop: int) -> Tensor:
    return places[_part(places, start, stop)] - start


def _part(places: Tensor, start: int, stop: int) -> slice:
    low, high = torch.searchsorted(places, torch.tensor([start, stop])).tolist()
    return slice(low, high)
