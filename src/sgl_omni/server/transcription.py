"""``POST /v1/audio/transcriptions`` and ``POST /v1/audio/translations``."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from sgl_omni.config.tasks import TranscriptionTask
from sgl_omni.server.backend import Backend, Payload, RequestHandle
from sgl_omni.server.metrics import Measurement, Metrics
from sgl_omni.server.speech import STREAM_HEADERS, error_event, event, usage
from sgl_omni.server.streaming import PipelineResponse
from sgl_omni.server.subtitles import srt, vtt
from sgl_omni.server.transcription_request import (
    CreateTranscription,
    Format,
    TranscriptionCall,
    read_transcription_call,
)

MEDIA_TYPES: dict[Format, str] = {
    "json": "application/json",
    "verbose_json": "application/json",
    "text": "text/plain; charset=utf-8",
    "srt": "application/x-subrip; charset=utf-8",
    "vtt": "text/vtt; charset=utf-8",
}


def transcription_router(
    backend: Backend,
    task: TranscriptionTask,
    models: Sequence[str],
    metrics: Metrics,
    request_timeout: float | None = None,
) -> APIRouter:
    """The routes of a pipeline that listens. ``models`` are the names it answers to, its own first."""
    router = APIRouter(tags=["audio"])

    async def answer(request: Request, *, translate: bool) -> Response:
        measured = metrics.begin()
        try:
            call = await read_transcription_call(request, task, models, translate=translate)
            handle = backend.submit(call.payload, request_id=request.state.request_id, timeout=request_timeout)
        except BaseException as error:
            measured.fail(error)
            raise
        return transcription_response(call, handle, measured)

    @router.post("/v1/audio/transcriptions", openapi_extra=openapi_of_form())
    async def create_transcription(request: Request) -> Response:
        """Writes down what is said in a recording."""
        return await answer(request, translate=False)

    if task.translates:

        @router.post("/v1/audio/translations", openapi_extra=openapi_of_form())
        async def create_translation(request: Request) -> Response:
            """Writes down in English what is said in a recording in another language."""
            return await answer(request, translate=True)

    return router


def transcription_response(call: TranscriptionCall, handle: RequestHandle, measured: Measurement) -> Response:
    """The response in the shape that was asked for."""
    if call.stream:
        events = transcript_events(handle, measured)
        return PipelineResponse(
            handle, events, measured, "text/event-stream", STREAM_HEADERS, about="file", last_words=error_event
        )
    body = whole_answer(call, handle, measured)
    return PipelineResponse(handle, body, measured, MEDIA_TYPES[call.format], {}, about="file", whole=True)


async def transcript_events(handle: RequestHandle, measured: Measurement) -> AsyncIterator[bytes]:
    """OpenAI's server-sent events: the text as it comes, then all of it and what it took."""
    async for chunk in handle:
        if text := chunk.payload.get("text"):
            measured.text()
            yield event({"type": "transcript.text.delta", "delta": text})
    result = await handle.result()
    yield event({"type": "transcript.text.done", "text": transcript(result)["text"], "usage": tokens_used(result)})


async def whole_answer(call: TranscriptionCall, handle: RequestHandle, measured: Measurement) -> AsyncIterator[bytes]:
    result = await handle.result()
    measured.text()
    yield formatted(call, result).encode()


def formatted(call: TranscriptionCall, result: dict[str, Payload]) -> str:
    found = transcript(result)
    if call.format == "text":
        return f"{found['text']}\n"
    if call.format == "srt":
        return srt(found["segments"])
    if call.format == "vtt":
        return vtt(found["segments"])
    if call.format == "json":
        return json.dumps({"text": found["text"], "usage": tokens_used(result)})
    return json.dumps(verbose(call, found))


def verbose(call: TranscriptionCall, found: Payload) -> dict[str, Any]:
    """With the segments, and of each what is known."""
    temperature = call.payload.get("temperature", 0.0)
    return {
        "task": call.payload["task"],
        "language": found["language"],
        "duration": found["duration"],
        "text": found["text"],
        "segments": [{"id": i, **segment, "temperature": temperature} for i, segment in enumerate(found["segments"])],
        "usage": {"type": "duration", "seconds": found["duration"]},
    }


def transcript(result: dict[str, Payload]) -> Payload:
    """The payload of the terminal stage that wrote."""
    return next(payload for payload in result.values() if "text" in payload)


def tokens_used(result: dict[str, Payload]) -> dict[str, Any]:
    """OpenAI's `usage` of models that count tokens, with the input's audio apart where the pipeline knows it."""
    used = usage(result)
    heard = transcript(result).get("input_audio_tokens")
    if heard is None:
        return {"type": "tokens", **used}
    details = {"text_tokens": used["input_tokens"] - heard, "audio_tokens": heard}
    return {"type": "tokens", **used, "input_token_details": details}


def openapi_of_form() -> dict[str, Any]:
    schema = CreateTranscription.model_json_schema()
    schema["properties"]["file"] = {"type": "string", "format": "binary", "description": "wav, flac, ogg, opus or mp3"}
    schema["required"] = ["file", *schema["required"]]
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}
