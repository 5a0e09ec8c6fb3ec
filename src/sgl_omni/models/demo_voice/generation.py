"""One request inside the engine: its pieces, the delay pattern of the piece in progress, and its limits."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sgl_omni.engine.interface import EngineOutput, Payload
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
        if request.top_k < 1:
            raise InvalidRequest("top_k must be 1 or more", param="top_k")
        if request.max_frames < 1:
            raise InvalidRequest("max_new_tokens must be 1 or more", param="max_new_tokens")
        return request

    @property
    def greedy(self) -> bool:
        return self.temperature < LOWEST_TEMPERATURE

    def sampler(self) -> Sampler | None:
        return None if self.greedy else Sampler(self.temperature, self.top_k, self.seed)


@dataclass(slots=True)
class _Piece:
    """Audio rows of the piece in progress: column k of row s is codebook k of frame s - k."""

    frame_limit: int
    rows: list[list[int]] = field(default_factory=list[list[int]])
    end: int | None = None
    cut: bool = False

    def append(self, row: list[int], spec: VoiceSpec) -> None:
        """Takes the sampled row; writes the delay pattern's own ids where it has no code."""
        step = len(self.rows)
        if self.end is None and (row[0] == spec.eos_id or step >= self.frame_limit):
            self.cut = row[0] != spec.eos_id
            self.end = step
        for column in range(spec.num_codebooks):
            before = step < column
            after = self.end is not None and step >= self.end + column
            if before or after:
                row[column] = spec.eos_id if column == 0 and step == self.end else spec.pad_id
        self.rows.append(row)

    def complete_frames(self, delay: int) -> int:
        """Frames whose every codebook is known; ``delay`` rows separate the first codebook from the last."""
        known = max(0, len(self.rows) - delay)
        return known if self.end is None else min(known, self.end)

    def finished(self, delay: int) -> bool:
        return self.end is not None and len(self.rows) >= self.end + delay

    def codes(self, start: int, stop: int, columns: int) -> np.ndarray:
        """Codes [stop - start, columns] of complete frames."""
        frames = [[self.rows[f + k][k] for k in range(columns)] for f in range(start, stop)]
        return np.asarray(frames, dtype=np.int16).reshape(-1, columns)


class Generation:
    """A request that holds a cache row."""

    def __init__(self, request: SpeechRequest, row: int, spec: VoiceSpec, right_context: int) -> None:
        self.request = request
        self.row = row
        self.sampler = request.sampler()
        self.position = 0
        self.finished = False
        self._spec = spec
        self._delay = spec.num_codebooks - 1
        self._right_context = right_context
        self._next_piece = 0
        self._frames = 0
        self._input_tokens = 0
        self._cut = False
        self._piece: _Piece | None = None
        self._sent = 0
        self._chunk_start = 0

    @property
    def needs_prefill(self) -> bool:
        return self._piece is None

    @property
    def next_ids(self) -> list[int]:
        assert self._piece is not None
        return self._piece.rows[-1]

    def begin_piece(self) -> list[list[int]]:
        """Starts the next piece; returns the rows of its prompt, to be run before ``take``."""
        prompt = prompt_rows(self.request.pieces[self._next_piece], self.request.voice, self._spec)
        self._piece = _Piece(min(self._spec.max_frames, self.request.max_frames - self._frames))
        self._next_piece += 1
        self._input_tokens += len(prompt)
        self.position = len(prompt)
        self._sent = self._chunk_start = 0
        return prompt

    def take(self, row: list[int]) -> EngineOutput | None:
        """Takes the ids that the last step chose; returns what can be handed on, if anything."""
        piece, columns = self._piece, self._spec.num_codebooks
        assert piece is not None
        piece.append(row, self._spec)
        frames, ended = piece.complete_frames(self._delay), piece.finished(self._delay)
        ready = ready_chunks(self._chunk_start, frames, self._right_context, ended)
        if not ready and not ended:
            return None
        codes = piece.codes(self._sent, frames, columns)
        self._sent = frames
        self._chunk_start = ready[-1][1] if ready else self._chunk_start
        output = EngineOutput(
            self.request.id, chunks=[{"codes": codes, "piece_end": ended, "speed": self.request.speed}]
        )
        if ended:
            self._end_piece(piece)
        if self.finished:
            output.result = self._result()
        return output

    def _end_piece(self, piece: _Piece) -> None:
        assert piece.end is not None
        self._frames += piece.end
        self._cut = self._cut or piece.cut
        self._piece = None
        out_of_pieces = self._next_piece == len(self.request.pieces)
        out_of_frames = self._frames >= self.request.max_frames
        self._cut = self._cut or (out_of_frames and not out_of_pieces)
        self.finished = out_of_pieces or out_of_frames

    def _result(self) -> Payload:
        return {
            "finish_reason": "length" if self._cut else "stop",
            "input_tokens": self._input_tokens,
            "output_tokens": self._frames,
        }
