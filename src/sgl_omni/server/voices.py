"""Voices that clients upload: kept in memory for the life of the server."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException

from sgl_omni.audio.decode import decode_audio
from sgl_omni.config.tasks import ChatTask, SpeechTask
from sgl_omni.errors import InvalidRequest
from sgl_omni.server.json_body import SHOWN_CHARACTERS
from sgl_omni.server.speech_references import MAX_REFERENCE_BYTES, reference_of

MAX_VOICES = 256
MAX_ALL_BYTES = 256 << 20
MAX_TEXT_BYTES = 1 << 16
NAME = re.compile(r"[^\W_][\w.-]{0,63}")
FIELDS = ("name", "audio_sample", "file", "ref_text", "text", "consent")
RESERVED = frozenset({"default"})


@dataclass(frozen=True, slots=True)
class Voice:
    """``reference`` is what a stage gets: the file's bytes and what is said in it. ``created`` in Unix seconds."""

    name: str
    reference: dict[str, Any]
    seconds: float
    created: int

    def described(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "name": self.name,
            "object": "audio.voice",
            "created_at": self.created,
            "seconds": round(self.seconds, 3),
            "has_text": self.reference["text"] is not None,
        }


class VoiceStore:
    """The uploaded voices of one server, bounded in number and bytes."""

    def __init__(self, task: SpeechTask, *, max_voices: int = MAX_VOICES, max_bytes: int = MAX_ALL_BYTES) -> None:
        self._own = frozenset(voice.lower() for voice in task.voices)
        self._max_voices = max_voices
        self._max_bytes = max_bytes
        self._voices: dict[str, Voice] = {}

    def find(self, name: str) -> Voice | None:
        return self._voices.get(name)

    def names(self) -> tuple[str, ...]:
        return tuple(self._voices)

    def all(self) -> tuple[Voice, ...]:
        return tuple(self._voices.values())

    def check(self, name: str, size: int) -> None:
        """Raises ``InvalidRequest`` where a voice of this name and size in bytes cannot be taken."""
        if not NAME.fullmatch(name):
            raise InvalidRequest(
                "a voice's name has 1 to 64 letters, digits, '.', '_' and '-', and begins with a letter or a digit",
                "name",
            )
        if name.lower() in self._own | RESERVED:
            raise InvalidRequest(f"{name!r} is a name of the model's own; choose another", "name")
        if name in self._voices:
            raise InvalidRequest(f"there is a voice {name!r} already; delete it first", "name")
        if len(self._voices) >= self._max_voices:
            raise InvalidRequest(f"{self._max_voices} voices are uploaded, the most; delete one first", "name")
        used = sum(len(voice.reference["audio"]) for voice in self._voices.values())
        if used + size > self._max_bytes:
            raise InvalidRequest(
                f"{used} of {self._max_bytes} bytes for uploaded voices are in use, and this one has {size}; "
                "delete one first",
                "audio_sample",
            )

    def add(self, voice: Voice) -> None:
        """Raises ``InvalidRequest`` as ``check`` does."""
        self.check(voice.name, len(voice.reference["audio"]))
        self._voices[voice.name] = voice

    def remove(self, name: str) -> bool:
        """Whether there was one."""
        return self._voices.pop(name, None) is not None


def own_voices_router(task: ChatTask) -> APIRouter:
    """The route about voices of a pipeline that speaks in conversations, where none can be uploaded."""
    router = APIRouter(tags=["audio"])

    @router.get("/v1/audio/voices")
    async def list_voices() -> dict[str, Any]:
        """The model's voices."""
        return {"voices": _listed(task.voices), "default": task.default_voice}

    return router


def _listed(names: Sequence[str]) -> list[dict[str, Any]]:
    return [{"id": name, "name": name} for name in names]


def voices_router(task: SpeechTask, store: VoiceStore) -> APIRouter:
    """The routes about voices."""
    router = APIRouter(tags=["audio"])

    @router.get("/v1/audio/voices")
    async def list_voices() -> dict[str, Any]:
        """The model's voices, then the uploaded ones."""
        own = _listed(task.voices)
        return {"voices": [*own, *(voice.described() for voice in store.all())], "default": task.default_voice}

    @router.post("/v1/audio/voices")
    async def upload_voice(request: Request) -> dict[str, Any]:
        """A recording as a voice: a form with `name`, `audio_sample` (a file) and, better, `ref_text`.

        The voice is kept until it is deleted or the server ends.
        """
        if not task.max_references:
            raise InvalidRequest("this model does not clone voices, so none can be uploaded")
        if request.headers.get("content-type", "").split(";")[0].strip().lower() != "multipart/form-data":
            raise HTTPException(415, "the body must be multipart/form-data")
        async with request.form(max_files=4, max_fields=8, max_part_size=MAX_TEXT_BYTES) as form:
            voice = await _read(form, task, store)
        store.add(voice)
        return voice.described()

    @router.delete("/v1/audio/voices/{name}")
    async def delete_voice(name: str) -> dict[str, Any]:
        """Requests in progress with this voice go on."""
        if name in task.voices:
            raise InvalidRequest(f"{name!r} is the model's own voice and stays", "name")
        if not store.remove(name):
            raise HTTPException(404, f"there is no uploaded voice {name[:SHOWN_CHARACTERS]!r}")
        return {"id": name, "object": "audio.voice", "deleted": True}

    return router


async def _read(form: FormData, task: SpeechTask, store: VoiceStore) -> Voice:
    unknown = sorted(set(form) - set(FIELDS))
    if unknown:
        shown = unknown[0][:SHOWN_CHARACTERS]
        raise InvalidRequest(f"{shown!r} is not a field of this form; it has {', '.join(FIELDS)}", shown)
    name, text = _text(form, "name"), _text(form, "ref_text", "text")
    if not name:
        raise InvalidRequest("name is required", "name")
    if text is not None and len(text) > task.max_input_characters:
        raise InvalidRequest(
            f"the transcript has {len(text)} characters; the limit is {task.max_input_characters}", "ref_text"
        )
    audio = await _audio(form)
    store.check(name, len(audio))
    samples = await asyncio.to_thread(
        decode_audio, audio, task.sample_rate, param="audio_sample", max_seconds=task.max_reference_seconds
    )
    seconds = len(samples) / task.sample_rate
    if seconds < task.least_reference_seconds:
        raise InvalidRequest(
            f"the recording lasts {seconds:.2f} s; this model needs at least {task.least_reference_seconds:g} s",
            "audio_sample",
        )
    reference = reference_of(audio, text, "audio_sample")
    if task.needs_reference_text and reference["text"] is None:
        raise InvalidRequest("this model needs what is said in the recording, as ref_text", "ref_text")
    return Voice(name, reference, seconds, int(time.time()))


def _text(form: FormData, *names: str) -> str | None:
    """The value of the field, which may have several names."""
    given = [(name, value) for name in names for value in form.getlist(name)]
    if not given:
        return None
    name, value = given[0]
    if len(given) > 1 or not isinstance(value, str):
        raise InvalidRequest(f"{name} must be given once, as a text", name)
    return value


async def _audio(form: FormData) -> bytes:
    given = [value for name in ("audio_sample", "file") for value in form.getlist(name)]
    if len(given) != 1 or not isinstance(given[0], UploadFile):
        raise InvalidRequest("one file is required, as audio_sample or file", "audio_sample")
    data = await given[0].read(MAX_REFERENCE_BYTES + 1)
    if len(data) > MAX_REFERENCE_BYTES:
        raise InvalidRequest(f"the file has more than the limit of {MAX_REFERENCE_BYTES} bytes", "audio_sample")
    return data
