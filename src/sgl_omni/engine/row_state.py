"""What a model's own rules may know of the rows that yield an output: their state, on the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from sgl_omni.engine.device_rows import DeviceRows, Field, float_bits, float_of
from sgl_omni.engine.platform import for_kernels
from sgl_omni.engine.repetition import penalise
from sgl_omni.engine.sampler import is_no_choice, sample_masked, step_keys

Choose = Callable[[Tensor, int], Tensor]
"""Logits [s, columns, vocabulary], and which column of a row the first of them is -> ids int64 [s, columns]."""


class RowState:
    """The state of s rows. What is not asked for is not gathered, so that a plain model pays nothing for it."""

    def __init__(self, rows: DeviceRows, at: Tensor, ends: Tensor, targets: Tensor | None = None) -> None:
        """``at`` int64 [n]: the state of each row of a pass; ``ends`` int64 [s]: the rows of it that are meant.

        ``targets`` int64 [s]: the states that take what comes of them, by default the same.
        """
        self._rows = rows
        self._at = at
        self._ends = ends
        self._targets = targets
        self.lost: Tensor | None = None
        """int32 [s]: 1 where logits of `choose_own` or `choose_by` were not finite; none where neither was asked."""

    @cached_property
    def _own(self) -> Tensor:
        return self._at[self._ends]

    @cached_property
    def fields(self) -> Tensor:
        """A copy, int32 [s, fields and ids]; see ``Field``."""
        return self._rows.fields[self._own]

    @property
    def steps(self) -> Tensor:
        """Outputs so far, int64 [s]."""
        return self.fields[:, Field.STEP].to(torch.int64)

    @property
    def ends(self) -> Tensor:
        """The end of the audio, int64 [s], or -1."""
        return self.fields[:, Field.END].to(torch.int64)

    def penalised(self, logits: Tensor) -> Tensor:
        """Logits [s, 1, ``StepModel.seen_vocabulary``], those of ids that a request has had in column 0 lowered by its
        penalty of repetition. The given ones may be changed."""
        assert self._rows.seen is not None, "the model has no seen_vocabulary"
        flags = self._rows.seen.flags
        if for_kernels(logits):
            from sgl_omni.engine.kernels import sampling

            logits = logits.contiguous()
            sampling.penalise(logits[:, 0], flags, self._rows.fields, self._at, self._ends)
            return logits
        return penalise(logits[:, 0], flags[self._own], float_of(self.fields, Field.PENALTY))[:, None]

    @property
    def temperatures(self) -> Tensor:
        """float32 [s]"""
        return float_of(self.fields, Field.TEMPERATURE)

    @property
    def keys(self) -> Tensor:
        """Of the draws of this step, int64 [s]; see ``sampler.step_keys``."""
        return _keys(self.fields)

    @property
    def kept(self) -> Tensor:
        """float32 [s, *``StepModel.kept_shape``]"""
        assert self._rows.kept is not None, "the model has no kept_shape"
        return self._rows.kept.values[self._own]

    def keep(self, values: Tensor) -> None:
        """What ``kept`` is to be in the next step."""
        assert self._rows.kept is not None, "the model has no kept_shape"
        self._rows.kept.values.index_copy_(0, self._own if self._targets is None else self._targets, values.float())

    def choose(self, logits: Tensor) -> Tensor:
        """logits [s, columns, vocabulary] -> ids int64 [s, columns] by each request's own options."""
        return choose_rows(logits, self._rows.fields, self._at, self._ends)

    def choose_own(self) -> Choose:
        """The same for further columns, and whoever has lost one of them is noted in ``lost``."""
        return self._choose_from(self.fields)

    def choose_by(self, *, temperature: float, top_k: int, top_p: float) -> Choose:
        """As `choose_own`, by these options for all requests but greedy ones, which stay so."""
        own = self.fields.clone()
        greedy = (float_of(own, Field.TEMPERATURE) == 0) | (own[:, Field.TOP_K] == 1)
        own[:, Field.TEMPERATURE].fill_(float_bits(temperature)).masked_fill_(greedy, 0)
        own[:, Field.TOP_K].fill_(top_k)
        own[:, Field.TOP_P].fill_(float_bits(top_p))
        return self._choose_from(own)

    def _choose_from(self, own: Tensor) -> Choose:
        each = torch.arange(own.shape[0], device=own.device)
        lost = self.lost = torch.zeros_like(each, dtype=torch.int32) if self.lost is None else self.lost
        return lambda logits, first_column: choose_rows(logits, own, each, each, first_column, lost)


def choose_rows(
    logits: Tensor, fields: Tensor, rows: Tensor, ends: Tensor, first_column: int = 0, lost: Tensor | None = None
) -> Tensor:
    """Ids int64 [s, columns] by each state's own options; see ``kernels.sampling.sample`` for the arguments."""
    if for_kernels(logits):
        from sgl_omni.engine.kernels import sampling

        return sampling.sample(logits, fields, rows, ends, first_column, lost)
    if lost is not None:
        lost |= is_no_choice(logits)[:, 0]
    state = fields[rows[ends]]
    temperature, top_p = float_of(state, Field.TEMPERATURE), float_of(state, Field.TOP_P)
    return sample_masked(logits, temperature, state[:, Field.TOP_K], top_p, _keys(state), first_column)


def _keys(fields: Tensor) -> Tensor:
    """int64 [n] of the state of n rows."""
    seeds = fields[:, Field.SEED].to(torch.int64) & 0xFFFFFFFF
    return step_keys(seeds, fields[:, Field.STEP].to(torch.int64) + fields[:, Field.DRAWN])
