"""A request's messages: text for the chat template, and the media in the order in which the prompt has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sgl_omni.errors import InvalidRequest

KINDS = ("image", "audio", "video")


@dataclass(frozen=True, slots=True)
class Medium:
    """Files of one content part: one picture, one recording, or the frames of a video. ``params`` are their places in
    the request, for errors."""

    kind: str
    files: tuple[bytes | memoryview, ...]
    params: tuple[str, ...]

    @property
    def param(self) -> str:
        return self.params[0]


@dataclass(slots=True)
class Conversation:
    """``messages`` as a template takes them, ``media`` in order."""

    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    media: list[Medium] = field(default_factory=list[Medium])

    @classmethod
    def parse(cls, messages: Any, files: Sequence[bytes | memoryview]) -> Conversation:
        """Raises ``InvalidRequest`` that names the part that is not as the chat task says."""
        if not isinstance(messages, list) or not messages:
            raise InvalidRequest("messages must be a list of at least one message", "messages")
        found = cls()
        for i, message in enumerate(messages):
            parts = [
                found._part(part, message["role"], files, f"messages[{i}].content[{j}]")
                for j, part in enumerate(message["content"])
            ]
            texts = [part["text"] for part in parts if part["type"] == "text"]
            content: Any = "".join(texts) if len(texts) == len(parts) else parts
            found.messages.append({"role": message["role"], "content": content})
        if found.messages[-1]["role"] == "assistant":
            raise InvalidRequest("the last message must not be the assistant's, who answers it", "messages")
        return found

    def of_kind(self, kind: str) -> list[Medium]:
        return [medium for medium in self.media if medium.kind == kind]

    def _part(self, part: dict[str, Any], role: str, files: Sequence[bytes | memoryview], param: str) -> dict[str, Any]:
        kind = part["type"]
        if kind == "text":
            return {"type": "text", "text": part["text"]}
        if kind not in KINDS:
            raise InvalidRequest(f"content of type {kind!r} is not one of text, {', '.join(KINDS)}", param)
        if role != "user":
            raise InvalidRequest(f"a message of role {role!r} holds a part of type {kind!r}; only a user's may", param)
        indices = part["media"]
        if not indices or (kind != "video" and len(indices) != 1):
            raise InvalidRequest(f"a part of type {kind!r} cannot have {len(indices)} files", param)
        params = part.get("params") or [param] * len(indices)
        self.media.append(Medium(kind, tuple(files[index] for index in indices), tuple(params)))
        return {"type": kind}
