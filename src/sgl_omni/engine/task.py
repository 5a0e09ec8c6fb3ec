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
from sgl_omni.engine.interface import Payload
from sgl_omni.engine.request import Prompt, Request, Sampling
from sgl_omni.errors import InvalidRequest, StartupError


class Task(ABC):
    """What an engine asks of a model about its requests. All state of a request lies in the request."""

    @abstractmethod
    def parse(self, request_id: str, payload: Payload) -> Request:
        """Raises ``InvalidRequest`` for input that this model can never serve."""

    @abstractmethod
    def take(self, request: Request, row: list[int]) -> bool:
        """Appends the row that was chosen, as the model is to see it; true where the sequence ends with it."""

    def take_all(self, rows: Sequence[tuple[Request, list[int]]]) -> list[tuple[Request, bool]]:
        """Takes the rows of a step. Returns the requests that have something to hand on, and whether each ended."""
        taken = [(request, self.take(request, row)) for request, row in rows]
        return [(request, ended) for request, ended in taken if ended or len(request.outputs) >= request.due]

    def chunk(self, request: Request) -> Payload | None:
        """What can be handed on now and has not been."""
        return None

    @abstractmethod
    def result(self, request: Request) -> Payload:
        """The payload of a request that has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """What prompts of a model may hold. ``vocab_sizes`` has one entry a column of ids."""

    vocab_sizes: tuple[int, ...]
    hidden_size: int
    axes: int = 1

    def prompt(self, payload: Payload) -> Prompt:
        """``prompt_ids`` [length] or [length, columns], or ``prompt_embeddings`` [length, hidden]."""
        ids, embeddings = payload.get("prompt_ids"), payload.get("prompt_embeddings")
        positions = payload.get("positions")
        if embeddings is not None and not (torch.is_tensor(embeddings) or isinstance(embeddings, np.ndarray)):
            raise InvalidRequest("prompt_embeddings must be an array", param="prompt_embeddings")
        return Prompt(
            ids=None if ids is None else self._ids(ids),
            embeddings=None if embeddings is None else self._embeddings(torch.as_tensor(embeddings)),
            positions=None if positions is None else self._positions(positions),
        )

    def _ids(self, value: Any) -> Tensor:
        ids = _integers(value, "prompt_ids")
        if ids.numel() == 0:
            raise InvalidRequest("the prompt is empty", param="prompt_ids")
        columns = len(self.vocab_sizes)
        if ids.dim() == 1 and columns == 1:
            ids = ids[:, None]
        if ids.dim() != 2 or ids.shape[1] != columns:
            raise InvalidRequest(f"prompt_ids must be [length, {columns}], not {[*ids.shape]}", param="prompt_ids")
        for column, size in enumerate(self.vocab_sizes):
            low, high = int(ids[:, column].min()), int(ids[:, column].max())
            if low < 0 or high >= size:
                wrong = low if low < 0 else high
                raise InvalidRequest(f"id {wrong} is not one of 0..{size - 1}", param="prompt_ids")
        return ids

    def _embeddings(self, value: Tensor) -> Tensor:
        if value.dim() != 2 or value.shape[1] != self.hidden_size or not value.is_floating_point():
            raise InvalidRequest(
                f"prompt_embeddings must be floats [length, {self.hidden_size}], not {value.dtype} {[*value.shape]}",
                param="prompt_embeddings",
            )
        return value

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


def parse_sampling(payload: Payload) -> Sampling:
    """Without a seed the draws differ from request to request."""
    seed = whole_number(payload, "seed", -1)
    return Sampling(
        temperature=number(payload, "temperature", 0.0),
        top_k=whole_number(payload, "top_k", 0),
        top_p=number(payload, "top_p", 1.0),
        seed=secrets.randbits(62) if payload.get("seed") is None else seed,
    )


class TokenTask(Task):
    """Tokens out: ``token_ids`` as chunks where ``stream`` asks for them, and all of them in the result."""

    def __init__(self, inputs: InputSpec, *, eos_ids: Sequence[int] = (), default_max_new_tokens: int = 256) -> None:
        self._inputs = inputs
        self._eos_ids = frozenset(eos_ids)
        self._default_max_new_tokens = default_max_new_tokens

    def parse(self, request_id: str, payload: Payload) -> Request:
        return Request(
            request_id,
            self._inputs.prompt(payload),
            max_outputs=whole_number(payload, "max_new_tokens", self._default_max_new_tokens),
            sampling=parse_sampling(payload),
            task=_TokenOptions(
                frozenset() if payload.get("ignore_eos") else self._eos_ids, bool(payload.get("stream"))
            ),
        )

    def take(self, request: Request, row: list[int]) -> bool:
        request.outputs.append(row)
        if row[0] in request.task.stop_ids:
            request.finish_reason = "stop"
        elif request.is_at_limit:
            request.finish_reason = "length"
        return request.finish_reason is not None

    def chunk(self, request: Request) -> Payload | None:
        if not request.task.stream:
            return None
        new = [row[0] for row in request.outputs[request.sent :]]
        request.sent = len(request.outputs)
        return {"token_ids": new}

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
        self._pattern = pattern
        self._hand_over = hand_over or HandOver()
        self._default_max_frames = default_max_frames

    def parse(self, request_id: str, payload: Payload) -> Request:
        frames = whole_number(payload, "max_frames", self._default_max_frames)
        if frames < 1:
            raise InvalidRequest(f"max_frames must be 1 or more, not {frames}", param="max_frames")
        return Request(
            request_id,
            self._inputs.prompt(payload),
            max_outputs=frames + self._pattern.longest,
            sampling=parse_sampling(payload),
            frame_limit=frames,
            due=self._hand_over.first + self._pattern.longest,
            task=_Audio(),
        )

    def take_all(self, rows: Sequence[tuple[Request, list[int]]]) -> list[tuple[Request, bool]]:
        """Most rows of most steps are in the middle of their audio, and change nothing but its length."""
        eos, longest = self._pattern.eos_id, self._pattern.longest
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

    def take(self, request: Request, row: list[int]) -> bool:
        """The row may have the pattern's ids already, if the step was run where that is done."""
        audio: _Audio = request.task
        step = len(request.outputs)
        if request.frame_end < 0 and (row[0] == self._pattern.eos_id or step >= request.frame_limit):
            audio.cut = step >= request.frame_limit
            request.frame_end = step
        if request.frame_end >= 0 or step < self._pattern.longest:
            self._pattern.fill(row, step, _end(request))
        request.outputs.append(row)
        if request.is_at_limit:
            audio.cut = audio.cut or request.frame_end < 0
            request.finish_reason = "length" if audio.cut else "stop"
        elif request.frame_end >= 0 and step + 1 >= request.frame_end + self._pattern.longest:
            request.finish_reason = "length" if audio.cut else "stop"
        return request.finish_reason is not None

    def chunk(self, request: Request) -> Payload | None:
        known = self._pattern.known_frames(len(request.outputs), _end(request))
        if known == request.sent:
            return None
        codes = self._pattern.frames(request.outputs, request.sent, known)
        request.sent = known
        request.due = known + self._hand_over.frames_after(known) + self._pattern.longest
        return {"codes": codes}

    def result(self, request: Request) -> Payload:
        return {
            "finish_reason": request.finish_reason,
            "input_tokens": request.prompt_length,
            "output_tokens": self._pattern.known_frames(len(request.outputs), _end(request)),
        }


@dataclass(slots=True)
class _Audio:
    """``cut``: the limit ended the audio, not the model."""

    cut: bool = False


def _end(request: Request) -> int | None:
    return None if request.frame_end < 0 else request.frame_end
