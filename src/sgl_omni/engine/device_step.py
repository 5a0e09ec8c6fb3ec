"""One step of a model as a function of tensors alone: it can be captured into a CUDA graph, and runs anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sgl_omni.engine.attention import Attend
from sgl_omni.engine.cross_attention import RowSourceAttend, SourcePool
from sgl_omni.engine.delay import DelayPattern
from sgl_omni.engine.device_rows import DeviceRows, Field
from sgl_omni.engine.given_rows import GivenInputs
from sgl_omni.engine.kv_cache import KVCache
from sgl_omni.engine.model import StepModel
from sgl_omni.engine.platform import for_kernels
from sgl_omni.engine.request import LOST
from sgl_omni.engine.row_attention import RowLayout, Tiled, TorchRowAttention, TritonRowAttention
from sgl_omni.engine.row_state import RowState
from sgl_omni.engine.sampler import is_no_choice
from sgl_omni.engine.tiles import most_tiles


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """What the host says about a pass of n rows of which s yield an output.

    ``rows`` int64 [n]: whose state each row belongs to. ``given`` int64 [n]: its position, or -1 where both position
    and ids are those of the state. ``ids`` int64 [n, columns] where given. ``ends`` int64 [s]: the rows of the pass
    that yield, ``targets`` int64 [s]: whose state takes the output. ``tiled`` int64 [2] and ``tiles`` int64
    [``most_tiles(n)``, 2]: see ``Tiled``.
    """

    rows: Tensor
    given: Tensor
    ids: Tensor
    ends: Tensor
    targets: Tensor
    tiled: Tensor
    tiles: Tensor

    @classmethod
    def of(cls, flat: Tensor, n: int, columns: int, s: int) -> StepInputs:
        """Views of one int64 buffer, so that all of it arrives in one copy."""
        sizes = [n, n, n * columns, s, s, 2, 2 * most_tiles(n)]
        rows, given, ids, ends, targets, tiled, tiles = flat[: step_size(n, columns, s)].split(sizes)
        return cls(rows, given, ids.view(n, columns), ends, targets, tiled, tiles.view(-1, 2))


def step_size(n: int, columns: int, s: int) -> int:
    return n * (2 + columns) + 2 * s + 2 + 2 * most_tiles(n)


class StepOutput(NamedTuple):
    """``ids`` int64 [s, columns] of the rows that yield, ``LOST`` in all columns where the logits are not finite;
    ``hidden``: what the model's ``forward`` made of all rows."""

    ids: Tensor
    hidden: Tensor


def begin_rows(
    rows: Tensor, given: Tensor, given_ids: Tensor, fields: Tensor, tables: Tensor, page_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Positions, rope positions, cache slots (all int64 [n]) and ids int64 [n, columns] of the rows of a pass."""
    if for_kernels(fields):
        from sgl_omni.engine.kernels import state as kernels

        return kernels.begin(rows, given, given_ids, fields, tables, page_size)
    state = fields[rows]
    positions = torch.where(given >= 0, given, state[:, Field.POSITION])
    ids = torch.where((given >= 0)[:, None], given_ids, state[:, len(Field) :])
    page = tables[rows].gather(1, (positions // page_size)[:, None])[:, 0]
    return positions, positions + state[:, Field.ROPE_OFFSET], page * page_size + positions % page_size, ids


def advance_rows(
    ids: Tensor,
    inputs: StepInputs,
    positions: Tensor,
    fields: Tensor,
    pattern: DelayPattern | None,
    delays: Tensor | None,
) -> Tensor:
    """Moves the state of the rows that yielded on to the ids int64 [s, columns], the pattern's own filled in.

    Returns the ids. ``delays``: those of the pattern, int32 on the device.
    """
    if for_kernels(ids):
        from sgl_omni.engine.kernels import state as kernels

        ids = ids.contiguous()
        facts = (delays, pattern.eos_id, pattern.pad_id) if pattern is not None and delays is not None else None
        kernels.advance(ids, inputs.rows, inputs.ends, inputs.targets, positions, fields, facts)
        return ids
    state = fields[inputs.rows[inputs.ends]]
    steps, ends = state[:, Field.STEP].to(torch.int64), state[:, Field.END].to(torch.int64)
    if pattern is not None:
        ids, ends = pattern.fill_rows(ids, steps, ends, state[:, Field.LIMIT].to(torch.int64))
    state[:, Field.POSITION] = (positions[inputs.ends] + 1).to(torch.int32)
    state[:, Field.STEP] = (steps + 1).to(torch.int32)
    state[:, Field.END] = ends.to(torch.int32)
    state[:, len(Field) :] = ids
    fields.index_copy_(0, inputs.targets, state)
    return ids


class DeviceStep:
    """A model, its cache and the rows that it works on."""

    def __init__(self, model: StepModel, cache: KVCache, rows: DeviceRows, sources: SourcePool | None = None) -> None:
        self._model = model
        self._sources = sources
        self._cache = cache
        self._rows = rows
        self._attention = TritonRowAttention if for_kernels(rows.fields) else TorchRowAttention
        pattern = model.pattern
        self._delays = None if pattern is None else torch.tensor(pattern.delays, dtype=torch.int32, device=cache.device)

    def __call__(
        self,
        inputs: StepInputs,
        given: GivenInputs | None = None,
        *,
        outputs_only: bool = False,
        has_tiles: bool = False,
    ) -> StepOutput:
        """Runs the pass and moves the state of the rows that yield on.

        ``outputs_only``: no row is one of a prompt. ``has_tiles``: some rows may be in tiles.
        """
        model, fields, tables = self._model, self._rows.fields, self._rows.tables
        positions, rope, slots, ids = begin_rows(
            inputs.rows, inputs.given, inputs.ids, fields, tables, self._cache.page_size
        )
        x = model.embed_outputs(ids) if outputs_only else model.embed_ids(ids)
        if self._rows.added is not None:
            x = self._rows.added.add(x, inputs.rows, inputs.given, fields, Field.STEP)
        rope = rope.expand(model.axes, -1)
        if given is not None:
            x, rope = given.into(x, rope)
        tiles = Tiled(inputs.tiled, inputs.tiles) if has_tiles else None
        layout = RowLayout(positions, inputs.rows, tables, slots, tiles)
        attend: Attend = self._attention(self._cache, layout)
        if self._sources is not None:
            attend = RowSourceAttend(self._sources, attend, fields[inputs.rows, Field.PLACE].to(torch.int64))
        if given is None or given.between is None:
            hidden = model.forward(x, rope, attend)
        else:
            hidden = model.forward_adding(x, rope, attend, given.between)
        if inputs.ends.shape[0] == 0:
            return StepOutput(inputs.ids[:0], hidden)
        chosen_from = hidden[inputs.ends]
        state = RowState(self._rows, inputs.rows, inputs.ends, inputs.targets)
        logits = model.logits(chosen_from)
        is_lost = is_no_choice(logits)
        ids = state.choose(model.rule_rows(logits, state))
        ids, own_ends = model.finish_rows(ids, chosen_from, state)
        if state.lost is not None:
            is_lost |= state.lost[:, None] != 0
        ids = advance_rows(ids, inputs, positions, fields, model.pattern, self._delays)
        if own_ends is not None:
            fields[:, Field.END].index_copy_(0, inputs.targets, own_ends.to(torch.int32))
        if self._rows.seen is not None:
            self._rows.seen.note(inputs.targets, ids[:, 0])
        return StepOutput(ids.masked_fill(is_lost, LOST), hidden)
