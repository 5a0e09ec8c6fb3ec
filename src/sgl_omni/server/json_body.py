"""Reads a JSON body into a strict model, and explains all that is wrong with it."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import pydantic_core
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request

from sgl_omni.errors import InvalidRequest
from sgl_omni.server.errors import ModelNotFound

NAMED_MISTAKES = 10
"""Wrong fields that one refusal explains: a body of a million of them must not keep the server busy."""

SHOWN_CHARACTERS = 100
"""What is quoted of a caller's own text."""

Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
TopK = Annotated[int, Field(ge=-1, lt=2**31, description="0 or -1: all tokens"), AfterValidator(lambda k: max(0, k))]
"""The pipeline gets 0 for all."""


class Body(BaseModel):
    """Base of request bodies: exact types, no unknown fields, no NaN. A null counts as not given."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


B = TypeVar("B", bound=Body)


async def read_body(request: Request, kind: type[B]) -> B:
    """Raises ``InvalidRequest``, or ``HTTPException`` for what is not JSON at all."""
    content_type = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if content_type != "application/json":
        raise HTTPException(415, f"the body must be application/json, not {content_type or 'untyped'}")
    return parse_body(await request.body(), kind)


def parse_body(body: bytes, kind: type[B]) -> B:
    """Raises ``InvalidRequest`` for malformed JSON, and for wrong fields, all of them named."""
    if not body.strip():
        raise InvalidRequest("the request body is empty; send a JSON object")
    try:
        fields = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"the request body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidRequest(f"the request body must be a JSON object, not {type(fields).__name__}")
    return parse_fields(fields, kind)


def parse_fields(fields: dict[str, Any], kind: type[B]) -> B:
    """Raises ``InvalidRequest`` for wrong fields."""
    try:
        return kind.model_validate({key: value for key, value in fields.items() if value is not None})
    except ValidationError as error:
        raise _invalid(error, kind) from None


def check_model(asked: str, models: Sequence[str]) -> None:
    """Raises ``ModelNotFound`` for a name that this server does not answer to."""
    if asked not in models:
        raise ModelNotFound(f"model {asked[:SHOWN_CHARACTERS]!r} is not served here; use {models[0]!r}", "model")


def openapi_of(kind: type[Body]) -> dict[str, Any]:
    """For a route that reads its body itself."""
    content = {"application/json": {"schema": kind.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}


def _invalid(error: ValidationError, kind: type[Body]) -> InvalidRequest:
    found = [(_place(each["loc"]), each["type"], each["msg"]) for each in error.errors(include_url=False)]
    message = "; ".join(_explain(*each, kind) for each in found[:NAMED_MISTAKES])
    more = len(found) - NAMED_MISTAKES
    return InvalidRequest(f"{message}; and {more} more" if more > 0 else message, found[0][0][:SHOWN_CHARACTERS])


def _place(loc: tuple[int | str, ...]) -> str:
    """As ``messages[0].content``: names and places, without those that pydantic gives to members of unions."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc]
    return "".join(parts).removeprefix(".") or "body"


def _explain(field: str, type_: str, message: str, kind: type[Body]) -> str:
    if type_ == "missing":
        return f"{field} is required"
    if type_ == "extra_forbidden":
        nearest = difflib.get_close_matches(field[:SHOWN_CHARACTERS], kind.model_fields, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        return f"{field[:SHOWN_CHARACTERS]!r} is not a field of this request{hint}"
    return f"{field}: {message[0].lower()}{message[1:]}"
