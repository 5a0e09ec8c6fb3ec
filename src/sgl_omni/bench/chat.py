"""Chats as a load: what is asked, and what the events of a streamed answer tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from sgl_omni.bench.events import EventStream


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


class ChatStream(EventStream):
    """The server-sent events of one answer of a chat."""

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
        if (error := super().error) is not None:
            return error
        return None if self.times and self.tokens else "no text in the answer"
