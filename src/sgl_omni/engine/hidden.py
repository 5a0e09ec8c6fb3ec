"""Hidden states on demand: what a request's rows looked like inside the model, for a stage that goes on from there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sgl_omni.errors import InvalidRequest

if TYPE_CHECKING:
    from sgl_omni.engine.model import StepModel
    from sgl_omni.engine.request import Chunk

LAST = -1
"""The last hidden state, normed. Any other number is the layer whose input is wanted; 0 is the embeddings."""


@dataclass(slots=True)
class HiddenRows:
    """Hidden states of one request's rows, from when they are computed until they are handed on.

    ``layers``: which of them, in this order. Each row is there once, whether or not a retraction computed it again.
    The last output never runs, so it has none.
    """

    layers: tuple[int, ...]
    _known: int = 0
    _parts: list[Tensor] = field(default_factory=list[Tensor])

    @classmethod
    def parse(cls, value: Any, available: Sequence[int]) -> HiddenRows:
        """A list of layers. Raises ``InvalidRequest`` for one that the engine does not keep."""
        if not isinstance(value, (list, tuple)) or not value:
            raise InvalidRequest(f"hidden_states must be a list of layers, not {value!r}", param="hidden_states")
        for layer in value:
            if layer not in available:
                raise InvalidRequest(
                    f"the hidden state of layer {layer!r} is not kept; those kept are {[*available]}",
                    param="hidden_states",
                )
        return cls(tuple(value))

    def put(self, start: int, rows: Tensor) -> None:
        """Rows [n, layers, hidden] of the sequence from ``start`` on."""
        new = rows[max(0, self._known - start) :]
        if len(new):
            self._parts.append(new)
            self._known = start + len(rows)

    def take(self, before: int | None = None) -> Tensor | None:
        """[rows, layers, hidden] that have not been taken yet: all, or those ahead of the sequence's row ``before``."""
        if not self._parts:
            return None
        rows = torch.cat(self._parts)
        self._parts.clear()
        if before is None or self._known <= before:
            return rows
        ready = max(0, before - (self._known - len(rows)))
        self._parts.append(rows[ready:])
        return rows[:ready] if ready else None

    def restart(self) -> None:
        """The request goes on with another sequence."""
        self._known = 0


def put_hidden(model: StepModel, wanted: HiddenRows, start: int, hidden: Tensor) -> None:
    """Keeps rows from ``start`` on, of what ``forward`` made of them."""
    wanted.put(start, torch.stack([model.hidden_state(hidden, layer) for layer in wanted.layers], 1))


def collect(model: StepModel, hidden: Tensor, chunks: Sequence[Chunk]) -> None:
    """Keeps what the requests of a step ask for; ``hidden`` is what ``forward`` made of the chunks' rows."""
    row = 0
    for chunk in chunks:
        wanted = chunk.request.hidden
        if wanted is not None:
            put_hidden(model, wanted, chunk.start, hidden[row : row + chunk.length])
        row += chunk.length
