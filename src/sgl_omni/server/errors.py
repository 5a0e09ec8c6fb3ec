"""Every error as the JSON object that OpenAI's clients understand.

| raised | status | ``type`` |
| --- | --- | --- |
| ``InvalidRequest``, a body that fails validation, malformed JSON | 400 | ``invalid_request_error`` |
| ``ModelNotFound``, unknown path | 404 | ``invalid_request_error`` |
| wrong method, body or head too large, wrong content type | 405, 413, 431, 415 | ``invalid_request_error`` |
| ``StageFailed``, ``PayloadError``, anything unforeseen | 500 | ``server_error`` |
| ``ProcessExited`` | 502 | ``server_error`` |
| ``Overloaded`` (with ``Retry-After``), ``RequestAborted`` | 503 | ``server_error`` |
| ``DeadlineExceeded`` | 504 | ``server_error`` |

500 means that this request makes a stage fail and will again; 502 and 503 that another attempt may succeed,
which is what a router or a client's retry wants to know.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from sgl_omni.errors import (
    DeadlineExceeded,
    InvalidRequest,
    OmniError,
    Overloaded,
    PipelineError,
    ProcessExited,
    RequestAborted,
)

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499


class ModelNotFound(InvalidRequest):
    """The request names a model that is not served here."""

    code = "model_not_found"


STATUS: tuple[tuple[type[OmniError], int], ...] = (
    (ModelNotFound, 404),
    (InvalidRequest, 400),
    (Overloaded, 503),
    (RequestAborted, 503),
    (DeadlineExceeded, 504),
    (ProcessExited, 502),
)

HTTP_CODES = {
    400: InvalidRequest.code,
    404: "not_found",
    408: "request_timeout",
    405: "method_not_allowed",
    413: "request_too_large",
    415: "unsupported_media_type",
    431: "request_too_large",
}


def status_of(error: OmniError) -> int:
    return next((status for kind, status in STATUS if isinstance(error, kind)), 500)


def error_body(status: int, message: str, code: str | None, param: str | None = None) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def omni_error_body(error: OmniError) -> dict[str, Any]:
    """The body for an error of this package; one of the pipeline names its stage and instance."""
    return error_body(status_of(error), describe(error), error.code, getattr(error, "param", None))


def describe(error: OmniError) -> str:
    message = str(error)
    if not isinstance(error, PipelineError):
        return message
    places = {"stage": error.stage, "instance": error.instance}
    missing = [f"{kind} {name}" for kind, name in places.items() if name and name not in message]
    return f"{message} ({', '.join(missing)})" if missing else message


def error_response(
    status: int, message: str, code: str | None, param: str | None = None, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    return JSONResponse(error_body(status, message, code, param), status, headers=headers)


def install_error_handlers(app: FastAPI) -> None:
    """Gives every error of every route the one shape."""
    app.add_exception_handler(OmniError, _on_omni_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(ClientDisconnect, _on_client_disconnect)
    app.add_exception_handler(Exception, _on_unforeseen_error)


async def _on_omni_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, OmniError)
    status = status_of(error)
    if status >= 500 and not isinstance(error, Overloaded):
        logger.warning("request %s: %s: %s", request_id(request), type(error).__name__, describe(error))
    headers = {"Retry-After": str(max(1, math.ceil(error.retry_after)))} if isinstance(error, Overloaded) else None
    return JSONResponse(omni_error_body(error), status, headers=headers)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = error.detail
    if message == HTTPStatus(error.status_code).phrase:
        message = f"{message}: {request.method} {request.url.path}"
    return error_response(error.status_code, message, HTTP_CODES.get(error.status_code), headers=error.headers)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = [(".".join(str(part) for part in each["loc"][1:]), each["msg"]) for each in error.errors()]
    message = "; ".join(f"{place}: {text}" if place else text for place, text in found)
    return error_response(400, message, InvalidRequest.code, next((place for place, _ in found if place), None))


async def _on_client_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_unforeseen_error(request: Request, error: Exception) -> Response:
    """The server logs the traceback itself once this has answered; the client learns none of it."""
    headers = {"X-Request-Id": request_id(request)}
    return error_response(500, "internal error; the server's log has the details", "internal_error", headers=headers)


def request_id(request: Request) -> str:
    """The id that ``RequestIds`` gave this HTTP request."""
    return str(request.state.request_id)
