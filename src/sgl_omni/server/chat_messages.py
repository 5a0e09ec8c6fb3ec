"""The messages of a chat: OpenAI's parts to those of the pipeline, and the files that they refer to."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from sgl_omni.errors import InvalidRequest
from sgl_omni.media.source import MediaSource, decode_base64
from sgl_omni.server.json_body import Body

MOST_FILES = 1024
MOST_BYTES = 256 << 20
"""All files of a request together."""
_AT_ONCE = 4


def _as_url(value: object) -> object:
    return {"url": value} if isinstance(value, str) else value


def _as_parts(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class MediaUrl(Body):
    url: str
    detail: str | None = Field(None, description="Accepted for OpenAI's clients; has no effect")


class InputAudio(Body):
    data: str = Field(description="A recording's file in base64")
    format: str | None = Field(None, description="Not needed: the file says it")


Url = Annotated[MediaUrl, BeforeValidator(_as_url, json_schema_input_type=MediaUrl | str)]


class Part(Body):
    """A part of a message: the field that is called as its type says, but for ``refusal``, which is a text."""

    type: Literal["text", "refusal", "image_url", "input_audio", "audio_url", "video_url", "video"]
    text: str | None = None
    refusal: str | None = None
    image_url: Url | None = None
    input_audio: InputAudio | None = None
    audio_url: Url | None = None
    video_url: Url | None = None
    video: list[str] | None = Field(None, min_length=1, description="URLs of frames, in order")


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[
        list[Part] | None, BeforeValidator(_as_parts, json_schema_input_type=str | list[Part] | None)
    ] = None
    name: str | None = Field(None, description="Accepted for OpenAI's clients; has no effect")
    # An answer of ours may be sent back as it came, so its other fields are known here.
    audio: Any = None
    refusal: str | None = None
    annotations: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None
    tool_call_id: Any = None
    function_call: Any = None


@dataclass(frozen=True, slots=True)
class Reference:
    """A file that a message needs: where it is, or itself in base64. ``param`` is its place in the request."""

    source: str
    param: str
    is_base64: bool = False


@dataclass(frozen=True, slots=True)
class Conversation:
    """``messages`` as ``config.tasks.ChatTask`` has them, and the files in the order of their indices."""

    messages: list[dict[str, Any]]
    files: list[Reference]

    @classmethod
    def of(cls, messages: Sequence[Message], inputs: Sequence[str]) -> Conversation:
        """``inputs``: kinds of parts that the model takes. Raises ``InvalidRequest`` that names the place."""
        if not messages:
            raise InvalidRequest("messages is empty; say something", "messages")
        found = cls([], [])
        for i, message in enumerate(messages):
            found._add(message, inputs, f"messages[{i}]")
        return found

    def _add(self, message: Message, inputs: Sequence[str], place: str) -> None:
        if message.role in ("tool", "function") or message.tool_calls or message.function_call:
            raise InvalidRequest(f"{place}: tools are not supported by this server", place)
        if message.content is None:
            words = "; recordings of earlier answers are not kept: send the transcript" if message.audio else ""
            raise InvalidRequest(f"{place}.content is required{words}", f"{place}.content")
        parts = [self._part(part, inputs, f"{place}.content[{j}]") for j, part in enumerate(message.content)]
        role = "system" if message.role == "developer" else message.role
        self.messages.append({"role": role, "content": parts})

    def _part(self, part: Part, inputs: Sequence[str], place: str) -> dict[str, Any]:
        value = getattr(part, part.type)
        if value is None:
            raise InvalidRequest(f"{place}.{part.type} is required", f"{place}.{part.type}")
        kind = KINDS[part.type]
        if kind not in inputs:
            raise InvalidRequest(f"{place}: this model takes {' and '.join(inputs)}, not {kind}", place)
        if kind == "text":
            return {"type": "text", "text": value}
        first = len(self.files)
        self.files.extend(_references(value, f"{place}.{part.type}"))
        if len(self.files) > MOST_FILES:
            raise InvalidRequest(f"a request may have {MOST_FILES} files at most, frames of videos included", place)
        params = [file.param for file in self.files[first:]]
        return {"type": kind, "media": list(range(first, len(self.files))), "params": params}


KINDS = {
    "text": "text",
    "refusal": "text",
    "image_url": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "video",
    "video": "video",
}


def _references(value: MediaUrl | InputAudio | list[str], place: str) -> list[Reference]:
    if isinstance(value, InputAudio):
        return [Reference(value.data, f"{place}.data", is_base64=True)]
    if isinstance(value, MediaUrl):
        return [Reference(value.url, f"{place}.url")]
    return [Reference(url, f"{place}[{k}]") for k, url in enumerate(value)]


async def fetch(files: Sequence[Reference], media: MediaSource) -> list[bytes]:
    """The files, a few at a time. Raises ``InvalidRequest`` for one that is not to be had, or too much in all."""
    found: list[bytes] = []
    size = 0
    for start in range(0, len(files), _AT_ONCE):
        some = files[start : start + _AT_ONCE]
        async with _together() as group:
            tasks = [group.create_task(_fetch_one(file, media)) for file in some]
        for file, task in zip(some, tasks, strict=True):
            found.append(task.result())
            size += len(found[-1])
            if size > MOST_BYTES:
                raise InvalidRequest(f"the files of a request may have {MOST_BYTES} bytes in all", file.param)
    return found


async def _fetch_one(file: Reference, media: MediaSource) -> bytes:
    if file.is_base64:
        return await asyncio.to_thread(decode_base64, file.source, file.param)
    return await media.fetch(file.source, file.param)


class _together(asyncio.TaskGroup):
    """A task group that raises the first error itself, as the caller of one coroutine would see it."""

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            await super().__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
