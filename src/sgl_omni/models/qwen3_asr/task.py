"""The host side: windows of one recording, each a sequence of its own, one after another."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from sgl_omni.engine.interface import Payload
from sgl_omni.engine.request import Request, Segment
from sgl_omni.engine.task import InputSpec, Task, parse_sampling, whole_number
from sgl_omni.errors import InvalidRequest
from sgl_omni.models.text_llm.task import tokens_at_once

_OUTPUTS_PER_ROW = 2
_OUTPUTS_BESIDE = 64
"""A second of audio is 13 rows. Nobody says 26 tokens a second, so what says more goes round in circles."""


@dataclass(slots=True)
class Transcript:
    """A request's state in the engine. ``spans``: start and end of each window, in seconds; ``at``: which is written.

    ``left``: tokens that may still be said in all. ``ended``: the window has, with an end id where ``has_end``, and
    only its successor is to come. ``cut``: a limit ended a window, not the model. ``heard``: rows of audio; ``told``:
    tokens of the caller's prompt.
    """

    spans: list[tuple[float, float]]
    language: str | None
    left: int
    duration: float
    at: int = 0
    ended: bool = False
    has_end: bool = False
    cut: bool = False
    heard: int = 0
    told: int = 0


class AsrTask(Task):
    """Payloads have ``windows`` and ``embeddings``, see ``Preprocessor`` and ``WindowEncoder``, and options.

    Chunks are ``{"token_ids", "start", "end", "ended", "language"}``, of one window each, without its end id;
    ``language`` is the code that was asked for, if any. While many requests run, a chunk has several tokens.
    """

    def __init__(
        self, inputs: InputSpec, *, eos_ids: Sequence[int], pool_tokens: int, max_positions: int | None
    ) -> None:
        """``pool_tokens``: what the KV pool holds. ``max_positions``: what the model can attend over."""
        self._inputs = inputs
        self.end_ids = frozenset(eos_ids)
        # The last output is never run, so it takes neither a position nor room in the pool.
        self._room, self._what = min(
            (pool_tokens + 1, "the KV pool holds"),
            (max_positions + 1 if max_positions else pool_tokens + 1, "the model attends over"),
        )

    def parse(self, request_id: str, payload: Payload) -> Request:
        windows = list(payload.get("windows") or ())
        if not windows:
            raise InvalidRequest("there is no audio", param="file")
        segments = self._segments(windows, payload["embeddings"])
        most = sum(segment.max_outputs for segment in segments)
        left = whole_number(payload, "max_new_tokens", most)
        if left < 1:
            raise InvalidRequest(f"max_new_tokens must be 1 or more, not {left}", param="max_new_tokens")
        first, *others = segments
        return Request(
            request_id,
            first.prompt,
            max_outputs=min(first.max_outputs, left),
            sampling=parse_sampling(payload),
            followers=deque(others),
            task=Transcript(
                spans=[(float(window["start"]), float(window["end"])) for window in windows],
                language=payload.get("language"),
                left=left,
                duration=float(payload["duration"]),
                heard=sum(len(window["tags"]) for window in windows),
                told=int(payload.get("context_tokens", 0)),
            ),
        )

    def _segments(self, windows: Sequence[dict[str, Any]], embeddings: Any) -> list[Segment]:
        """Raises ``InvalidRequest`` where one has no room for an answer."""
        rows = torch.as_tensor(embeddings).split([len(window["tags"]) for window in windows])
        segments = []
        for window, own in zip(windows, rows, strict=True):
            first = int(window["audio_from"])
            prompt = self._inputs.prompt(
                {
                    "prompt_ids": window["prompt_ids"],
                    "inserted_embeddings": own,
                    "inserted_at": np.arange(first, first + len(own)),
                    "inserted_tags": window["tags"],
                }
            )
            room = self._room - len(prompt)
            if room < 1:
                raise InvalidRequest(
                    f"the prompt and {window['end'] - window['start']:.1f} s of audio make {len(prompt)} tokens; "
                    f"{self._what} {self._room - 1}, the answer's included",
                    "file",
                )
            segments.append(Segment(prompt, min(room, _OUTPUTS_PER_ROW * len(own) + _OUTPUTS_BESIDE)))
        return segments

    def take(self, request: Request, row: list[int]) -> bool:
        transcript: Transcript = request.task
        if transcript.ended:
            transcript.at, transcript.ended, transcript.has_end = transcript.at + 1, False, False
        request.outputs.append(row)
        transcript.has_end = row[0] in self.end_ids
        if not transcript.has_end and not request.is_at_limit:
            return False
        self._end_window(request, transcript)
        return True

    def _end_window(self, request: Request, transcript: Transcript) -> None:
        transcript.ended = True
        transcript.left -= len(request.outputs)
        transcript.cut = transcript.cut or not transcript.has_end
        if not request.followers:
            return
        if transcript.left <= 0:
            transcript.cut = True
            request.followers.clear()
            return
        following = request.followers[0]
        request.followers[0] = replace(following, max_outputs=min(following.max_outputs, transcript.left))

    def quiet_rows(self, request: Request) -> int:
        if request.task.ended:
            return 0  # the first row of a window must be taken by itself
        return request.max_outputs - 1 - len(request.outputs)

    def chunk(self, request: Request) -> Payload | None:
        transcript: Transcript = request.task
        new = [row[0] for row in request.outputs[request.sent :]]
        request.sent = len(request.outputs)
        request.due = request.sent + tokens_at_once(self.running)
        if transcript.has_end:
            new.pop()
        if not new and not transcript.ended:
            return None
        start, end = transcript.spans[transcript.at]
        return {
            "token_ids": new,
            "start": start,
            "end": end,
            "ended": transcript.ended,
            "language": transcript.language,
        }

    def result(self, request: Request) -> Payload:
        transcript: Transcript = request.task
        return {
            "finish_reason": "length" if transcript.cut else "stop",
            "duration": transcript.duration,
            "input_tokens": transcript.heard + transcript.told,
            "input_audio_tokens": transcript.heard,
            "output_tokens": request.drawn + len(request.outputs),
        }
