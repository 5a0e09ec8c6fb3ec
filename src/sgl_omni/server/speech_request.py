"""The body of ``POST /v1/audio/speech``: what may be asked, and what the pipeline is then given."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from starlette.exceptions import HTTPException
from starlette.requests import Request

from sgl_omni.audio.encode import available_formats, check_format
from sgl_omni.config.tasks import SpeechTask
from sgl_omni.errors import InvalidRequest
from sgl_omni.server.errors import ModelNotFound

OPENAI_VOICES = frozenset(
    ["alloy", "ash", "ballad", "cedar", "coral", "echo", "fable", "marin", "nova", "onyx", "sage", "shimmer", "verse"]
)
"""OpenAI's stock voices. A model without a voice of that name speaks them with its default voice."""

# FLAC states its length up front and common readers refuse one that does not, so it streams only when asked to.
WHOLE_BY_DEFAULT = frozenset({"flac"})

Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(ge=1, lt=2**31)]


class CreateSpeech(BaseModel):
    """OpenAI's request, and five fields of our own. A null counts as not given."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    model: str
    input: str
    voice: str | None = Field(None, description="A voice's name or {'id': name}; default: the model's own")
    response_format: str | None = Field(None, description="mp3 (default where available), opus, flac, wav or pcm")
    speed: float = Field(1.0, ge=0.25, le=4.0)
    stream_format: Literal["audio", "sse"] = "audio"
    instructions: str | None = Field(None, description="Accepted for OpenAI's clients; has no effect")
    stream: bool | None = Field(
        None, description="false: send the whole file at once, with an exact header. Default: true, but for flac"
    )
    seed: Int | None = None
    temperature: float | None = Field(None, ge=0.0, le=2.0)
    top_k: Count | None = None
    max_new_tokens: Count | None = None

    @field_validator("voice", mode="before")
    @classmethod
    def _voice_by_id(cls, voice: object) -> object:
        return voice["id"] if isinstance(voice, dict) and set(voice) == {"id"} else voice


SAMPLING_FIELDS = ("seed", "temperature", "top_k", "max_new_tokens")


NAMED_MISTAKES = 10
"""Wrong fields that one refusal explains: a body of a million of them must not keep the server busy."""

SHOWN_CHARACTERS = 100
"""What is quoted of a caller's own text."""


@dataclass(frozen=True, slots=True)
class SpeechCall:
    """A valid request: the entry stage's payload, and how the audio travels."""

    payload: dict[str, Any]
    format: str
    whole: bool
    events: bool


async def read_speech_call(request: Request, task: SpeechTask, models: Sequence[str]) -> SpeechCall:
    """Reads and checks the body. Raises ``InvalidRequest``, or ``HTTPException`` for what is not JSON at all."""
    content_type = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if content_type != "application/json":
        raise HTTPException(415, f"the body must be application/json, not {content_type or 'untyped'}")
    return speech_call(parse_speech(await request.body()), task, models)


def parse_speech(body: bytes) -> CreateSpeech:
    """Raises ``InvalidRequest`` for malformed JSON, and for wrong fields, all of them named."""
    if not body.strip():
        raise InvalidRequest("the request body is empty; send a JSON object")
    try:
        fields = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"the request body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidRequest(f"the request body must be a JSON object, not {type(fields).__name__}")
    try:
        return CreateSpeech.model_validate({key: value for key, value in fields.items() if value is not None})
    except ValidationError as error:
        raise _invalid(error) from None


def speech_call(asked: CreateSpeech, task: SpeechTask, models: Sequence[str]) -> SpeechCall:
    """Checks the request against what is served. Raises ``InvalidRequest`` that names the field."""
    if asked.model not in models:
        raise ModelNotFound(f"model {asked.model[:SHOWN_CHARACTERS]!r} is not served here; use {models[0]!r}", "model")
    _check_input(asked.input, task.max_input_characters)
    format = _default_format(task.sample_rate) if asked.response_format is None else asked.response_format
    check_format(format, task.sample_rate)
    events = asked.stream_format == "sse"
    if events and asked.stream is False:
        raise InvalidRequest("stream_format 'sse' is a stream; leave out stream or set it to true", "stream")
    whole = not events and (format in WHOLE_BY_DEFAULT if asked.stream is None else not asked.stream)
    payload: dict[str, Any] = {"input": asked.input, "voice": voice_name(asked.voice, task), "speed": asked.speed}
    given = {name: value for name in SAMPLING_FIELDS if (value := getattr(asked, name)) is not None}
    return SpeechCall(payload | given, format, whole, events)


def voice_name(asked: str | None, task: SpeechTask) -> str:
    """The model's voice for a name; raises ``InvalidRequest`` that lists the voices."""
    if asked is None:
        return task.default_voice
    if asked in task.voices:
        return asked
    if asked in OPENAI_VOICES:
        return task.default_voice
    raise InvalidRequest(
        f"voice {asked[:SHOWN_CHARACTERS]!r} is not known; choose from {', '.join(task.voices)}", "voice"
    )


def _check_input(text: str, limit: int) -> None:
    if not text.strip():
        raise InvalidRequest("input is empty; give the text to speak", "input")
    if len(text) > limit:
        raise InvalidRequest(f"input has {len(text)} characters; the limit is {limit}", "input")


def _default_format(sample_rate: int) -> str:
    return "mp3" if "mp3" in available_formats(sample_rate) else "wav"


def _invalid(error: ValidationError) -> InvalidRequest:
    found = [(str(each["loc"][0]), each["type"], each["msg"]) for each in error.errors(include_url=False)]
    message = "; ".join(_explain(*each) for each in found[:NAMED_MISTAKES])
    more = len(found) - NAMED_MISTAKES
    return InvalidRequest(f"{message}; and {more} more" if more > 0 else message, found[0][0][:SHOWN_CHARACTERS])


def _explain(field: str, kind: str, message: str) -> str:
    if kind == "missing":
        return f"{field} is required"
    if kind == "extra_forbidden":
        nearest = difflib.get_close_matches(field[:SHOWN_CHARACTERS], CreateSpeech.model_fields, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        return f"{field[:SHOWN_CHARACTERS]!r} is not a field of this request{hint}"
    return f"{field}: {message[0].lower()}{message[1:]}"
