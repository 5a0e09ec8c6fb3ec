"""Recordings that a speech request gives as the voice to clone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from pydantic import Field

from sgl_omni.config.tasks import SpeechTask
from sgl_omni.errors import InvalidRequest
from sgl_omni.media.source import decode_base64
from sgl_omni.server.json_body import Body

MAX_REFERENCE_BYTES = 16 << 20
"""Of one recording; two minutes of 16-bit stereo at 32 kHz."""

LONGEST_PATH = 4096

Fetch = Callable[[str, str], Awaitable[bytes]]
"""A reference and the field that it stands in, to the file's bytes; see ``MediaSource.fetch``."""


class Reference(Body):
    """A recording and what is said in it."""

    audio: str | None = Field(None, description="data:, http(s): or file: URL, absolute path, or bare base64")
    audio_path: str | None = Field(None, description="Another name of audio")
    text: str | None = Field(None, description="What is said in the recording")


def given_references(
    references: Sequence[Reference] | None, ref_audio: str | None, ref_text: str | None, task: SpeechTask
) -> list[Reference]:
    """The recordings that a request names, either way. Raises ``InvalidRequest`` for what makes no sense."""
    if ref_text is not None and ref_audio is None:
        raise InvalidRequest("ref_text says what is spoken in ref_audio, which is not given", "ref_text")
    found = list(references or ())
    if ref_audio is not None:
        if found:
            raise InvalidRequest("give references or ref_audio, not both", "ref_audio")
        found = [Reference(audio=ref_audio, audio_path=None, text=ref_text)]
    if not found:
        return []
    param = "references" if ref_audio is None else "ref_audio"
    if not task.max_references:
        raise InvalidRequest("this model does not clone voices; leave out references", param)
    if len(found) > task.max_references:
        raise InvalidRequest(f"{len(found)} references are given; the limit is {task.max_references}", param)
    for index, each in enumerate(found):
        if (each.audio is None) == (each.audio_path is None):
            raise InvalidRequest("a reference has exactly one of audio and audio_path", f"references[{index}].audio")
        if each.text is not None and len(each.text) > task.max_input_characters:
            raise InvalidRequest(
                f"the transcript has {len(each.text)} characters; the limit is {task.max_input_characters}",
                f"references[{index}].text" if ref_audio is None else "ref_text",
            )
        if task.needs_reference_text and not (each.text or "").strip():
            raise InvalidRequest(
                "this model needs what is said in a reference as its text",
                f"references[{index}].text" if ref_audio is None else "ref_text",
            )
    return found


def as_given(error: InvalidRequest, source: str) -> InvalidRequest:
    """The same refusal, of the field that the caller gave. ``source``: how the recordings came, as ``references``,
    ``ref_audio`` or (uploaded) ``voice``."""
    param = error.param or ""
    if source == "references" or not param.startswith("references"):
        return error
    if source == "voice":
        return type(error)(f"the uploaded voice cannot be used: {error}", "voice")
    return type(error)(str(error), "ref_text" if param.endswith(".text") else "ref_audio")


async def fetch_references(references: Sequence[Reference], fetch: Fetch, source: str) -> list[dict[str, Any]]:
    """``{"audio": bytes, "text": str | None}`` of each. Raises ``InvalidRequest`` that names the one at fault.

    ``source``: as for ``as_given``.
    """
    try:
        return [await _fetch(each, f"references[{index}].audio", fetch) for index, each in enumerate(references)]
    except InvalidRequest as error:
        raise as_given(error, source) from error


async def _fetch(reference: Reference, param: str, fetch: Fetch) -> dict[str, Any]:
    given = reference.audio
    if given is None:
        audio = await fetch(reference.audio_path or "", f"{param}_path")
    elif is_bare_base64(given):
        audio = decode_base64(given, param, MAX_REFERENCE_BYTES)
    else:
        audio = await fetch(given, param)
    return reference_of(audio, reference.text, param)


def reference_of(audio: bytes, text: str | None, param: str) -> dict[str, Any]:
    """A reference as stages get it. Raises ``InvalidRequest`` for no audio, and for too much of it."""
    if not audio:
        raise InvalidRequest("the audio is empty", param)
    if len(audio) > MAX_REFERENCE_BYTES:
        raise InvalidRequest(
            f"the audio has {len(audio)} bytes; the limit for a reference is {MAX_REFERENCE_BYTES}", param
        )
    return {"audio": audio, "text": text.strip() or None if text else None}


def is_bare_base64(text: str) -> bool:
    """Neither a URL nor a path. The base64 of an MP3 file may begin with two slashes."""
    if text.startswith("/"):
        return text.startswith("//") or len(text) > LONGEST_PATH
    return ":" not in text[:8]
