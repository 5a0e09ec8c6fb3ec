"""A request inside an engine: what was asked, and how far it has come."""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sgl_omni.engine.hidden import HiddenRows
from sgl_omni.engine.inputs import ArrivingInput
from sgl_omni.engine.inserted import Inserted
from sgl_omni.engine.output_rows import OutputRows
from sgl_omni.errors import InvalidRequest, NotFinite

LARGEST = 2**31 - 1
LOST = -2
"""In all columns of a row that was to be chosen from logits which are not finite; no model has such an id."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next id is drawn. A temperature of 0 is greedy; ``top_k`` 0 and ``top_p`` 1 leave all ids.

    ``repetition_penalty`` is for models whose rule knows it; 1 is none.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        """Raises ``InvalidRequest`` for values that mean nothing."""
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InvalidRequest(f"temperature must be 0 or more, not {self.temperature}", param="temperature")
        if self.top_k < 0:
            raise InvalidRequest(f"top_k must be 0 (all ids) or more, not {self.top_k}", param="top_k")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise InvalidRequest(
                f"repetition_penalty must be above 0, not {self.repetition_penalty}", param="repetition_penalty"
            )
        if not 0 < self.top_p <= 1:
            raise InvalidRequest(f"top_p must be above 0 and at most 1, not {self.top_p}", param="top_p")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """What a request starts from: ids, or embeddings that another stage made.

    ``ids`` int64 [length, codebooks]; ``embeddings`` [length, hidden]. Exactly one is given. ``positions`` int64
    [axes, length] where they are not simply 0, 1, 2, ... (multi-axis RoPE); outputs then go on after the largest.
    ``inserted``: rows that stand at some of the ids' places.
    """

    ids: Tensor | None = None
    embeddings: Tensor | None = None
    positions: Tensor | None = None
    inserted: Inserted | None = None

    def __post_init__(self) -> None:
        """Raises ``InvalidRequest`` for a prompt that is empty or whose parts do not fit, and ``NotFinite``."""
        if (self.ids is None) == (self.embeddings is None):
            raise InvalidRequest("a prompt is either ids or embeddings", param="prompt")
        if self.rows.dim() != 2 or len(self) == 0:
            raise InvalidRequest(f"a prompt has at least one row, not shape {[*self.rows.shape]}", param="prompt")
        if self.embeddings is not None and not bool(torch.isfinite(self.embeddings).all()):
            raise NotFinite("the prompt's embeddings are")
        if self.inserted is not None:
            if self.ids is None:
                raise InvalidRequest("rows are inserted among ids, not among embeddings", param="inserted_embeddings")
            self.inserted.check(len(self))
        if self.positions is None:
            return
        if self.positions.dim() != 2 or self.positions.shape[1] != len(self):
            raise InvalidRequest("the prompt's positions must be [axes, length]", param="positions")
        if int(self.positions.min()) < 0:
            raise InvalidRequest("the prompt's positions must be 0 or more", param="positions")

    @property
    def rows(self) -> Tensor:
        """The ids or the embeddings."""
        rows = self.embeddings if self.ids is None else self.ids
        assert rows is not None
        return rows

    @property
    def end_position(self) -> int:
        """Position of the first output."""
        return len(self) if self.positions is None else int(self.positions.max()) + 1

    def __len__(self) -> int:
        return int(self.rows.shape[0])

    def is_like(self, other: Prompt) -> bool:
        """Whether the two can be one after the other in one prompt."""
        if self.inserted is not None or other.inserted is not None:
            return False
        mine = (self.ids is None, self.positions is None, self.rows.shape[1])
        return mine == (other.ids is None, other.positions is None, other.rows.shape[1])

    @classmethod
    def join(cls, parts: Sequence[Prompt]) -> Prompt:
        """Prompts of one kind, one after another."""
        if len(parts) == 1:
            return parts[0]
        rows = torch.cat([part.rows for part in parts])
        positions = [part.positions for part in parts if part.positions is not None]
        joined = torch.cat(positions, 1) if positions else None
        if parts[0].ids is None:
            return cls(embeddings=rows, positions=joined)
        return cls(rows, positions=joined)

    def page_keys(self, page_size: int) -> list[bytes]:
        """One key for each whole page: a hash of all content up to the page's end.

        Two prompts share a key exactly where they are equal from the first row to there.
        """
        starts = range(0, len(self) + 1, page_size)
        parts = [self.rows] if self.positions is None else [self.rows, self.positions.T]
        parts = [part.cpu().clone(memory_format=torch.contiguous_format) for part in parts]
        running = hashlib.blake2b(repr([(part.dtype, part.shape[1]) for part in parts]).encode(), digest_size=16)
        keys = []
        for start, end in pairwise(starts):
            for part in parts:
                running.update(part[start:end].view(torch.uint8).numpy())
            for part in () if self.inserted is None else self.inserted.content(start, end):
                running.update(repr(part.shape).encode())
                running.update(part.contiguous().view(-1).view(torch.uint8).numpy())
            keys.append(running.digest())
        return keys


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """What a request goes on with when the sequence before it has ended: the next piece of a text, say.

    ``source`` [frames, width] where it attends over another encoder output than the sequence before.
    """

    prompt: Prompt
    max_outputs: int
    source: Tensor | None = None

    @property
    def longest(self) -> int:
        """Rows that the cache holds at the very end; the last output never enters it."""
        return len(self.prompt) + self.max_outputs - 1


@dataclass(slots=True, eq=False)
class Request:
    """A request and its progress. The scheduler owns ``pages``, ``row``, ``computed`` and ``launched``, the task
    ``outputs`` and ``due``.

    A sequence is the prompt's rows, then one row an output. ``computed`` counts those whose keys and values are in
    the cache, or will be when the steps that were launched are through; ``launched`` counts the outputs of these
    steps, of which ``outputs`` may lack the last. ``row`` is a place of its own in fixed tensors while it runs, and
    ``turn`` counts how often its state there had to begin anew. ``sequence`` counts the sequences that have ended.
    ``frame_end`` and ``frame_limit``, where outputs are frames: their number, or the output that brings the end, -1
    until it is known, and the number at which they are cut. ``due``: there is nothing to hand on before this many
    outputs are known. ``task`` is state that belongs to the model's own code. ``followers`` are the sequences that come
    after this one, each from an empty context; ``drawn`` counts the outputs of those that have ended. ``hidden`` is
    there where hidden states are asked for, ``inputs`` where some of the input comes later,
    ``source`` [frames, width] where an encoder's output is attended over, and then ``place``, where its keys and
    values lie from the first step on.
    """

    id: str
    prompt: Prompt
    max_outputs: int
    sampling: Sampling = Sampling()
    task: Any = None
    followers: deque[Segment] = field(default_factory=deque[Segment])
    drawn: int = 0
    hidden: HiddenRows | None = None
    inputs: ArrivingInput | None = None
    source: Tensor | None = None
    place: int = -1
    arrival: int = -1
    outputs: OutputRows = field(init=False)
    finish_reason: str | None = None
    page_keys: list[bytes] = field(default_factory=list[bytes])
    pages: list[int] = field(default_factory=list[int])
    row: int = -1
    turn: int = 0
    sequence: int = 0
    computed: int = 0
    launched: int = 0
    due: int = 0
    frame_end: int = -1
    frame_limit: int = LARGEST
    sent: int = 0
    retractions: int = 0
    prompt_length: int = field(init=False)

    def __post_init__(self) -> None:
        """Raises ``InvalidRequest`` where not even one output is wanted."""
        if self.max_outputs < 1:
            raise InvalidRequest(f"at least one output must be allowed, not {self.max_outputs}", param="max_new_tokens")
        self.prompt_length = len(self.prompt)
        self.outputs = OutputRows(room=self.max_outputs)

    @property
    def length(self) -> int:
        """Rows that are known by now, or will be when the steps that were launched are through."""
        return self.prompt_length + self.launched

    @property
    def final_length(self) -> int:
        """Rows that the cache holds at the end of this sequence."""
        return self.prompt_length + self.max_outputs - 1

    @property
    def rows_needed(self) -> int:
        """Rows that the cache must have room for now."""
        return min(self.length, self.final_length)

    @property
    def awaits_output(self) -> bool:
        """Whether an output was launched that is not known yet."""
        return self.launched != len(self.outputs)

    @property
    def longest(self) -> int:
        """Rows that the cache holds at the very end of the longest sequence; the last output never enters it."""
        current = self.final_length
        return max(current, *(s.longest for s in self.followers)) if self.followers else current

    @property
    def end_position(self) -> int:
        """One above the highest position that a row of any sequence can have."""
        segments = [Segment(self.prompt, self.max_outputs), *self.followers]
        return max(s.prompt.end_position + s.max_outputs - 1 for s in segments)

    @property
    def uncomputed(self) -> int:
        return self.length - self.computed

    @property
    def is_decoding(self) -> bool:
        """Whether only the last output is still to be run."""
        return self.computed >= self.prompt_length and self.uncomputed == 1

    @property
    def is_blocked(self) -> bool:
        """Whether the next output must wait for input that has not arrived."""
        return self.inputs is not None and not self.inputs.is_ready(self.launched)

    def follow(self) -> None:
        """Leaves the sequence that has ended for the next one."""
        if self.hidden is not None:
            self.hidden.restart()
        following = self.followers.popleft()
        self.prompt, self.max_outputs, self.prompt_length = (
            following.prompt,
            following.max_outputs,
            len(following.prompt),
        )
        if following.source is not None:
            self.source = following.source
        self.drawn += len(self.outputs)
        self.outputs = OutputRows(room=self.max_outputs)
        self.sent = self.computed = self.launched = self.due = 0
        self.sequence += 1

    def extend_prompt(self, part: Prompt) -> None:
        """More of a prompt that is still open. Raises ``InvalidRequest`` where it is of another kind."""
        assert self.inputs is not None
        if not self.prompt.is_like(part):
            raise InvalidRequest("parts of a prompt must be all ids or all embeddings, with positions or without")
        self.inputs.prompt_parts.append(part)
        self.prompt_length += len(part)

    def close_prompt(self) -> None:
        assert self.inputs is not None
        self.prompt = Prompt.join([self.prompt, *self.inputs.prompt_parts])
        self.inputs.prompt_parts.clear()
        self.inputs.prompt_open = False

    @property
    def is_at_limit(self) -> bool:
        return len(self.outputs) >= self.max_outputs


class Chunk(NamedTuple):
    """Rows ``start`` to ``stop`` of a request, run in one step."""

    request: Request
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def is_decode(self) -> bool:
        return self.start >= self.request.prompt_length and self.length == 1

    @property
    def yields_output(self) -> bool:
        """Whether this reaches the end of what is known, so that the next output can be chosen."""
        return self.stop == self.request.length
