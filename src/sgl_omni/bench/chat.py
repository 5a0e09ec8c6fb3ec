"""Chats as a load: what is asked, and what the events of a streamed answer tell."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How long answers are. With ``ignore_eos`` each has ``max_tokens``, so that runs can be compared."""

    max_tokens: int = 128
    ignore_eos: bool = False
    temperature: float | None = None

    def request(self, text: str, model: str) -> dict[str, Any]:
        """The body of a streamed chat request."""
        body: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": self.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        return body if self.temperature is None else {**body, "temperature": self.temperature}


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Error(msgspec.Struct):
    message: str


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


class ChatStream:
    """The server-sent events of one answer, read as they come."""

    def __init__(self) -> None:
        self.times: list[float] = []
        """When each piece of text came; pieces that came in one read have the same time."""
        self.tokens = 0
        self._rest = b""
        self._failure: str | None = None
        self._done = False

    def feed(self, data: bytes, now: float) -> None:
        """``now`` is when it came, in seconds of any clock."""
        *whole, self._rest = (self._rest + data).split(b"\n\n")
        for event in whole:
            self._take(event.removeprefix(b"data: "), now)

    def _take(self, event: bytes, now: float) -> None:
        if event == b"[DONE]":
            self._done = True
            return
        try:
            found = msgspec.json.decode(event, type=_Event)
        except msgspec.DecodeError as error:
            self._failure = f"not an event of a chat: {error}"
            return
        if found.error is not None:
            self._failure = found.error.message
        if found.usage is not None:
            self.tokens = found.usage.completion_tokens
        if found.choices and found.choices[0].delta.content:
            self.times.append(now)

    @property
    def error(self) -> str | None:
        """Why the answer does not count: it broke off, or had no text or no count of tokens."""
        if self._failure is not None:
            return self._failure
        if not self._done:
            return "the stream broke off"
        return None if self.times and self.tokens else "no text in the answer"

    @property
    def gaps(self) -> tuple[float, ...]:
        """Times between pieces of text."""
        return tuple(later - earlier for earlier, later in pairwise(self.times))
