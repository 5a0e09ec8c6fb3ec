"""What prompts bring to a pass besides ids: for rows that have it, or for every row, as a captured step reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sgl_omni.engine.inserted import LayerRows


class GivenInputs(Protocol):
    @property
    def between(self) -> LayerRows | None:
        """What is added between layers."""
        ...

    def into(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs [n, hidden] and positions int64 [axes, n] of a pass with what is given in its place."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """Embeddings [m, hidden] for the rows ``at`` int64 [m]; positions int64 [axes, n] of all rows, -1 where not given.

    ``added`` [k, hidden] for the rows ``added_at`` int64 [k]: what had arrived for outputs that are run again.
    """

    at: Tensor | None = None
    embeddings: Tensor | None = None
    positions: Tensor | None = None
    added_at: Tensor | None = None
    added: Tensor | None = None
    between: LayerRows | None = None

    def into(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self.at is not None and self.embeddings is not None:
            x = x.index_copy(0, self.at, self.embeddings.to(x.dtype))
        if self.added_at is not None and self.added is not None:
            x = x.index_add(0, self.added_at, self.added.to(x.dtype))
        return x, positions if self.positions is None else torch.where(self.positions >= 0, self.positions, positions)


@dataclass(frozen=True, slots=True, eq=False)
class _Dense:
    """Of the first rows of ``GivenRows``."""

    is_given: Tensor
    embeddings: Tensor
    added: Tensor
    positions: Tensor
    between: LayerRows | None = None

    def into(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.where(self.is_given, self.embeddings, x) + self.added
        return x, torch.where(self.positions >= 0, self.positions, positions)


class GivenRows:
    """The same for up to so many rows in tensors that stay where they are, so that a captured step can read them."""

    def __init__(self, rows: int, axes: int, like: Tensor) -> None:
        """``like`` [1, hidden]: of the kind and on the device that inputs are."""
        self._is_given = torch.zeros(rows, 1, dtype=torch.bool, device=like.device)
        self._embeddings = like.new_zeros(rows, like.shape[1])
        self._added = like.new_zeros(rows, like.shape[1])
        self._positions = torch.full((axes, rows), -1, dtype=torch.int64, device=like.device)
        self._holds = False

    def of(self, n: int) -> GivenInputs:
        return _Dense(self._is_given[:n], self._embeddings[:n], self._added[:n], self._positions[:, :n])

    def put(self, given: Given | None) -> None:
        """Takes what the next pass brings, instead of what was there; nothing between layers can be among it."""
        if self._holds:
            self._is_given.zero_()
            self._added.zero_()
            self._positions.fill_(-1)
        self._holds = given is not None
        if given is None:
            return
        assert given.between is None, "a captured step adds nothing between layers"
        if given.at is not None and given.embeddings is not None:
            self._embeddings.index_copy_(0, given.at, given.embeddings.to(self._embeddings.dtype))
            self._is_given.index_fill_(0, given.at, True)
        if given.added_at is not None and given.added is not None:
            self._added.index_copy_(0, given.added_at, given.added.to(self._added.dtype))
        if given.positions is not None:
            self._positions[:, : given.positions.shape[1]] = given.positions
