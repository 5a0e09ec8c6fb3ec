"""The host side of Whisper's decoder: a recording's windows in, what is said in them out, one after another."""

from __future__ import annotations

import math
import zlib
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sgl_omni.engine.interface import Payload
from sgl_omni.engine.request import Prompt, Request, Segment
from sgl_omni.engine.task import Task, parse_sampling, whole_number
from sgl_omni.errors import InvalidRequest, NotFinite
from sgl_omni.models.whisper.rules import Mode, next_times, plan_of
from sgl_omni.models.whisper.spec import TASKS, WhisperSpec

_LEFT_UNHEARD = 0.5
"""Seconds at the end of a window that may go without words."""

_REPETITIVE = 2.4
"""Tokens that compress better than this go round in circles; they would draw the next window into the circle."""


@dataclass(frozen=True, slots=True)
class Window:
    """``start`` and ``end`` in seconds of the recording; ``states`` [frames, width], what the encoder made of it."""

    start: float
    end: float
    states: Tensor


@dataclass(slots=True)
class Transcript:
    """A request's state in the engine: its windows, which of them is decoded, and what was said before.

    ``language`` is the id of the language, None until it is known and for a model of one language. ``left``: tokens
    that may still be said in all. ``tokens`` are those of the window ``at``, which has ``ended`` where only its
    successor is to come. ``cut``: a limit ended a window, not the model. ``told``: tokens of the caller's prompt.
    """

    windows: list[Window]
    task: str
    timestamps: bool
    language: int | None
    history: list[int]
    left: int
    duration: float
    at: int = 0
    detecting: bool = False
    ended: bool = False
    cut: bool = False
    told: int = 0
    tokens: list[int] = field(default_factory=list)

    @property
    def mode(self) -> Mode:
        if self.detecting:
            return Mode.LANGUAGE
        return Mode.TIMESTAMPS if self.timestamps else Mode.TEXT


class WhisperTask(Task):
    """Payloads have ``windows`` (each with ``encoder_states`` [frames, width], ``start`` and ``end``), ``task``,
    ``timestamps``, ``history`` (ids said before) and where it is known ``language``.

    Each window is a sequence of its own, from a prompt that ends what was said before it; what a window says is the
    history of the next, unless it was cut or repeats itself. Where the language is not known, a sequence of one token
    finds it in the first window. Chunks hold ``token_ids`` as they come, without the end's, and the window they
    belong to.
    """

    def __init__(self, spec: WhisperSpec) -> None:
        self._spec = spec
        self._language_of = {value: code for code, value in spec.languages.items()}
        # Stands for a sequence whose prompt is not known yet where a request's needs are checked.
        rows = min(spec.longest_history + 5, spec.max_positions - 1)
        self._longest = Segment(Prompt(torch.zeros(rows, 1, dtype=torch.int64)), spec.max_positions - rows)

    def parse(self, request_id: str, payload: Payload) -> Request:
        windows = [self._window(window) for window in payload.get("windows") or ()]
        if not windows:
            raise InvalidRequest("there is no audio", param="file")
        transcript = Transcript(
            windows=windows,
            task=self._task(payload),
            timestamps=bool(payload.get("timestamps")),
            language=self._language(payload),
            history=[int(i) for i in payload.get("history") or ()],
            told=len(payload.get("history") or ()),
            left=whole_number(payload, "max_new_tokens", len(windows) * self._spec.max_positions),
            duration=float(payload.get("duration", windows[-1].end)),
        )
        if any(not 0 <= i < self._spec.vocab_size for i in transcript.history):
            raise InvalidRequest("the prompt has ids that the model does not know", param="prompt")
        if transcript.left < 1:
            raise InvalidRequest(f"max_new_tokens must be 1 or more, not {transcript.left}", param="max_new_tokens")
        transcript.detecting = bool(self._spec.languages) and transcript.language is None
        first = self._segment(transcript)
        later = len(windows) - 1 + transcript.detecting
        return Request(
            request_id,
            first.prompt,
            max_outputs=first.max_outputs,
            sampling=parse_sampling(payload),
            followers=deque([self._longest] * later),
            source=first.source,
            frame_limit=self._plan(transcript, at=0),
            task=transcript,
        )

    def take(self, request: Request, row: list[int]) -> bool:
        transcript: Transcript = request.task
        token = row[0]
        request.outputs.append(row)
        if transcript.detecting:
            transcript.language, transcript.detecting = token, False
            self._prepare(request, self._segment(transcript, heard=True), self._plan(transcript, at=0))
            return True
        if transcript.ended:
            transcript.at, transcript.ended, transcript.tokens = transcript.at + 1, False, []
        request.frame_end = next_times(request.frame_end, token, self._spec.timestamp_begin)
        if token != self._spec.eos_id:
            transcript.tokens.append(token)
            if not request.is_at_limit:
                return False
        self._end_window(request, transcript, cut=token != self._spec.eos_id)
        return True

    def _end_window(self, request: Request, transcript: Transcript, *, cut: bool) -> None:
        transcript.ended = True
        transcript.left -= len(transcript.tokens)
        transcript.cut = transcript.cut or cut
        if not request.followers:
            return
        if transcript.left <= 0:
            transcript.cut = True
            request.followers.clear()
            return
        astray = cut or repeats_itself(transcript.tokens)
        history = [] if astray else [*transcript.history, *transcript.tokens]
        transcript.history = history[-self._spec.longest_history :]
        at = transcript.at + 1
        self._prepare(request, self._segment(transcript, at=at), self._plan(transcript, at=at))

    def _prepare(self, request: Request, segment: Segment, plan: int) -> None:
        """The sequence that follows is known now, and so are its rules."""
        request.followers[0] = segment
        request.frame_limit = plan
        request.frame_end = -1

    def chunk(self, request: Request) -> Payload | None:
        transcript: Transcript = request.task
        new = transcript.tokens[request.sent :]
        request.sent += len(new)
        if not new and not transcript.ended:
            return None
        window = transcript.windows[transcript.at]
        return {"token_ids": new, "start": window.start, "end": window.end, "ended": transcript.ended}

    def result(self, request: Request) -> Payload:
        transcript: Transcript = request.task
        language = self._language_of.get(transcript.language) if transcript.language is not None else "en"
        steps = ((window.end - window.start) / self._spec.time_step for window in transcript.windows)
        heard = sum(math.ceil(round(each, 6)) for each in steps)
        return {
            "finish_reason": "length" if transcript.cut else "stop",
            "language": language,
            "duration": transcript.duration,
            "input_tokens": heard + transcript.told,
            "input_audio_tokens": heard,
            "output_tokens": request.drawn + len(request.outputs),
        }

    def _segment(self, transcript: Transcript, at: int = 0, *, heard: bool = False) -> Segment:
        """The sequence for a window; or for its language. ``heard``: the sequence before was over this window too."""
        spec, source = self._spec, None if heard else transcript.windows[at].states
        if transcript.detecting:
            return Segment(_prompt([spec.start_id]), 1, source)
        history = [spec.previous_id, *transcript.history] if transcript.history else []
        ids = [*history, *spec.prompt(transcript.language, transcript.task, timestamps=transcript.timestamps)]
        return Segment(_prompt(ids), max(1, min(spec.max_positions - len(ids), transcript.left)), source)

    def _plan(self, transcript: Transcript, at: int) -> int:
        window = transcript.windows[at]
        return plan_of(transcript.mode, int((window.end - window.start - _LEFT_UNHEARD) / self._spec.time_step))

    def _window(self, window: Any) -> Window:
        states = torch.as_tensor(window["encoder_states"])
        shape, most = [*states.shape], self._spec.max_frames
        if states.dim() != 2 or shape[1] != self._spec.width or not states.is_floating_point():
            raise InvalidRequest(
                f"encoder_states must be floats [frames, {self._spec.width}], not {states.dtype} {shape}", param="file"
            )
        if not 1 <= shape[0] <= most:
            raise InvalidRequest(f"encoder_states must have 1 to {most} frames, not {shape[0]}", param="file")
        if not bool(torch.isfinite(states).all()):
            raise NotFinite("encoder_states are")
        return Window(float(window["start"]), float(window["end"]), states)

    def _task(self, payload: Payload) -> str:
        task: str = payload.get("task") or TASKS[0]
        if task not in (self._spec.tasks or TASKS[:1]):
            known = ", ".join(self._spec.tasks or TASKS[:1])
            raise InvalidRequest(f"task {task!r} is not one of this model's: {known}", param="task")
        return task

    def _language(self, payload: Payload) -> int | None:
        code = payload.get("language")
        if code is not None and code not in self._spec.codes:
            raise InvalidRequest(f"language {code!r} is not one of {', '.join(self._spec.codes)}", param="language")
        return None if code is None else self._spec.languages.get(code)


def _prompt(ids: list[int]) -> Prompt:
    return Prompt(torch.tensor(ids, dtype=torch.int64)[:, None])


def repeats_itself(tokens: list[int]) -> bool:
    """Whether they go round in circles."""
    data = (np.asarray(tokens, dtype=np.int64) & 0xFFFF).astype("<u2").tobytes()
    return len(data) > _REPETITIVE * len(zlib.compress(data))
