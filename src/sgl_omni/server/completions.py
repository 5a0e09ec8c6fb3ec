"""``POST /v1/completions``, and what both completion routes answer alike."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from sgl_omni.config.tasks import ChatTask
from sgl_omni.errors import OmniError
from sgl_omni.server.backend import Backend, Payload, RequestHandle
from sgl_omni.server.completions_request import CompletionCall, CreateCompletion, read_completion_call
from sgl_omni.server.errors import omni_error_body
from sgl_omni.server.json_body import openapi_of
from sgl_omni.server.metrics import Measurement, Metrics
from sgl_omni.server.speech import STREAM_HEADERS, event
from sgl_omni.server.streaming import PipelineResponse

DONE = b"data: [DONE]\n\n"


def completions_router(
    backend: Backend,
    task: ChatTask,
    models: Sequence[str],
    metrics: Metrics,
    request_timeout: float | None = None,
) -> APIRouter:
    """The route of a pipeline that goes on with a text. ``models`` are the names it answers to, its own first."""
    router = APIRouter(tags=["completions"])

    @router.post("/v1/completions", openapi_extra=openapi_of(CreateCompletion))
    async def create_completion(request: Request) -> Response:
        """Goes on with a text."""
        measured = metrics.begin()
        try:
            call = await read_completion_call(request, models)
            handle = backend.submit(
                call.payload,
                outputs=[task.text_output],
                request_id=request.state.request_id,
                timeout=request_timeout,
            )
        except BaseException as error:
            measured.fail(error)
            raise
        shape = Shape("text_completion", f"cmpl-{handle.id}", call.model)
        if call.stream:
            body = stream_events(text_deltas(handle, task, shape, call, measured), shape)
            return PipelineResponse(
                handle,
                body,
                measured,
                "text/event-stream",
                STREAM_HEADERS,
                about="prompt",
                last_words=stream_error,
            )
        body = whole_text(handle, task, shape, measured)
        return PipelineResponse(handle, body, measured, "application/json", {}, about="prompt", whole=True)

    return router


class Shape:
    """What every object of one answer begins with."""

    def __init__(self, kind: str, answer_id: str, model: str) -> None:
        self._head = {"id": answer_id, "object": kind, "created": int(time.time()), "model": model}

    @property
    def created(self) -> int:
        return int(self._head["created"])

    def body(self, choices: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        return {**self._head, "choices": choices, **fields}


async def stream_events(chunks: AsyncIterator[dict[str, Any]], shape: Shape) -> AsyncIterator[bytes]:
    async for chunk in chunks:
        yield event(chunk)
    yield DONE


def stream_error(error: OmniError) -> bytes:
    """An error after the stream has begun, as OpenAI's clients know it; no ``[DONE]`` follows."""
    return event(omni_error_body(error))


async def text_deltas(
    handle: RequestHandle, task: ChatTask, shape: Shape, call: CompletionCall, measured: Measurement
) -> AsyncIterator[dict[str, Any]]:
    silent = {"usage": None} if call.usage else {}
    async for chunk in handle:
        if text := chunk.payload.get("text"):
            measured.text()
            yield shape.body([_choice(text, None)], **silent)
    result = await handle.result()
    yield shape.body([_choice("", result[task.text_output]["finish_reason"])], **silent)
    if call.usage:
        yield shape.body([], usage=usage(result, task))


async def whole_text(
    handle: RequestHandle, task: ChatTask, shape: Shape, measured: Measurement
) -> AsyncIterator[bytes]:
    result = await handle.result()
    text = result[task.text_output]
    measured.text()
    choice = _choice(text["text"], text["finish_reason"])
    yield json.dumps(shape.body([choice], usage=usage(result, task))).encode()


def _choice(text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}


def usage(result: Mapping[str, Payload], task: ChatTask) -> dict[str, Any]:
    """OpenAI's count of tokens. What was spoken counts too, in tokens of the speech model."""
    text = result[task.text_output]
    spoken = {} if task.audio_output is None else result.get(task.audio_output, {})
    audio = spoken.get("output_tokens", 0)
    prompt, completion = text["input_tokens"], text["output_tokens"] + audio
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {**counts, "completion_tokens_details": {"audio_tokens": audio}} if spoken else counts
