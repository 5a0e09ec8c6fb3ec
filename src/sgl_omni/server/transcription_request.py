"""The form of ``POST /v1/audio/transcriptions`` and ``/v1/audio/translations``, and what the pipeline is then given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request

from sgl_omni.config.tasks import TranscriptionTask
from sgl_omni.errors import InvalidRequest
from sgl_omni.server.json_body import SHOWN_CHARACTERS, Body, check_model, parse_fields

Format = Literal["json", "text", "srt", "vtt", "verbose_json"]
SUBTITLES = frozenset({"srt", "vtt"})
STREAMED = frozenset({"json", "text"})
MAX_FIELDS = 32
MAX_FIELD_BYTES = 64 << 10

# How repeated fields are written, with OpenAI's brackets or without.
_LISTS = {"timestamp_granularities[]": "timestamp_granularities", "include[]": "include"}

Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(ge=1, lt=2**31)]


class CreateTranscription(Body):
    """OpenAI's request, and two fields of our own. Values come as text; an empty one counts as not given."""

    model_config = ConfigDict(strict=False, extra="forbid", allow_inf_nan=False)

    model: str
    language: str | None = Field(None, description="Code as in ISO 639-1; found in the audio if left out")
    prompt: str | None = Field(None, description="Text as if said before the audio: names, spelling, style")
    response_format: Format = "json"
    temperature: float | None = Field(None, ge=0.0, le=2.0)
    timestamp_granularities: list[Literal["segment", "word"]] | None = None
    stream: bool = False
    include: list[str] | None = Field(None, description="Accepted for OpenAI's clients where it is empty")
    chunking_strategy: Literal["auto"] | None = Field(None, description="Long audio is always cut at quiet places")
    seed: Int | None = None
    max_new_tokens: Count | None = None


PASSED_ON = ("prompt", "temperature", "seed", "max_new_tokens")


@dataclass(frozen=True, slots=True)
class TranscriptionCall:
    """A valid request: the entry stage's payload, and the shape of the answer."""

    payload: dict[str, Any]
    format: Format
    stream: bool


async def read_transcription_call(
    request: Request, task: TranscriptionTask, models: Sequence[str], *, translate: bool
) -> TranscriptionCall:
    """Reads and checks the form. Raises ``InvalidRequest``, or ``HTTPException`` for what is no form at all."""
    content_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if content_type != "multipart/form-data":
        raise HTTPException(415, f"the body must be multipart/form-data, not {content_type or 'untyped'}")
    async with request.form(max_files=1, max_fields=MAX_FIELDS, max_part_size=MAX_FIELD_BYTES) as form:
        file, fields = _split(form)
        asked = parse_fields(fields, CreateTranscription)
        call = transcription_call(asked, task, models, translate=translate)
        call.payload["audio"] = await _read(file)
    return call


def transcription_call(
    asked: CreateTranscription, task: TranscriptionTask, models: Sequence[str], *, translate: bool
) -> TranscriptionCall:
    """Checks the fields against what is served, the file apart. Raises ``InvalidRequest`` that names the field."""
    check_model(asked.model, models)
    _check_granularities(asked)
    format = asked.response_format
    if format in SUBTITLES and not task.timestamps:
        raise InvalidRequest(f"this model knows no times, so it cannot answer in {format}", "response_format")
    if asked.stream and format not in STREAMED:
        raise InvalidRequest(f"a stream is json or text; {format} is sent whole", "stream")
    if asked.include:
        raise InvalidRequest("include: log probabilities are not available", "include")
    payload: dict[str, Any] = {
        "task": "translate" if translate else "transcribe",
        "timestamps": task.timestamps and format not in STREAMED,
    }
    payload |= {name: value for name in PASSED_ON if (value := getattr(asked, name)) is not None}
    if asked.language is not None:
        payload["language"] = _language(asked.language, task)
    return TranscriptionCall(payload, format, asked.stream)


def _check_granularities(asked: CreateTranscription) -> None:
    if not asked.timestamp_granularities:
        return
    if "word" in asked.timestamp_granularities:
        raise InvalidRequest("times of words are not available; use 'segment'", "timestamp_granularities")
    if asked.response_format != "verbose_json":
        raise InvalidRequest(
            f"timestamp_granularities needs response_format 'verbose_json', not {asked.response_format!r}",
            "timestamp_granularities",
        )


def _language(asked: str, task: TranscriptionTask) -> str:
    code = asked.strip().lower()
    if code not in task.languages:
        known = ", ".join(sorted(task.languages)) or "none; leave it out"
        raise InvalidRequest(f"language {asked[:SHOWN_CHARACTERS]!r} is not known; choose from {known}", "language")
    return code


def _split(form: FormData) -> tuple[UploadFile, dict[str, Any]]:
    """The file and the other fields. Raises ``InvalidRequest`` where the file is missing or a field is repeated."""
    file: UploadFile | None = None
    fields: dict[str, Any] = {}
    for name, value in form.multi_items():
        shown = name[:SHOWN_CHARACTERS]
        if isinstance(value, UploadFile):
            if name != "file":
                raise InvalidRequest(f"{shown!r} must not be a file; the audio belongs in 'file'", shown)
            file = value
        elif name in _LISTS or name in _LISTS.values():
            fields.setdefault(_LISTS.get(name, name), []).append(value)
        elif name == "file":
            raise InvalidRequest("file must be sent as a file, with a filename", "file")
        elif name in fields:
            raise InvalidRequest(f"{shown!r} is given more than once", shown)
        elif value != "":
            fields[name] = value
    if file is None:
        raise InvalidRequest("file is required: the audio, as a file of the form", "file")
    return file, fields


async def _read(file: UploadFile) -> bytes:
    data = await file.read()
    if not data:
        raise InvalidRequest("the file is empty", "file")
    return data
