"""``POST /v1/audio/speech``, and the audio of a request in the shapes that responses have."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response
from numpy.typing import NDArray

from sgl_omni.audio.encode import MEDIA_TYPES, encode, encoder
from sgl_omni.config.tasks import SpeechTask
from sgl_omni.errors import InvalidRequest, OmniError
from sgl_omni.media.source import MediaSource
from sgl_omni.server.backend import Backend, Payload, RequestHandle
from sgl_omni.server.errors import omni_error_body
from sgl_omni.server.json_body import openapi_of
from sgl_omni.server.metrics import Measurement, Metrics
from sgl_omni.server.speech_references import as_given
from sgl_omni.server.speech_request import CreateSpeech, SpeechCall, read_speech_call
from sgl_omni.server.streaming import PipelineResponse
from sgl_omni.server.voices import VoiceStore

STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@dataclass(frozen=True, slots=True)
class SpeechService:
    """What the speech routes share. ``models`` are the names that the pipeline answers to, its own first;
    ``timeout`` is in seconds and None the pipeline's own limit."""

    backend: Backend
    task: SpeechTask
    models: Sequence[str]
    metrics: Metrics
    voices: VoiceStore
    media: MediaSource
    timeout: float | None = None


def speech_router(service: SpeechService) -> APIRouter:
    """The route of a pipeline that speaks."""
    router = APIRouter(tags=["audio"])
    task = service.task

    @router.post("/v1/audio/speech", openapi_extra=openapi_of(CreateSpeech))
    async def create_speech(request: Request) -> Response:
        """Speaks a text.

        The audio is sent as it is made, at the model's own sample rate (`X-Sample-Rate`; OpenAI's `pcm` is
        always 24 kHz, this one is not). OpenAI's stock voice names are spoken by the default voice.
        """
        measured = service.metrics.begin()
        try:
            call = await read_speech_call(request, task, service.models, service.voices, service.media)
            handle = service.backend.submit(call.payload, request_id=request.state.request_id, timeout=service.timeout)
        except BaseException as error:
            measured.fail(error)
            raise
        return speech_response(call, handle, task.sample_rate, measured)

    return router


def speech_response(call: SpeechCall, handle: RequestHandle, sample_rate: int, measured: Measurement) -> Response:
    """The response in the shape that was asked for."""
    headers = {"X-Sample-Rate": str(sample_rate)}
    audio = spoken(handle, measured, call.source)
    if call.whole:
        body = whole_file(audio, call.format, sample_rate)
        return PipelineResponse(handle, body, measured, MEDIA_TYPES[call.format], headers, about="input", whole=True)
    pieces = encoded(audio, call.format, sample_rate)
    headers |= STREAM_HEADERS
    if call.events:
        events = speech_events(pieces, handle)
        return PipelineResponse(
            handle, events, measured, "text/event-stream", headers, about="input", last_words=error_event
        )
    return PipelineResponse(handle, pieces, measured, MEDIA_TYPES[call.format], headers, about="input")


async def spoken(
    handle: RequestHandle, measured: Measurement, source: str = "references"
) -> AsyncIterator[NDArray[np.float32]]:
    """The audio of a request, as the pipeline streams it. ``source``: how its recordings were given."""
    try:
        async for chunk in handle:
            samples = chunk.payload.get("audio")
            if samples is None:
                continue
            measured.audio(len(samples), chunk.payload["sample_rate"])
            yield samples
    except InvalidRequest as error:
        raise as_given(error, source) from error


async def encoded(audio: AsyncIterator[NDArray[np.float32]], format: str, sample_rate: int) -> AsyncIterator[bytes]:
    """One piece a chunk of audio (some may be empty), the file's header in the first."""
    target = encoder(format, sample_rate)
    header = target.start()
    async for samples in audio:
        data = await asyncio.to_thread(target.feed, samples) if target.heavy else target.feed(samples)
        yield header + data
        header = b""
    yield header + target.finish()


async def whole_file(audio: AsyncIterator[NDArray[np.float32]], format: str, sample_rate: int) -> AsyncIterator[bytes]:
    chunks = [samples async for samples in audio]
    yield await asyncio.to_thread(encode, format, sample_rate, chunks)


async def speech_events(pieces: AsyncIterator[bytes], handle: RequestHandle) -> AsyncIterator[bytes]:
    """OpenAI's server-sent events: the encoded audio in base64, then what it took."""
    async for data in pieces:
        if data:
            yield event({"type": "speech.audio.delta", "audio": base64.b64encode(data).decode()})
    yield event({"type": "speech.audio.done", "usage": usage(await handle.result())})


def usage(result: dict[str, Payload]) -> dict[str, int]:
    """Token counts of the terminal stages that report them."""
    used = {key: sum(payload.get(key, 0) for payload in result.values()) for key in ("input_tokens", "output_tokens")}
    return used | {"total_tokens": sum(used.values())}


def event(data: dict[str, Any], name: str | None = None) -> bytes:
    prefix = f"event: {name}\n" if name else ""
    return f"{prefix}data: {json.dumps(data)}\n\n".encode()


def error_event(error: OmniError) -> bytes:
    return event({"type": "error", **omni_error_body(error)}, name="error")
