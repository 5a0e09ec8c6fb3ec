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
from sgl_omni.media.source import MediaSource
from sgl_omni.server.json_body import SHOWN_CHARACTERS, Body, Count, Int, TopK, check_model, read_body
from sgl_omni.server.speech_references import Fetch, Reference, fetch_references, given_references
from sgl_omni.server.voices import VoiceStore

OPENAI_VOICES = frozenset(
    ["alloy", "ash", "ballad", "cedar", "coral", "echo", "fable", "marin", "nova", "onyx", "sage", "shimmer", "verse"]
)
"""OpenAI's stock voices. A model without a voice of that name speaks them with its default voice."""

STAND_INS = OPENAI_VOICES | {"default"}
"""Names that mean the default voice where no voice is called so."""

# FLAC states its length up front and common readers refuse one that does not, so it streams only when asked to.
WHOLE_BY_DEFAULT = frozenset({"flac"})


class SpeechOptions(Body):
    """How a text is to be spoken."""

    voice: str | None = Field(None, description="A voice's name or {'id': name}; default: the model's own")
    references: list[Reference] | None = Field(None, description="Recordings of the voice to clone")
    ref_audio: str | None = Field(None, description="Short for references with this one recording")
    ref_text: str | None = Field(None, description="What is said in ref_audio")
    response_format: str | None = Field(None, description="mp3 (default where available), opus, flac, wav or pcm")
    speed: float = Field(1.0, ge=0.25, le=4.0)
    instructions: str | None = Field(None, description="How to speak; no effect where the model takes none")
    language: str | None = Field(None, description="Where the model has a choice of languages")
    seed: Int | None = None
    temperature: float | None = Field(None, ge=0.0, le=2.0)
    top_k: TopK | None = None
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    repetition_penalty: float | None = Field(None, gt=0.0, le=10.0)
    max_new_tokens: Count | None = None

    @field_validator("voice", mode="before")
    @classmethod
    def _voice_by_id(cls, voice: object) -> object:
        return voice["id"] if isinstance(voice, dict) and set(voice) == {"id"} else voice


class SpokenText(SpeechOptions):
    input: str


class CreateSpeech(SpokenText):
    """OpenAI's request, and fields of our own. A null counts as not given."""

    model: str
    stream_format: Literal["audio", "sse"] = "audio"
    stream: bool | None = Field(
        None, description="false: send the whole file at once, with an exact header. Default: true, but for flac"
    )


SAMPLING_FIELDS = ("seed", "temperature", "top_k", "top_p", "repetition_penalty", "max_new_tokens")


@dataclass(frozen=True, slots=True)
class Spoken:
    """One text to speak: the entry stage's payload, the format of the file, and how recordings were given."""

    payload: dict[str, Any]
    format: str
    source: str


@dataclass(frozen=True, slots=True)
class SpeechCall(Spoken):
    """A valid request, and how its audio travels."""

    whole: bool
    events: bool


async def read_speech_call(
    request: Request, task: SpeechTask, models: Sequence[str], voices: VoiceStore, media: MediaSource
) -> SpeechCall:
    """Reads and checks the body, then fetches what it refers to.

    Raises ``InvalidRequest``, or ``HTTPException`` for what is not JSON at all.
    """
    asked = await read_body(request, CreateSpeech)
    check_model(asked.model, models)
    events = asked.stream_format == "sse"
    if events and asked.stream is False:
        raise InvalidRequest("stream_format 'sse' is a stream; leave out stream or set it to true", "stream")
    spoken = await spoken_text(asked, task, voices, media.fetch)
    whole = not events and (spoken.format in WHOLE_BY_DEFAULT if asked.stream is None else not asked.stream)
    return SpeechCall(spoken.payload, spoken.format, spoken.source, whole, events)


async def spoken_text(asked: SpokenText, task: SpeechTask, voices: VoiceStore, fetch: Fetch) -> Spoken:
    """Checks the wish against what is served. Raises ``InvalidRequest`` that names the field."""
    _check_input(asked.input, task.max_input_characters)
    format = _default_format(task.sample_rate) if asked.response_format is None else asked.response_format
    check_format(format, task.sample_rate)
    payload: dict[str, Any] = {"input": asked.input, "voice": None, "speed": asked.speed}
    payload |= {name: value for name in SAMPLING_FIELDS if (value := getattr(asked, name)) is not None}
    if task.takes_instructions and asked.instructions:
        payload["instructions"] = asked.instructions
    if asked.language is not None:
        payload["language"] = _language(asked.language, task.languages)
    references = given_references(asked.references, asked.ref_audio, asked.ref_text, task)
    uploaded = None if asked.voice is None else voices.find(asked.voice)
    if not references:
        payload["voice"] = None if uploaded else voice_name(asked.voice, task, voices)
        if uploaded is None:
            return Spoken(payload, format, "references")
        return Spoken(payload | {"references": [uploaded.reference]}, format, "voice")
    if asked.voice is not None and (uploaded or asked.voice not in STAND_INS - set(task.voices)):
        raise InvalidRequest("give a voice or references, not both", "voice")
    source = "references" if asked.ref_audio is None else "ref_audio"
    return Spoken(payload | {"references": await fetch_references(references, fetch, source)}, format, source)


def voice_name(asked: str | None, task: SpeechTask, voices: VoiceStore) -> str | None:
    """The model's voice for a name; raises ``InvalidRequest`` that lists the voices."""
    if asked is None:
        return task.default_voice
    own = next((voice for voice in task.voices if voice.lower() == asked.lower()), None)
    if own is not None:
        return own
    if asked in STAND_INS:
        return task.default_voice
    known = [*task.voices, *voices.names()]
    advice = "upload one or give references" if task.max_references else "leave voice out"
    if task.takes_instructions and not task.max_references:
        advice += " and describe one in instructions"
    choice = f"choose from {', '.join(known)}" if known else f"this model has no voices; {advice}"
    raise InvalidRequest(f"voice {asked[:SHOWN_CHARACTERS]!r} is not known; {choice}", "voice")


def _language(asked: str, languages: Sequence[str]) -> str:
    if not languages:
        raise InvalidRequest("this model has no choice of languages; leave language out", "language")
    found = next((each for each in languages if each.lower() == asked.lower()), None)
    if found is None:
        raise InvalidRequest(
            f"language {asked[:SHOWN_CHARACTERS]!r} is not known; choose from {', '.join(languages)}", "language"
        )
    return found


def _check_input(text: str, limit: int) -> None:
    if not text.strip():
        raise InvalidRequest("input is empty; give the text to speak", "input")
    if len(text) > limit:
        raise InvalidRequest(f"input has {len(text)} characters; the limit is {limit}", "input")


def _default_format(sample_rate: int) -> str:
    return "mp3" if "mp3" in available_formats(sample_rate) else "wav"
