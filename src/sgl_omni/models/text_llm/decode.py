"""The terminal stage: tokens to text, as they come, up to the first stop text. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sgl_omni.runtime.stage import Payload, Request, StreamStage
from sgl_omni.text.stops import StopFinder
from sgl_omni.text.tokenizer import Detokenizer, TextTokenizer


@dataclass(slots=True)
class Answer:
    """One answer's text so far."""

    words: Detokenizer
    stops: StopFinder = field(default_factory=lambda: StopFinder(()))
    said: list[str] = field(default_factory=list[str])

    def take(self, ids: Sequence[int]) -> str:
        return self._say(self.stops.feed(self.words.feed(ids)))

    def end(self) -> str:
        return self._say(self.stops.feed(self.words.end()) + self.stops.end())

    def _say(self, text: str) -> str:
        if text:
            self.said.append(text)
        return text


class TextDecoder(StreamStage[Answer]):
    """Takes ``TextTask``'s chunks and result; yields ``{"text"}`` and ends with the whole text."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer

    def open(self, request: Request) -> Answer:
        return Answer(Detokenizer(self._tokenizer))

    def feed(self, state: Answer, chunk: Payload) -> Iterable[Payload]:
        if "stop" in chunk:
            state.stops = StopFinder(chunk["stop"])
        text = state.take(chunk["token_ids"])
        return [{"text": text}] if text else []

    def flush(self, state: Answer) -> Iterable[Payload]:
        text = state.end()
        return [{"text": text}] if text else []

    def result(self, state: Answer, payload: Payload) -> Payload:
        if "token_ids" in payload:
            state.stops = StopFinder(payload["stop"])
            state.take(payload["token_ids"])
            state.end()
        return {
            "text": "".join(state.said),
            "finish_reason": "stop" if state.stops.found else payload["finish_reason"],
            "input_tokens": payload["input_tokens"],
            "output_tokens": payload["output_tokens"],
        }
