"""``POST /v1/audio/speech/batch``: several texts in one request, all their files in one answer."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from sgl_omni.audio.encode import encode
from sgl_omni.errors import InvalidRequest, OmniError, Overloaded, RequestAborted
from sgl_omni.media.source import MediaSource
from sgl_omni.server.backend import RequestHandle
from sgl_omni.server.errors import error_body, omni_error_body
from sgl_omni.server.json_body import check_model, openapi_of, parse_fields, read_body
from sgl_omni.server.metrics import Measurement
from sgl_omni.server.speech import SpeechService, spoken, usage
from sgl_omni.server.speech_request import SpeechOptions, SpokenText, spoken_text
from sgl_omni.server.streaming import PipelineResponse

logger = logging.getLogger(__name__)

MAX_INPUTS = 64
AT_ONCE = 16
"""Texts of a batch in the pipeline together, so that one batch does not fill the server."""

VOICE_FIELDS = frozenset({"voice", "references", "ref_audio", "ref_text"})


class CreateBatch(SpeechOptions):
    """Texts, and options that hold for those that do not give their own."""

    model: str
    inputs: list[Any] = Field(
        min_length=1, max_length=MAX_INPUTS, description="Texts, or objects with `input` and options of their own"
    )

    def fields_of(self, index: int) -> dict[str, Any]:
        """The fields of one text. One that names its voice in any way takes nothing of the common voice.

        Raises ``InvalidRequest`` for what is neither a text nor an object.
        """
        given = self.inputs[index]
        if not isinstance(given, str | dict):
            raise InvalidRequest("must be a text, or an object with input")
        fields = {"input": given} if isinstance(given, str) else given
        own = {key: value for key, value in fields.items() if value is not None}
        common = self.model_dump(exclude={"model", "inputs"}, exclude_unset=True)
        dropped = VOICE_FIELDS if VOICE_FIELDS & set(own) else frozenset[str]()
        return {key: value for key, value in common.items() if key not in dropped} | own


def batch_router(service: SpeechService) -> APIRouter:
    """The route for several texts."""
    router = APIRouter(tags=["audio"])

    @router.post("/v1/audio/speech/batch", openapi_extra=openapi_of(CreateBatch))
    async def create_batch(request: Request) -> Response:
        """Speaks several texts. Each has an entry in `data`, in their order: its file in base64, or its error."""
        measured = service.metrics.begin()
        try:
            asked = await read_body(request, CreateBatch)
            check_model(asked.model, service.models)
        except BaseException as error:
            measured.fail(error)
            raise
        batch = SpeechBatch(asked, service, measured, request.state.request_id)
        return PipelineResponse(batch, batch.body(), measured, "application/json", {}, whole=True)

    return router


class SpeechBatch:
    """A batch in progress. ``abort`` ends all of it."""

    def __init__(self, asked: CreateBatch, service: SpeechService, measured: Measurement, request_id: str) -> None:
        self.id = request_id
        self._asked = asked
        self._service = service
        self._fetch = FetchOnce(service.media)
        self._measured = measured
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._handles: set[RequestHandle] = set()
        self._aborted: str | None = None

    def abort(self, reason: str) -> None:
        self._aborted = self._aborted or reason
        for handle in tuple(self._handles):
            handle.abort(reason)

    async def body(self) -> AsyncIterator[bytes]:
        """The whole answer. Raises ``Overloaded`` where the server had room for none of the texts."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._entry(index)) for index in range(len(self._asked.inputs))]
        if self._aborted is not None:
            raise RequestAborted(self._aborted)
        results = [task.result() for task in tasks]
        refusals = [result for result in results if isinstance(result, Overloaded)]
        if len(refusals) == len(results):
            raise refusals[0]
        entries = [
            {"index": index, **(omni_error_body(result) if isinstance(result, Overloaded) else result)}
            for index, result in enumerate(results)
        ]
        yield json.dumps({"object": "list", "model": self._asked.model, "data": entries}).encode()

    async def _entry(self, index: int) -> Mapping[str, Any] | Overloaded:
        """What the answer says of one text; its failure is its own."""
        try:
            async with self._turns:
                return await self._speak(index)
        except Overloaded as error:
            return error
        except InvalidRequest as error:
            place = f"inputs[{index}]"
            return omni_error_body(_at(error, f"{place}.{error.param}" if error.param else place))
        except OmniError as error:
            return omni_error_body(error)
        except Exception:
            logger.exception("request %s: text %d of the batch failed", self.id, index)
            return error_body(500, "internal error; the server's log has the details", "internal_error")

    async def _speak(self, index: int) -> Mapping[str, Any]:
        service, task = self._service, self._service.task
        text = parse_fields(self._asked.fields_of(index), SpokenText)
        wanted = await spoken_text(text, task, service.voices, self._fetch)
        if self._aborted is not None:
            raise RequestAborted(self._aborted)
        name = f"{self.id[:100]}-{index}"
        handle = service.backend.submit(wanted.payload, request_id=name, timeout=service.timeout)
        self._handles.add(handle)
        try:
            chunks = [samples async for samples in spoken(handle, self._measured, wanted.source)]
            used = usage(await handle.result())
        except BaseException:
            handle.abort("the batch's answer failed")
            raise
        finally:
            self._handles.discard(handle)
        data = await asyncio.to_thread(encode, wanted.format, task.sample_rate, chunks)
        return {
            "audio": base64.b64encode(data).decode(),
            "format": wanted.format,
            "sample_rate": task.sample_rate,
            "usage": used,
        }


class FetchOnce:
    """Fetches what several texts refer to a single time."""

    def __init__(self, media: MediaSource) -> None:
        self._media = media
        self._found: dict[str, asyncio.Task[bytes]] = {}

    async def __call__(self, reference: str, param: str) -> bytes:
        task = self._found.get(reference)
        if task is None:
            task = self._found[reference] = asyncio.create_task(self._media.fetch(reference, param))
        return await asyncio.shield(task)


def _at(error: InvalidRequest, param: str) -> InvalidRequest:
    """The same refusal, of a field inside the batch."""
    return type(error)(str(error), param)
