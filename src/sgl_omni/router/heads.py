"""Heads of requests and answers, rewritten for the other side; bodies are never touched."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from http import HTTPStatus

import msgspec

from sgl_omni.router.upstream import Headers

SANE_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")

OF_ONE_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade", b"proxy-authenticate"}
)
"""Headers that speak of one connection only (RFC 9110, 7.6.1)."""

OF_REQUEST_FRAMING = OF_ONE_HOP | {b"content-length", b"transfer-encoding", b"expect", b"x-request-id"}
OF_ANSWER = OF_ONE_HOP | {b"x-request-id"}


def request_id(given: bytes | None) -> bytes:
    """The caller's own where it is sane, else a new one."""
    if given is not None and SANE_ID.fullmatch(given):
        return given
    return b"req-" + os.urandom(16).hex().encode()


def named_by_connection(headers: Headers) -> frozenset[bytes]:
    """Further headers that the Connection header declares to be of this hop only."""
    tokens = [t.strip().lower() for name, value in headers if name == b"connection" for t in value.split(b",")]
    return frozenset(tokens) - {b"close", b"keep-alive", b"content-length", b"transfer-encoding", b"host"}


def request_head(method: bytes, target: bytes, headers: Headers, framing: bytes, id: bytes) -> bytes:
    """``framing`` is the header line of the body's framing, or empty."""
    drop = OF_REQUEST_FRAMING | named_by_connection(headers)
    lines = [b"%b: %b\r\n" % header for header in headers if header[0] not in drop]
    return b"%b %b HTTP/1.1\r\n%b%bx-request-id: %b\r\n\r\n" % (method, target, b"".join(lines), framing, id)


def answer_head(status: int, reason: bytes, headers: Headers, extra: bytes, id: bytes, drop: frozenset[bytes]) -> bytes:
    """``drop`` are names left out; ``extra`` are whole header lines put in."""
    lines = [b"%b: %b\r\n" % header for header in headers if header[0] not in drop]
    return b"HTTP/1.1 %d %b\r\n%b%bx-request-id: %b\r\n\r\n" % (status, reason, b"".join(lines), extra, id)


def own_answer(
    status: int,
    body: bytes,
    content_type: bytes,
    id: bytes,
    extra: Sequence[bytes] = (),
    *,
    close: bool,
    bodiless: bool,
) -> bytes:
    """A whole answer of the router's own. ``bodiless``: to HEAD, which gets the head only."""
    lines = [b"content-type: " + content_type, b"content-length: %d" % len(body), b"x-request-id: " + id, *extra]
    if close:
        lines.append(b"connection: close")
    head = b"HTTP/1.1 %d %b\r\n%b\r\n\r\n" % (status, HTTPStatus(status).phrase.encode(), b"\r\n".join(lines))
    return head if bodiless else head + body


def error_body(status: int, message: str, code: str, param: str | None = None) -> bytes:
    """The error object that OpenAI's clients understand, as the servers themselves write it."""
    return msgspec.json.encode(_error(status, message, code, param))


def error_event(status: int, message: str, code: str) -> bytes:
    """The same as the last of a stream of server-sent events."""
    data = msgspec.json.encode({"type": "error", **_error(status, message, code, None)})
    return b"event: error\ndata: %b\n\n" % data


def _error(status: int, message: str, code: str, param: str | None) -> dict[str, object]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
