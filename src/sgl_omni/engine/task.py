"""The host side of a model: payloads to requests, chosen rows to payloads, and when a request ends."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sgl_omni.engine.delay import DelayPattern
from sgl_omni.engine.hidden import LAST, HiddenRows
from sgl_omni.engine.inputs import ArrivingInput, begin_input, end_input, extend_input
from sgl_omni.engine.inserted import Inserted
from sgl_omni.engine.interface import Payload
from sgl_omni.engine.request import Prompt, Request, Sampling
from sgl_omni.errors import InvalidRequest, NotFinite, StartupError


class Task(ABC):
    """What an engine asks of a model about its requests. All state of a request lies in the request."""

    pattern: DelayPattern | None = None
    """Where outputs are frames of codes."""

    takes_inputs: bool = False
    """Whether ``parse`` gives requests an ``ArrivingInput``, for which device rows need a place."""

    embeds_prompts: bool = False
    """Whether prompts are embeddings as a rule, so that steps with them are worth a GPU's graphs. Those of a task that
    takes arriving inputs are."""

    hands_hidden: bool = False
    """Whether ``parse`` gives requests ``HiddenRows``, so that steps must keep hidden states."""

    end_ids: frozenset[int] = frozenset()
    """A row with one of these among its ``end_columns`` needs a look whatever ``quiet_rows`` said: it may be an end."""

    end_columns: slice = slice(1)

    running: int = 1
    """Requests that run in this step; the engine says it."""

    @abstractmethod
    def parse(self, request_id: str, payload: Payload) -> Request:
        """Raises ``InvalidRequest`` for input that this model can never serve."""

    def extend(self, request: Request, payload: Payload) -> None:
        """Takes input that arrives later. Raises ``InvalidRequest`` for what does not fit."""
        raise InvalidRequest("this model takes all of a request's input at once", param="input_open")

    def finish_input(self, request: Request) -> None:
        """No more input will come. Raises ``InvalidRequest`` where it was never open."""
        raise InvalidRequest("this model takes all of a request's input at once", param="input_open")

    @abstractmethod
    def take(self, request: Request, row: list[int]) -> bool:
        """Appends the row that was chosen, as the model is to see it; true where the sequence ends with it."""

    def take_all(self, rows: Sequence[tuple[Request, list[int]]]) -> list[tuple[Request, bool]]:
        """Takes the rows of a step. Returns the requests that have something to hand on, and whether each ended."""
        taken = [(request, self.take(request, row)) for request, row in rows]
        return [(request, ended) for request, ended in taken if ended or len(request.outputs) >= request.due]

    def quiet_rows(self, request: Request) -> int:
        """Rows that it can take without ``take``, as none of them ends it nor changes anything but its length, unless
        by one of ``end_ids``; 0 where each has to be taken. Where they reach ``due``, they are handed on."""
        return 0

    def chunk(self, request: Request) -> Payload | None:
        """What can be handed on now and has not been."""
        return None

    @abstractmethod
    def result(self, request: Request) -> Payload:
        """The payload of a request that has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """What prompts of a model may hold. ``vocab_sizes`` has one entry a column of ids.

    ``levels``: how many of the first layers may be followed by additions to inserted rows.
    """

    vocab_sizes: tuple[int, ...]
    hidden_size: int
    axes: int = 1
    levels: int = 0

    def prompt(self, payload: Payload) -> Prompt:
        """``prompt_ids`` [length] or [length, columns], or ``prompt_embeddings`` [length, hidden].

        ``prompt_field`` is what the caller calls it, for errors.

        With ids also ``inserted_embeddings`` [m, hidden], which stand at the places ``inserted_at`` [m], with
        ``inserted_tags`` [m] that say what they were made of; and ``layered_embeddings`` [levels, k, hidden], which the
        first layers add at ``layered_at`` [k]. See ``Inserted``.
        """
        ids, embeddings = payload.get("prompt_ids"), payload.get("prompt_embeddings")
        positions = payload.get("positions")
        return Prompt(
            ids=None if ids is None else self._ids(ids, payload.get("prompt_field", "prompt_ids")),
            embeddings=None if embeddings is None else self.embeddings(embeddings, "prompt_embeddings"),
            positions=None if positions is None else self._positions(positions),
            inserted=self._inserted(payload),
        )

    def _inserted(self, payload: Payload) -> Inserted | None:
        rows, layered = payload.get("inserted_embeddings"), payload.get("layered_embeddings")
        if rows is None and layered is None:
            return None
        if layered is None:
            layered = torch.zeros(self.levels, 0, self.hidden_size)
        elif len(layered) != self.levels:
            raise InvalidRequest(
                f"layered_embeddings must be of {self.levels} layers, not {len(layered)}", param="layered_embeddings"
            )
        levels = [self._as_given(level, "layered_embeddings") for level in layered]
        tags = payload.get("inserted_tags")
        return Inserted(
            _integers(payload.get("inserted_at", []), "inserted_at"),
            self._as_given(torch.zeros(0, self.hidden_size) if rows is None else rows, "inserted_embeddings"),
            _integers(payload.get("layered_at", []), "layered_at"),
            torch.stack(levels) if levels else torch.zeros(0, 0, self.hidden_size),
            None if tags is None else _integers(tags, "inserted_tags"),
        )

    def _as_given(self, value: Any, param: str) -> Tensor:
        """``embeddings`` that are many: tensors in host memory stay of the type that they are."""
        if torch.is_tensor(value) and value.is_floating_point() and value.shape[1:] == (self.hidden_size,):
            return value.detach().cpu()
        return self.embeddings(value, param)

    def _ids(self, value: Any, field: str) -> Tensor:
        ids = _integers(value, field)
        if ids.numel() == 0:
            raise InvalidRequest("the prompt is empty", param=field)
        columns = len(self.vocab_sizes)
        if ids.dim() == 1 and columns == 1:
            ids = ids[:, None]
        if ids.dim() != 2 or ids.shape[1] != columns:
            raise InvalidRequest(f"prompt_ids must be [length, {columns}], not {[*ids.shape]}", param=field)
        for column, size in enumerate(self.vocab_sizes):
            low, high = int(ids[:, column].min()), int(ids[:, column].max())
            if low < 0 or high >= size:
                wrong = low if low < 0 else high
                raise InvalidRequest(f"id {wrong} is not one of 0..{size - 1}", param=field)
        return ids

    def embeddings(self, value: Any, param: str) -> Tensor:
        """An array of floats [length, hidden]. Raises ``InvalidRequest`` for anything else."""
        if not (torch.is_tensor(value) or isinstance(value, np.ndarray)):
            raise InvalidRequest(f"{param} must be an array", param=param)
        shape = [*value.shape]
        floats = value.is_floating_point() if torch.is_tensor(value) else np.issubdtype(value.dtype, np.floating)
        if len(shape) != 2 or shape[1] != self.hidden_size or not floats:
            raise InvalidRequest(
                f"{param} must be floats [length, {self.hidden_size}], not {value.dtype} {shape}", param=param
            )
        try:
            if torch.is_tensor(value):
                return value.detach().to("cpu", torch.float32).contiguous()
            with np.errstate(over="ignore"):  # an infinity is told as such
                return torch.from_numpy(np.ascontiguousarray(value, dtype=np.float32))
        except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
            raise InvalidRequest(f"{param} cannot be read: {error}", param=param) from error

    def finite_embeddings(self, value: Any, param: str) -> Tensor:
        """As ``embeddings``. Raises ``NotFinite`` for infinities among them."""
        rows = self.embeddings(value, param)
        if not bool(torch.isfinite(rows).all()):
            raise NotFinite(f"{param} are")
        return rows

    def _positions(self, value: Any) -> Tensor:
        positions = torch.atleast_2d(_integers(value, "positions"))
        if positions.shape[0] != self.axes:
            raise InvalidRequest(f"positions must have {self.axes} axes, not {positions.shape[0]}", param="positions")
        return positions


def _integers(value: Any, param: str) -> Tensor:
    try:
        array = np.asarray(value.cpu() if torch.is_tensor(value) else value)
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"{param} must be whole numbers: {error}", param=param) from error
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise InvalidRequest(f"{param} must be whole numbers, not {array.dtype}", param=param)
    return torch.from_numpy(array.astype(np.int64))


def number(payload: Payload, key: str, default: float) -> float:
    value = payload.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidRequest(f"{key} must be a number, not {value!r}", param=key)
    try:
        return float(value)
    except OverflowError as error:
        raise InvalidRequest(f"{key} is too large a number", param=key) from error


def whole_number(payload: Payload, key: str, default: int) -> int:
    value = payload.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{key} must be a whole number, not {value!r}", param=key)
    return value


def frames_asked(payload: Payload, default: int, room: int | None, param: str = "max_new_tokens") -> int:
    """``max_frames`` of a request. Without it ``default``, or what ``room`` the prompt leaves; at least 1.

    Raises ``InvalidRequest`` that names ``param`` for less than 1.
    """
    frames = whole_number(payload, "max_frames", default if room is None else max(1, min(default, room)))
    if frames < 1:
        raise InvalidRequest(f"{param} must be 1 or more, not {frames}", param=param)
    return frames


def parse_sampling(payload: Payload) -> Sampling:
    """Without a seed the draws differ from request to request."""
    top_k = whole_number(payload, "top_k", 0)
    seed = whole_number(payload, "seed", -1)
    return Sampling(
        temperature=number(payload, "temperature", 0.0),
        top_k=0 if top_k == -1 else top_k,  # both mean all ids, as files of generation options have it too
        top_p=number(payload, "top_p", 1.0),
        repetition_penalty=number(payload, "repetition_penalty", 1.0),
        seed=secrets.randbits(62) if payload.get("seed") is None else seed,
    )


class TokenTask(Task):
    """Tokens out: ``token_ids`` as chunks where ``stream`` asks for them, and all of them in the result.

    ``hidden_states``, a list of layers (-1 is the last, normed), makes chunks too: arrays [rows, layers, hidden] of the
    rows run since the chunk before, so the first has the prompt's. The input may arrive over time.
    """

    takes_inputs = True
    hands_hidden = True

    def __init__(
        self,
        inputs: InputSpec,
        *,
        eos_ids: Sequence[int] = (),
        default_max_new_tokens: int = 256,
        kept_layers: Sequence[int] = (LAST,),
    ) -> None:
        """``kept_layers``: those of the model."""
        self._inputs = inputs
        self._kept_layers = tuple(kept_layers)
        self._eos_ids = frozenset(eos_ids)
        self._default_max_new_tokens = default_max_new_tokens

    def parse(self, request_id: str, payload: Payload) -> Request:
        hidden = payload.get("hidden_states")
        return Request(
            request_id,
            self._inputs.prompt(payload),
            max_outputs=whole_number(payload, "max_new_tokens", self._default_max_new_tokens),
            sampling=parse_sampling(payload),
            hidden=None if hidden is None else HiddenRows.parse(hidden, self._kept_layers),
            inputs=self._input(payload),
            task=_TokenOptions(
                frozenset() if payload.get("ignore_eos") else self._eos_ids, bool(payload.get("stream"))
            ),
        )

    def _input(self, payload: Payload) -> ArrivingInput | None:
        if not any(key in payload for key in ("input_open", "prompt_open", "added_embeddings")):
            return None
        return begin_input(payload, torch.zeros(self._inputs.hidden_size), self._inputs)

    def extend(self, request: Request, payload: Payload) -> None:
        extend_input(request, payload, self._inputs)

    def finish_input(self, request: Request) -> None:
        end_input(request)

    def take(self, request: Request, row: list[int]) -> bool:
        request.outputs.append(row)
        if row[0] in request.task.stop_ids:
            request.finish_reason = "stop"
        elif request.is_at_limit:
            request.finish_reason = "length"
        return request.finish_reason is not None

    def chunk(self, request: Request) -> Payload | None:
        if not request.task.stream and request.hidden is None:
            return None
        new = [row[0] for row in request.outputs[request.sent :]]
        request.sent = len(request.outputs)
        rows = None if request.hidden is None else request.hidden.take()
        return {"token_ids": new} if rows is None else {"token_ids": new, "hidden_states": rows}

    def result(self, request: Request) -> Payload:
        return {
            "token_ids": [row[0] for row in request.outputs],
            "finish_reason": request.finish_reason,
            "input_tokens": request.prompt_length,
            "output_tokens": len(request.outputs),
        }


@dataclass(frozen=True, slots=True)
class _TokenOptions:
    stop_ids: frozenset[int]
    stream: bool


@dataclass(frozen=True, slots=True)
class HandOver:
    """How many frames go on together: ``first``, so that the audio begins soon, then ``then`` at a time."""

    first: int = 1
    then: int = 1

    def __post_init__(self) -> None:
        if self.first < 1 or self.then < 1:
            raise StartupError("a hand-over has 1 frame or more")

    def frames_after(self, sent: int) -> int:
        return self.then if sent else self.first


class FrameTask(Task):
    """Frames of K codes out: arrays ``codes`` int16 [frames, K], handed on when enough frames are known whole."""

    def __init__(
        self,
        inputs: InputSpec,
        pattern: DelayPattern,
        *,
        default_max_frames: int = 1024,
        hand_over: HandOver | None = None,
    ) -> None:
        self._inputs = inputs
        self.pattern = pattern
        self.end_ids = frozenset([pattern.eos_id])
        self._hand_over = hand_over or HandOver()
        self._default_max_frames = default_max_frames

    def parse(self, request_id: str, payload: Payload) -> Request:
        frames = whole_number(payload, "max_frames", self._default_max_frames)
        if frames < 1:
            raise InvalidRequest(f"max_frames must be 1 or more, not {frames}", param="max_frames")
        return Request(
            request_id,
            self._inputs.prompt(payload),
            max_outputs=frames + self.pattern.longest,
            sampling=parse_sampling(payload),
            frame_limit=frames,
            due=self._hand_over.first + self.pattern.longest,
            task=_Audio(),
        )

    def take_all(self, rows: Sequence[tuple[Request, list[int]]]) -> list[tuple[Request, bool]]:
        """Most rows of most steps are in the middle of their audio, and change nothing but its length."""
        eos, longest = self.pattern.eos_id, self.pattern.longest
        found: list[tuple[Request, bool]] = []
        for request, row in rows:
            outputs = request.outputs
            step = len(outputs)
            last = min(request.frame_limit, request.max_outputs - 1)
            if longest <= step < last and request.frame_end < 0 and row[0] != eos:
                outputs.append(row)
                if step + 1 >= request.due:
                    found.append((request, False))
            else:
                ended = self.take(request, row)
                if ended or step + 1 >= request.due:
                    found.append((request, ended))
        return found

    def quiet_rows(self, request: Request) -> int:
        known = len(request.outputs)
        if request.frame_end >= 0 or known < self.pattern.longest:
            return 0
        return min(request.frame_limit, request.max_outputs - 1) - known

    def take(self, request: Request, row: list[int]) -> bool:
        """The row may have the pattern's ids already, if the step was run where that is done."""
        audio: _Audio = request.task
        step = len(request.outputs)
        if request.frame_end < 0 and (row[0] == self.pattern.eos_id or step >= request.frame_limit):
            audio.cut = step >= request.frame_limit
            request.frame_end = step
        if request.frame_end >= 0 or step < self.pattern.longest:
            self.pattern.fill(row, step, _end(request))
        request.outputs.append(row)
        if request.is_at_limit:
            audio.cut = audio.cut or request.frame_end < 0
            request.finish_reason = "length" if audio.cut else "stop"
        elif request.frame_end >= 0 and step + 1 >= request.frame_end + self.pattern.longest:
            request.finish_reason = "length" if audio.cut else "stop"
        return request.finish_reason is not None

    def chunk(self, request: Request) -> Payload | None:
        known = self.pattern.known_frames(len(request.outputs), _end(request))
        if known == request.sent:
            return None
        codes = self.pattern.frames(request.outputs, request.sent, known)
        request.sent = known
        request.due = known + self._hand_over.frames_after(known) + self.pattern.longest
        return {"codes": codes}

    def result(self, request: Request) -> Payload:
        return {
            "finish_reason": request.finish_reason,
            "input_tokens": request.prompt_length,
            "output_tokens": self.pattern.known_frames(len(request.outputs), _end(request)),
        }


@dataclass(slots=True)
class _Audio:
    """``cut``: the limit ended the audio, not the model."""

    cut: bool = False


def _end(request: Request) -> int | None:
    return None if request.frame_end < 0 else request.frame_end
