"""``POST /v1/chat/completions``: text, or text and speech, whole or as it comes."""

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

from sgl_omni.audio.encode import Encoder, encode, encoder
from sgl_omni.config.tasks import ChatTask
from sgl_omni.media.source import MediaSource
from sgl_omni.server.backend import Backend, Chunk, RequestHandle
from sgl_omni.server.chat_request import ChatCall, CreateChatCompletion, read_chat_call
from sgl_omni.server.completions import Shape, stream_error, stream_events, usage
from sgl_omni.server.json_body import openapi_of
from sgl_omni.server.metrics import Measurement, Metrics
from sgl_omni.server.speech import STREAM_HEADERS
from sgl_omni.server.streaming import PipelineResponse


def chat_router(
    backend: Backend,
    task: ChatTask,
    models: Sequence[str],
    metrics: Metrics,
    media: MediaSource,
    request_timeout: float | None = None,
) -> APIRouter:
    """The route of a pipeline that converses. ``models`` are the names it answers to, its own first."""
    router = APIRouter(tags=["chat"])

    @router.post("/v1/chat/completions", openapi_extra=openapi_of(CreateChatCompletion))
    async def create_chat_completion(request: Request) -> Response:
        """Answers a conversation, in text or in text and speech.

        Without audio in `modalities` nothing that speaks is visited. Audio is at the model's own sample rate
        (`X-Sample-Rate`).
        """
        measured = metrics.begin()
        try:
            call = await read_chat_call(request, task, models, media)
            handle = backend.submit(
                call.payload,
                outputs=outputs_of(call, task),
                request_id=request.state.request_id,
                timeout=request_timeout,
            )
        except BaseException as error:
            measured.fail(error)
            raise
        answer = Answer(handle, task, call, measured)
        headers = {} if call.format is None else {"X-Sample-Rate": str(task.sample_rate)}
        if call.stream:
            shape = Shape("chat.completion.chunk", f"chatcmpl-{handle.id}", call.model)
            events = stream_events(answer.chunks(shape), shape)
            headers |= STREAM_HEADERS
            return PipelineResponse(
                handle, events, measured, "text/event-stream", headers, about="messages", last_words=stream_error
            )
        shape = Shape("chat.completion", f"chatcmpl-{handle.id}", call.model)
        return PipelineResponse(
            handle, answer.whole(shape), measured, "application/json", headers, about="messages", whole=True
        )

    return router


def outputs_of(call: ChatCall, task: ChatTask) -> list[str]:
    """The terminal stages that the request wants; those that speak only where it is to be spoken."""
    spoken = [] if call.format is None or task.audio_output is None else [task.audio_output]
    return [task.text_output, *spoken]


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, in the two shapes that it may have."""

    handle: RequestHandle
    task: ChatTask
    call: ChatCall
    measured: Measurement

    @property
    def audio_id(self) -> str:
        return f"audio_{self.handle.id}"

    async def whole(self, shape: Shape) -> AsyncIterator[bytes]:
        samples = await self._all_audio()
        result = await self.handle.result()
        text = result[self.task.text_output]
        self.measured.text()
        message: dict[str, Any] = {"role": "assistant", "content": text["text"], "refusal": None}
        if self.call.format is not None and self.task.sample_rate is not None:
            data = await asyncio.to_thread(encode, self.call.format, self.task.sample_rate, samples)
            message["audio"] = {
                "id": self.audio_id,
                "data": base64.b64encode(data).decode(),
                "transcript": text["text"],
                "expires_at": shape.created,  # nothing is kept that a later request could refer to
            }
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": text["finish_reason"]}
        yield json.dumps(shape.body([choice], usage=usage(result, self.task))).encode()

    async def chunks(self, shape: Shape) -> AsyncIterator[dict[str, Any]]:
        """The first comes with the first of the answer, so that an error before it has a status of its own."""
        silent = {"usage": None} if self.call.usage else {}

        def chunk(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
            return shape.body([choice], **silent)

        begun = False
        async for delta in self._deltas():
            if not begun:
                begun = True
                yield chunk({"role": "assistant", "content": "", "refusal": None})
            yield chunk(delta)
        result = await self.handle.result()
        if not begun:
            yield chunk({"role": "assistant", "content": "", "refusal": None})
        if self.call.format is not None:
            yield chunk({"audio": {"id": self.audio_id, "expires_at": shape.created}})
        yield chunk({}, result[self.task.text_output]["finish_reason"])
        if self.call.usage:
            yield shape.body([], usage=usage(result, self.task))

    async def _deltas(self) -> AsyncIterator[dict[str, Any]]:
        target, header = None, b""
        if self.call.format is not None and self.task.sample_rate is not None:
            target = encoder(self.call.format, self.task.sample_rate)
            header = target.start()
        async for found in self.handle:
            if found.stage == self.task.text_output:
                if text := found.payload.get("text"):
                    self.measured.text()
                    yield self._text_delta(text)
            elif target is not None and (samples := self._samples(found)) is not None:
                if data := header + await _feed(target, samples):
                    yield self._audio_delta(data)
                header = b""
        if target is not None and (data := header + target.finish()):
            yield self._audio_delta(data)

    def _text_delta(self, text: str) -> dict[str, Any]:
        if self.call.format is None:
            return {"content": text}
        return {"content": text, "audio": {"id": self.audio_id, "transcript": text}}

    def _audio_delta(self, data: bytes) -> dict[str, Any]:
        return {"audio": {"id": self.audio_id, "data": base64.b64encode(data).decode()}}

    def _samples(self, chunk: Chunk) -> NDArray[np.float32] | None:
        if chunk.stage != self.task.audio_output:
            return None
        samples: NDArray[np.float32] | None = chunk.payload.get("audio")
        if samples is not None:
            self.measured.audio(len(samples), chunk.payload["sample_rate"])
        return samples

    async def _all_audio(self) -> list[NDArray[np.float32]]:
        if self.call.format is None:
            return []
        return [samples async for chunk in self.handle if (samples := self._samples(chunk)) is not None]


async def _feed(target: Encoder, samples: NDArray[np.float32]) -> bytes:
    return await asyncio.to_thread(target.feed, samples) if target.heavy else target.feed(samples)
