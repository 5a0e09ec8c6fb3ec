"""Tokens to text as they come, and to segments of the recording."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sgl_omni.models.whisper.spec import WhisperSpec
from sgl_omni.runtime.stage import Payload, Request, StreamStage
from sgl_omni.text.tokenizer import Detokenizer, TextTokenizer
from sgl_omni.text.trim import TrimmedText


@dataclass(frozen=True, slots=True)
class TokenSegment:
    """``start`` and ``end`` in seconds, ``tokens`` without those that say times."""

    start: float
    end: float
    tokens: list[int]


def cut_at_timestamps(tokens: Sequence[int], start: float, end: float, spec: WhisperSpec) -> list[TokenSegment]:
    """The segments of a window that lies from ``start`` to ``end`` of the recording.

    Text after the last timestamp ends with the window; text before the first begins with it. Times within the silence
    that fills a window up are its end.
    """
    segments: list[TokenSegment] = []
    begun, said = start, list[int]()
    for token in tokens:
        if token < spec.timestamp_begin:
            said += [token] if token < spec.eos_id else []
            continue
        time = min(end, start + (token - spec.timestamp_begin) * spec.time_step)
        if said:
            segments.append(TokenSegment(begun, max(begun, time), said))
        begun, said = time, []
    if said:
        segments.append(TokenSegment(begun, end, said))
    return segments


@dataclass(slots=True)
class Writing:
    """One request's text so far, and the tokens of the window that is being written."""

    detokenizer: Detokenizer
    window: list[int] = field(default_factory=list)
    said: TrimmedText = field(default_factory=TrimmedText)
    segments: list[dict[str, Any]] = field(default_factory=list)


class WhisperText(StreamStage[Writing]):
    """Fed with the engine's chunks; ends with the text, its segments and what the engine said about the request."""

    concurrency = 2

    def __init__(self, spec: WhisperSpec, tokenizer: TextTokenizer) -> None:
        self._spec = spec
        self._tokenizer = tokenizer

    def open(self, request: Request) -> Writing:
        return Writing(Detokenizer(self._tokenizer))

    def feed(self, state: Writing, chunk: Payload) -> Iterable[Payload]:
        tokens = [int(token) for token in chunk["token_ids"]]
        state.window += tokens
        piece = state.detokenizer.feed([token for token in tokens if token < self._spec.eos_id])
        if chunk["ended"]:
            piece += state.detokenizer.end()
            self._end_window(state, chunk["start"], chunk["end"])
        shown = state.said.take(piece)
        return [{"text": shown}] if shown else []

    def _end_window(self, state: Writing, start: float, end: float) -> None:
        for segment in cut_at_timestamps(state.window, start, end, self._spec):
            text = self._tokenizer.decode(segment.tokens)
            found = {"start": segment.start, "end": segment.end, "text": text, "tokens": segment.tokens}
            state.segments.append(found)
        state.window = []
        state.detokenizer = Detokenizer(self._tokenizer)

    def flush(self, state: Writing) -> Iterable[Payload]:
        return ()

    def result(self, state: Writing, payload: Payload) -> Payload:
        said = sum(len(segment["tokens"]) for segment in state.segments)
        return {**payload, "text": state.said.text, "segments": state.segments, "output_tokens": said}
