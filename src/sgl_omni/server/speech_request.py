"""The body of ``POST /v1/audio/speech``: what may be asked, and what the pipeline is then given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, field_validator
from starlette.requests import Request

from sgl_omni.audio.encode import available_formats, check_format
from sgl_omni.config.tasks import SpeechTask
from sgl_omni.errors import InvalidRequest
from sgl_omni.server.json_body import SHOWN_CHARACTERS, Body, Count, Int, check_model, read_body

OPENAI_VOICES = frozenset(
    ["alloy", "ash", "ballad", "cedar", "coral", "echo", "fable", "marin", "nova", "onyx", "sage", "shimmer", "verse"]
)
"""OpenAI's stock voices. A model without a voice of that name speaks them with its default voice."""

# FLAC states its length up front and common readers refuse one that does not, so it streams only when asked to.
WHOLE_BY_DEFAULT = frozenset({"flac"})


class CreateSpeech(Body):
    """OpenAI's request, and five fields of our own. A null counts as not given."""

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


@dataclass(frozen=True, slots=True)
class SpeechCall:
    """A valid request: the entry stage's payload, and how the audio travels."""

    payload: dict[str, Any]
    format: str
    whole: bool
    events: bool


async def read_speech_call(request: Request, task: SpeechTask, models: Sequence[str]) -> SpeechCall:
    """Reads and checks the body. Raises ``InvalidRequest``, or ``HTTPException`` for what is not JSON at all."""
    return speech_call(await read_body(request, CreateSpeech), task, models)


def speech_call(asked: CreateSpeech, task: SpeechTask, models: Sequence[str]) -> SpeechCall:
    """Checks the request against what is served. Raises ``InvalidRequest`` that names the field."""
    check_model(asked.model, models)
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
