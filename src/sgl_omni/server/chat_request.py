"""The body of ``POST /v1/chat/completions``: what may be asked, and what the pipeline is then given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator
from starlette.requests import Request

from sgl_omni.audio.encode import check_format
from sgl_omni.config.tasks import ChatTask
from sgl_omni.errors import InvalidRequest
from sgl_omni.media.source import MediaSource
from sgl_omni.server.chat_messages import Conversation, Message, fetch
from sgl_omni.server.completions_request import Generation
from sgl_omni.server.json_body import SHOWN_CHARACTERS, Body, Count, check_model, read_body
from sgl_omni.server.speech_request import OPENAI_VOICES

FORMATS = {"pcm16": "pcm"}
"""OpenAI's chats call raw samples otherwise than its speech does."""


class AudioOptions(Body):
    voice: str | None = Field(None, description="A voice's name or {'id': name}; default: the model's own")
    format: str = Field("wav", description="wav, mp3, flac, opus or pcm16")

    @field_validator("voice", mode="before")
    @classmethod
    def _voice_by_id(cls, voice: object) -> object:
        return voice["id"] if isinstance(voice, dict) and set(voice) == {"id"} else voice


class CreateChatCompletion(Generation):
    """OpenAI's request for the next turn of a conversation, and its options."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        **Generation.neutral,
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "logprobs": (False,),
        "top_logprobs": (0,),
        "response_format": ({"type": "text"},),
        "reasoning_effort": (),
        "verbosity": (),
        "web_search_options": (),
    }

    messages: list[Message]
    max_completion_tokens: Count | None = None
    modalities: list[Literal["text", "audio"]] | None = Field(None, description="['text'] or ['text', 'audio']")
    audio: AudioOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables of the model's chat template")
    metadata: Any = Field(None, description="With what follows accepted for OpenAI's clients; no effect")
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    parallel_tool_calls: Any = None
    prediction: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    logprobs: Any = None
    top_logprobs: Any = None
    response_format: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    @property
    def most_tokens(self) -> int | None:
        """Raises ``InvalidRequest`` where OpenAI's two names for it disagree."""
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise InvalidRequest("max_tokens and max_completion_tokens differ; give one", "max_completion_tokens")
        return old if new is None else new


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A valid request: the entry stage's payload, and how the answer travels. ``format`` is none without audio."""

    payload: dict[str, Any]
    model: str
    format: str | None
    stream: bool
    usage: bool


async def read_chat_call(request: Request, task: ChatTask, models: Sequence[str], media: MediaSource) -> ChatCall:
    """Reads and checks the body, then fetches what it refers to.

    Raises ``InvalidRequest`` that names the field, or ``HTTPException`` for what is not JSON at all.
    """
    asked = await read_body(request, CreateChatCompletion)
    check_model(asked.model, models)
    asked.refuse_unsupported()
    modalities = _modalities(asked, task)
    audio = (asked.audio or AudioOptions()) if "audio" in modalities else None
    format = None if audio is None else _format(audio.format, task)
    most = asked.most_tokens
    conversation = Conversation.of(asked.messages, task.inputs)
    payload = {
        "messages": conversation.messages,
        "modalities": modalities,
        "voice": None if audio is None else _voice(audio.voice, task),
        **({} if most is None else {"max_new_tokens": most}),
        **({"template": asked.chat_template_kwargs} if asked.chat_template_kwargs else {}),
        **asked.options(),
        "media": await fetch(conversation.files, media),
    }
    return ChatCall(payload, asked.model, format, asked.stream, asked.wants_usage)


def _modalities(asked: CreateChatCompletion, task: ChatTask) -> list[str]:
    wanted = set(asked.modalities or ["text"])
    if "text" not in wanted:
        raise InvalidRequest("audio comes with its text: modalities is ['text'] or ['text', 'audio']", "modalities")
    if "audio" in wanted and task.audio_output is None:
        raise InvalidRequest("this model does not speak; leave audio out of modalities", "modalities")
    if "audio" not in wanted and asked.audio is not None:
        raise InvalidRequest("audio has no effect unless modalities is ['text', 'audio']", "audio")
    return ["text", "audio"] if "audio" in wanted else ["text"]


def _format(asked: str, task: ChatTask) -> str:
    assert task.sample_rate is not None, "a task with audio says its rate"
    format = FORMATS.get(asked, asked)
    check_format(format, task.sample_rate, "audio.format")
    return format


def _voice(asked: str | None, task: ChatTask) -> str | None:
    if asked is None or (asked in OPENAI_VOICES and asked not in task.voices):
        return task.default_voice
    found = next((voice for voice in task.voices if voice.lower() == asked.lower()), None)
    if found is None:
        raise InvalidRequest(
            f"voice {asked[:SHOWN_CHARACTERS]!r} is not known; choose from {', '.join(task.voices)}", "audio.voice"
        )
    return found
