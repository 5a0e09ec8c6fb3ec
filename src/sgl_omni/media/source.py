"""Fetches the recordings and pictures that requests refer to, where the operator has allowed it."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, unquote_to_bytes, urljoin, urlsplit

import httpx

from sgl_omni.errors import InvalidRequest

MAX_BYTES = 64 << 20
MAX_REDIRECTS = 3
SECONDS = 20.0


class MediaSource:
    """References to bytes: ``data:`` URLs always, hosts and a folder only where they are allowed."""

    def __init__(
        self,
        allowed_domains: Sequence[str] = (),
        allowed_path: Path | None = None,
        *,
        max_bytes: int = MAX_BYTES,
        seconds: float = SECONDS,
    ) -> None:
        """``seconds`` is the most that a fetch over the network may take in all."""
        self._domains = frozenset(domain.lower() for domain in allowed_domains)
        self._path = None if allowed_path is None else allowed_path.resolve()
        self._max_bytes = max_bytes
        self._seconds = seconds

    async def fetch(self, reference: str, param: str) -> bytes:
        """The file behind a ``data:``, ``http(s):`` or ``file:`` URL, or an absolute path.

        Raises ``InvalidRequest`` that names ``param`` for what is not allowed, not there, or larger than the limit;
        what is not allowed is neither asked for nor opened.
        """
        scheme = reference[:8].partition(":")[0].lower()
        if scheme == "data":
            return await asyncio.to_thread(self._decode, reference, param)
        if scheme in ("http", "https"):
            return await self._download(reference, param)
        if scheme == "file" or reference.startswith("/"):
            path = Path(unquote(urlsplit(reference).path) if scheme == "file" else reference)
            return await asyncio.to_thread(self._read, path, param)
        raise InvalidRequest("must be a data:, http(s): or file: URL, or an absolute path", param)

    def _decode(self, reference: str, param: str) -> bytes:
        head, comma, data = reference.partition(",")
        if not comma:
            raise InvalidRequest("the data: URL has no comma before its data", param)
        if not head.lower().endswith(";base64"):
            return self._within(unquote_to_bytes(data), param)
        return decode_base64(data, param, self._max_bytes)

    async def _download(self, url: str, param: str) -> bytes:
        try:
            async with (
                asyncio.timeout(self._seconds),
                httpx.AsyncClient(follow_redirects=False, trust_env=False, timeout=self._seconds) as client,
            ):
                for _ in range(MAX_REDIRECTS + 1):
                    self._check_host(url, param)
                    async with client.stream("GET", url) as response:
                        if response.is_redirect:
                            url = urljoin(url, response.headers.get("location", ""))
                            continue
                        if response.status_code != 200:
                            raise InvalidRequest(f"the media's host answered {response.status_code}", param)
                        return await self._body(response, param)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise InvalidRequest(f"the media cannot be fetched: {type(error).__name__}: {error}", param) from error
        except TimeoutError as error:
            raise InvalidRequest(f"the media did not arrive within {self._seconds:g} s", param) from error
        raise InvalidRequest(f"the media's host redirects more than {MAX_REDIRECTS} times", param)

    async def _body(self, response: httpx.Response, param: str) -> bytes:
        parts: list[bytes] = []
        length = 0
        async for part in response.aiter_bytes():
            length += len(part)
            if length > self._max_bytes:
                raise self._too_large(param)
            parts.append(part)
        return b"".join(parts)

    def _check_host(self, url: str, param: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https"):
            raise InvalidRequest(f"media may not be fetched by {parts.scheme!r}", param)
        host = (parts.hostname or "").lower()
        if host not in self._domains:
            raise InvalidRequest(
                f"media may not be fetched from {host[:100]!r}; the server allows "
                f"{', '.join(sorted(self._domains)) or 'no host'} (--allowed-media-domain)",
                param,
            )

    def _read(self, path: Path, param: str) -> bytes:
        if self._path is None:
            raise InvalidRequest("local media is not allowed on this server (--allowed-local-media-path)", param)
        try:
            found = path.resolve(strict=True)
            if not found.is_relative_to(self._path) or not found.is_file():
                raise InvalidRequest("this path is no file below the server's --allowed-local-media-path", param)
            with found.open("rb") as file:
                return self._within(file.read(self._max_bytes + 1), param)
        except (OSError, ValueError, RuntimeError) as error:
            message = "this path is no file below the server's --allowed-local-media-path"
            raise InvalidRequest(message, param) from error

    def _within(self, data: bytes, param: str) -> bytes:
        if len(data) > self._max_bytes:
            raise self._too_large(param)
        return data

    def _too_large(self, param: str) -> InvalidRequest:
        return InvalidRequest(f"the media is larger than the limit of {self._max_bytes} bytes", param)


def decode_base64(data: str, param: str, max_bytes: int = MAX_BYTES) -> bytes:
    """White space does not count.

    Raises ``InvalidRequest`` for what is no base64, or decodes to more than ``max_bytes``.
    """
    if len(data) > max_bytes // 3 * 4 + 4:
        raise InvalidRequest(f"the media is larger than the limit of {max_bytes} bytes", param)
    try:
        return base64.b64decode("".join(data.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"the data is not base64: {error}", param) from error
