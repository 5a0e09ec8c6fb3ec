"""One step of a model as a function of tensors alone: it can be captured into a CUDA graph, and runs anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_omni.engine.device_rows import DeviceRows, Field, float_of
from sgl_omni.engine.kv_cache import KVCache
from sgl_omni.engine.model import StepModel
from sgl_omni.engine.row_attention import RowLayout, TorchRowAttention, TritonRowAttention
from sgl_omni.engine.sampler import sample_masked, step_keys


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """What the host says about a pass of n rows of which s yield an output.

    ``rows`` int64 [n]: whose state each row belongs to. ``given`` int64 [n]: its position, or -1 where both position
    and ids are those of the state. ``ids`` int64 [n, columns] where given. ``ends`` int64 [s]: the rows of the pass
    that yield, ``targets`` int64 [s]: whose state takes the output.
    """

    rows: Tensor
    given: Tensor
    ids: Tensor
    ends: Tensor
    targets: Tensor

    @classmethod
    def of(cls, flat: Tensor, n: int, columns: int, s: int) -> StepInputs:
        """Views of one int64 buffer, so that all of it arrives in one copy."""
        rows, given, ids, ends, targets = flat[: step_size(n, columns, s)].split([n, n, n * columns, s, s])
        return cls(rows, given, ids.view(n, columns), ends, targets)


def step_size(n: int, columns: int, s: int) -> int:
    return n * (2 + columns) + 2 * s


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """What prompts bring besides ids: embeddings [m, hidden] for the rows ``at`` int64 [m]; positions of all rows."""

    at: Tensor | None = None
    embeddings: Tensor | None = None
    positions: Tensor | None = None


class DeviceStep:
    """A model, its cache and the rows that it works on."""

    def __init__(self, model: StepModel, cache: KVCache, rows: DeviceRows) -> None:
        self._model = model
        self._cache = cache
        self._rows = rows
        self._attention = TritonRowAttention if cache.device.type == "cuda" else TorchRowAttention

    def __call__(
        self, inputs: StepInputs, prompts: Sequence[tuple[int, int]] = (), given: Given | None = None
    ) -> Tensor:
        """Runs the pass, moves the state of the rows that yield on, and returns their ids int64 [s, columns].

        ``prompts``: see ``RowLayout``.
        """
        model, fields = self._model, self._rows.fields
        state = fields[inputs.rows]
        is_given = inputs.given >= 0
        positions = torch.where(is_given, inputs.given, state[:, Field.POSITION])
        x = model.embed_ids(torch.where(is_given[:, None], inputs.ids, state[:, len(Field) :]))
        rope = (positions + state[:, Field.ROPE_OFFSET]).expand(model.axes, -1)
        if given is not None:
            if given.at is not None and given.embeddings is not None:
                x = x.index_copy(0, given.at, given.embeddings.to(x.dtype))
            rope = rope if given.positions is None else torch.where(given.positions >= 0, given.positions, rope)
        layout = RowLayout.of(positions, inputs.rows, self._rows.tables, self._cache.page_size, prompts)
        hidden = model.forward(x, rope, self._attention(self._cache, layout))
        if inputs.ends.shape[0] == 0:
            return inputs.ids[:0]
        return self._choose(hidden[inputs.ends], state[inputs.ends], positions[inputs.ends], inputs.targets)

    def _choose(self, hidden: Tensor, state: Tensor, positions: Tensor, targets: Tensor) -> Tensor:
        model, steps = self._model, state[:, Field.STEP].to(torch.int64)
        seeds = state[:, Field.SEED].to(torch.int64) & 0xFFFFFFFF
        keys = step_keys(seeds, steps + state[:, Field.DRAWN])
        temperature, top_p = float_of(state, Field.TEMPERATURE), float_of(state, Field.TOP_P)
        ids = sample_masked(model.logits(hidden), temperature, state[:, Field.TOP_K], top_p, keys)
        ends = state[:, Field.END].to(torch.int64)
        if model.pattern is not None:
            ids, ends = model.pattern.fill_rows(ids, steps, ends, state[:, Field.LIMIT].to(torch.int64))
        moved = torch.stack([positions + 1, steps + 1, ends], 1).to(torch.int32)
        state[:, Field.POSITION] = moved[:, 0]
        state[:, Field.STEP] = moved[:, 1]
        state[:, Field.END] = moved[:, 2]
        state[:, len(Field) :] = ids
        self._rows.fields.index_copy_(0, targets, state)
        return ids
