"""What Whisper may say next, as functions of tensors: the same for requests on the host and for device rows.

A sequence is of one of three modes. Of a sequence with timestamps, ``times`` says what the next token depends on: the
last timestamp, and whether the last two tokens were timestamps. It is -1 before the first token. Its plan is
what does not change: the mode, and how far the audio reaches.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from sgl_omni.models.whisper.spec import WhisperSpec

_LAST, _BEFORE, _SHIFT = 1, 2, 2
_MODES, _PLAN_SHIFT = 3, 2


class Mode(IntEnum):
    """What a sequence is for."""

    TEXT = 0
    TIMESTAMPS = 1
    LANGUAGE = 2
    """One token: the language that is spoken."""


def plan_of(mode: Mode, heard_until: int) -> int:
    """Both in one number. ``heard_until``: the timestamp before which audio may not be left unheard."""
    return max(0, heard_until) << _PLAN_SHIFT | mode


def next_times(times: int, token: int, timestamp_begin: int) -> int:
    """``times`` after one more token."""
    last = _LAST if token >= timestamp_begin else 0
    before = _BEFORE if times < 0 or times & _LAST else 0
    seen = token - timestamp_begin + 1 if last else max(0, times) >> _SHIFT
    return seen << _SHIFT | before | last


def next_times_rows(times: Tensor, tokens: Tensor, timestamp_begin: int) -> Tensor:
    """The same for int64 [n]."""
    is_time = tokens >= timestamp_begin
    before = (times < 0) | ((times & _LAST) != 0)
    seen = torch.where(is_time, tokens - timestamp_begin + 1, times.clamp(min=0) >> _SHIFT)
    return (seen << _SHIFT) | (before * _BEFORE) | (is_time * _LAST)


class WhisperRules:
    """Suppressed ids, the pairing and order of timestamps, and the choice of a language."""

    def __init__(self, spec: WhisperSpec, device: torch.device) -> None:
        self._spec = spec
        never, not_first, languages = torch.zeros(3, spec.vocab_size, dtype=torch.bool)
        never[list(spec.suppressed)] = True
        not_first[list(spec.suppressed_first)] = True
        languages[list(spec.languages.values())] = True
        ids = torch.arange(spec.vocab_size)
        self._never = never.to(device)
        self._not_first = not_first.to(device)
        self._other_than_languages = ~languages.to(device)
        self._ids = ids.to(device)
        self._is_time = (ids >= spec.timestamp_begin).to(device)
        self._is_text = (ids < spec.eos_id).to(device)

    def __call__(self, logits: Tensor, plans: Tensor, steps: Tensor, times: Tensor) -> Tensor:
        """logits [n, 1, vocabulary] without what may not be said.

        ``plans``, ``steps`` (tokens said so far) and ``times`` int64 [n].
        """
        scores = logits[:, 0]
        steps, modes = steps[:, None], (plans & _MODES)[:, None]
        first = steps == 0
        scores = scores.masked_fill(self._never | (self._not_first & first), float("-inf"))
        timed = self._with_timestamps(scores, steps, times[:, None], (plans >> _PLAN_SHIFT)[:, None])
        scores = torch.where(modes == Mode.TIMESTAMPS, timed, scores)
        # The likeliest alone: a temperature is for what is said, not for this.
        language = logits[:, 0].masked_fill(self._other_than_languages, float("-inf"))
        language = language.masked_fill(language < language.amax(-1, keepdim=True), float("-inf"))
        return torch.where(modes == Mode.LANGUAGE, language, scores)[:, None]

    def _with_timestamps(self, scores: Tensor, steps: Tensor, times: Tensor, heard_until: Tensor) -> Tensor:
        """scores [n, vocabulary], the others [n, 1].

        A model that ends after a pair of times says that more is spoken from there on, and leaves it to a window that
        begins there. Here no window does, so it has to go on, unless next to nothing is left.
        """
        spec, first = self._spec, steps == 0
        said = times.clamp(min=0)
        last = (said & _LAST) != 0
        before = (times < 0) | ((said & _BEFORE) != 0)
        # A time that ends a stretch may begin the next one; it never comes again after that, nor one before it.
        lowest = spec.timestamp_begin + (said >> _SHIFT) - (last & ~before).to(torch.int64)
        forbidden = self._ids == spec.no_timestamps_id
        forbidden = forbidden | (last & before & self._is_time) | (last & ~before & self._is_text)
        forbidden = forbidden | (self._is_time & (self._ids < lowest))
        forbidden = forbidden | (first & ~self._is_time)
        unheard = last & before & (steps > 1) & ((said >> _SHIFT) <= heard_until)
        forbidden = forbidden | (unheard & (self._ids == spec.eos_id))
        if spec.max_initial_timestamp is not None:
            forbidden = forbidden | (first & (self._ids > spec.timestamp_begin + spec.max_initial_timestamp))
        scores = scores.masked_fill(forbidden, float("-inf"))
        chances = scores.float().log_softmax(-1)
        time = chances[:, spec.timestamp_begin :].logsumexp(-1, keepdim=True)
        other = chances[:, : spec.timestamp_begin].amax(-1, keepdim=True)
        return scores.masked_fill((time > other) & ~self._is_time, float("-inf"))
