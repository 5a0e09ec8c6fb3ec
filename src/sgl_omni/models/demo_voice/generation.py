"""A request inside the engine: its pieces, the codes that are handed on, and its limits."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sgl_omni.engine.delay import DelayPattern
from sgl_omni.engine.interface import Payload
from sgl_omni.engine.request import Prompt, Request, Segment
from sgl_omni.engine.task import Task
from sgl_omni.errors import InvalidRequest
from sgl_omni.models.demo_voice.chunking import ready_chunks
from sgl_omni.models.demo_voice.model import prompt_rows
from sgl_omni.models.demo_voice.sampling import LOWEST_TEMPERATURE, Sampler
from sgl_omni.models.demo_voice.spec import VoiceSpec
from sgl_omni.models.demo_voice.text import ALPHABET


def _checked(payload: Payload, key: str, kinds: type | tuple[type, ...], param: str) -> Any:
    value = payload.get(key)
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise InvalidRequest(f"{key} is missing or of the wrong type: {value!r}", param=param)
    return value


@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """A validated request. ``max_frames`` bounds the frames of all pieces together."""

    id: str
    pieces: tuple[str, ...]
    voice: int
    speed: float
    temperature: float
    top_k: int
    seed: int | None
    max_frames: int

    @classmethod
    def parse(cls, request_id: str, payload: Payload, spec: VoiceSpec) -> SpeechRequest:
        """Raises ``InvalidRequest`` for what this model can never speak."""
        pieces = _checked(payload, "pieces", list, "input")
        if not pieces:
            raise InvalidRequest("there is nothing to speak", param="input")
        for piece in pieces:
            if not isinstance(piece, str) or not piece or not set(piece) <= set(ALPHABET):
                raise InvalidRequest(f"piece {piece!r} is not normalised text", param="input")
            if len(piece) > spec.max_text_length:
                raise InvalidRequest(
                    f"a piece of {len(piece)} characters exceeds the model's {spec.max_text_length}", param="input"
                )
        request = cls(
            id=request_id,
            pieces=tuple(pieces),
            voice=_checked(payload, "voice", int, "voice"),
            speed=float(payload.get("speed", 1.0)),
            temperature=float(_checked(payload, "temperature", (int, float), "temperature")),
            top_k=_checked(payload, "top_k", int, "top_k"),
            seed=None if payload.get("seed") is None else _checked(payload, "seed", int, "seed"),
            max_frames=_checked(payload, "max_frames", int, "max_new_tokens"),
        )
        if not 0 <= request.voice < len(spec.voices):
            raise InvalidRequest(f"voice {request.voice} is not one of 0..{len(spec.voices) - 1}", param="voice")
        if not (math.isfinite(request.temperature) and request.temperature >= 0):
            raise InvalidRequest("temperature must be 0 or more", param="temperature")
        if request.top_k < -1:
            raise InvalidRequest("top_k must be 1 or more, or 0 or -1 for all", param="top_k")
        if request.max_frames < 1:
            raise InvalidRequest("max_new_tokens must be 1 or more", param="max_new_tokens")
        return request

    @property
    def greedy(self) -> bool:
        return self.temperature < LOWEST_TEMPERATURE

    def sampler(self) -> Sampler | None:
        return None if self.greedy else Sampler(self.temperature, self.top_k, self.seed)


@dataclass(slots=True)
class Speech:
    """A request's state in the engine: what all its pieces have in common, and the piece in progress.

    ``end`` is the number of frames of the piece, once known; ``cut``: a limit put an end somewhere, not the model.
    """

    request: SpeechRequest
    sampler: Sampler | None
    frame_limit: int
    end: int | None = None
    cut: bool = False
    ended: bool = False
    sent: int = 0
    chunk_start: int = 0
    input_tokens: int = 0
    frames: int = 0


class SpeechTask(Task):
    """The host side of the demo voice: pieces of text to prompts, rows to codes for the vocoder.

    A request speaks its pieces one after another, each from its own prompt.
    """

    def __init__(self, spec: VoiceSpec, right_context: int) -> None:
        """``right_context`` is the vocoder's: codes are handed on when its next chunk can be decoded."""
        self._spec = spec
        self._right_context = right_context
        self._pattern = DelayPattern.staircase(spec.num_codebooks, spec.eos_id, spec.pad_id)

    def parse(self, request_id: str, payload: Payload) -> Request:
        request = SpeechRequest.parse(request_id, payload, self._spec)
        limit = min(self._spec.max_frames, request.max_frames)
        prompts = [Prompt(torch.tensor(prompt_rows(piece, request.voice, self._spec))) for piece in request.pieces]
        return Request(
            request_id,
            prompts[0],
            max_outputs=limit + self._pattern.longest,
            followers=deque(Segment(prompt, limit + self._pattern.longest) for prompt in prompts[1:]),
            task=Speech(request, request.sampler(), limit),
        )

    def take(self, request: Request, row: list[int]) -> bool:
        speech: Speech = request.task
        if speech.ended:
            self._begin_piece(speech)
        step = len(request.outputs)
        if speech.end is None and (row[0] == self._spec.eos_id or step >= speech.frame_limit):
            speech.cut = speech.cut or row[0] != self._spec.eos_id
            speech.end = step
        self._pattern.fill(row, step, speech.end)
        request.outputs.append(row)
        speech.ended = speech.end is not None and step + 1 >= speech.end + self._pattern.longest
        if speech.ended:
            self._end_piece(request, speech)
        return speech.ended

    def chunk(self, request: Request) -> Payload | None:
        speech: Speech = request.task
        frames = self._pattern.known_frames(len(request.outputs), speech.end)
        ready = ready_chunks(speech.chunk_start, frames, self._right_context, speech.ended)
        if not ready and not speech.ended:
            return None
        codes = self._pattern.frames(request.outputs, speech.sent, frames)
        speech.sent = frames
        speech.chunk_start = ready[-1][1] if ready else speech.chunk_start
        return {
            "codes": np.asarray(codes, dtype=np.int16).reshape(-1, self._spec.num_codebooks),
            "piece_end": speech.ended,
            "speed": speech.request.speed,
        }

    def result(self, request: Request) -> Payload:
        speech: Speech = request.task
        return {
            "finish_reason": "length" if speech.cut else "stop",
            "input_tokens": speech.input_tokens,
            "output_tokens": speech.frames,
        }

    def _begin_piece(self, speech: Speech) -> None:
        speech.frame_limit = min(self._spec.max_frames, speech.request.max_frames - speech.frames)
        speech.end, speech.ended = None, False
        speech.sent = speech.chunk_start = 0

    def _end_piece(self, request: Request, speech: Speech) -> None:
        assert speech.end is not None
        speech.frames += speech.end
        speech.input_tokens += request.prompt_length
        if speech.frames >= speech.request.max_frames:
            speech.cut = speech.cut or bool(request.followers)
            request.followers.clear()
