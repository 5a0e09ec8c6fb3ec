"""Tokens to text as they come, without what the model says about the language. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sgl_omni.models.qwen3_asr.prompt import MARK
from sgl_omni.models.qwen3_asr.spec import UNSPACED
from sgl_omni.runtime.stage import Payload, Request, StreamStage
from sgl_omni.text.tokenizer import Detokenizer, TextTokenizer
from sgl_omni.text.trim import TrimmedText

_LONGEST_HEADER = 24
"""Tokens after which an answer without a mark is taken for text."""


@dataclass(slots=True)
class Window:
    """``header``: tokens that a mark may still make a header; None once it is text that comes. ``ids``: the text's."""

    words: Detokenizer
    header: list[int] | None
    language: str | None
    said: TrimmedText = field(default_factory=TrimmedText)
    ids: list[int] = field(default_factory=list[int])


@dataclass(slots=True)
class Writing:
    """One request's text: the window that is written, and those that are. ``spaced``: whether a space comes between."""

    window: Window | None = None
    text: str = ""
    spaced: bool = True
    language: str | None = None
    segments: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


class AsrText(StreamStage[Writing]):
    """Fed with ``AsrTask``'s chunks; ends with the text, its language, a segment for each window that says something,
    and what the engine said about the request."""

    concurrency = 2

    def __init__(self, tokenizer: TextTokenizer, languages: Mapping[str, str]) -> None:
        """``languages``: codes to the model's names. Raises ``StartupError`` for a vocabulary without the mark."""
        self._tokenizer = tokenizer
        self._mark = tokenizer.id_of(MARK)
        self._codes = {name.lower(): code for code, name in languages.items()}

    def open(self, request: Request) -> Writing:
        return Writing()

    def feed(self, state: Writing, chunk: Payload) -> Iterable[Payload]:
        language, ended = chunk["language"], chunk["ended"]
        if state.window is None:
            state.window = Window(Detokenizer(self._tokenizer), None if language else [], language)
        window = state.window
        ids = [int(token) for token in chunk["token_ids"]]
        if window.header is not None:
            ids = self._after_header(window, window.header + ids, ended=ended)
        window.ids += ids
        piece = window.words.feed(ids) + (window.words.end() if ended else "")
        text = self._said(state, window, piece)
        state.text += text
        if ended:
            self._end_window(state, window, chunk["start"], chunk["end"])
        return [{"text": text}] if text else []

    def _after_header(self, window: Window, ids: list[int], *, ended: bool) -> list[int]:
        """The tokens that are text for certain."""
        if self._mark in ids:
            at = ids.index(self._mark)
            window.language = self.language_in(self._tokenizer.decode(ids[:at]))
            window.header = None
            return ids[at + 1 :]
        if ended or len(ids) > _LONGEST_HEADER:
            window.header = None
            return ids
        window.header = ids
        return []

    def language_in(self, header: str) -> str | None:
        """``language English`` is en; a name that has no code is itself, and None is what is no speech."""
        lines = header.strip().splitlines()
        if not lines:
            return None
        name = lines[0].strip()
        if name.lower().startswith("language"):
            name = name[len("language") :].strip()
        name = name.lower()
        return None if name in ("", "none") else self._codes.get(name, name)

    def _said(self, state: Writing, window: Window, piece: str) -> str:
        """What can be handed on now; the first of a window is kept apart from the window before."""
        first = not window.said.text
        shown = window.said.take(piece)
        if not (shown and first and state.text):
            return shown
        return f" {shown}" if state.spaced and window.language not in UNSPACED else shown

    def _end_window(self, state: Writing, window: Window, start: float, end: float) -> None:
        state.window = None
        state.language = state.language or window.language
        state.spaced = window.language not in UNSPACED
        if window.said.text:
            state.segments.append({"start": start, "end": end, "text": window.said.text, "tokens": window.ids})

    def flush(self, state: Writing) -> Iterable[Payload]:
        return ()

    def result(self, state: Writing, payload: Payload) -> Payload:
        said = sum(len(segment["tokens"]) for segment in state.segments)
        written = {"text": state.text, "language": state.language, "segments": state.segments}
        return {**payload, **written, "output_tokens": said}
