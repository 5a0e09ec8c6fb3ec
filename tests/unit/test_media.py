"""What requests refer to: only what the operator allows is fetched, and what comes is bounded."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from PIL import Image

from sgl_omni.errors import InvalidRequest
from sgl_omni.media.images import decode_image
from sgl_omni.media.source import MediaSource


class Files(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/to/"))
            self.end_headers()
            return
        self.send_response(200 if self.path != "/absent" else 404)
        self.end_headers()
        self.wfile.write(b"x" * 100 if self.path != "/large" else b"x" * 5000)

    def log_message(self, *args: object) -> None:
        return


@pytest.fixture
def host() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Files)
    server.asked = []  # type: ignore[attr-defined]
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def url(host: ThreadingHTTPServer, path: str, name: str = "127.0.0.1") -> str:
    return f"http://{name}:{host.server_port}{path}"


async def refusal(source: MediaSource, reference: str) -> str:
    with pytest.raises(InvalidRequest) as caught:
        await source.fetch(reference, "audio")
    assert caught.value.param == "audio"
    return str(caught.value)


async def test_data_urls_are_always_read() -> None:
    source = MediaSource()
    assert await source.fetch("data:audio/wav;base64," + base64.b64encode(b"RIFF").decode(), "audio") == b"RIFF"
    assert await source.fetch("data:;base64,UklG\nRg==\n", "audio") == b"RIFF"
    assert await source.fetch("data:,a%20b", "audio") == b"a b"
    assert "base64" in await refusal(source, "data:audio/wav;base64,!!!")
    assert "comma" in await refusal(source, "data:audio/wav;base64")


async def test_a_host_is_asked_only_where_it_is_allowed(host: ThreadingHTTPServer) -> None:
    assert "no host" in await refusal(MediaSource(), url(host, "/a"))
    assert "example.org" in await refusal(MediaSource(["example.org"]), url(host, "/a"))
    assert host.asked == []  # type: ignore[attr-defined]
    assert await MediaSource(["127.0.0.1"]).fetch(url(host, "/a"), "audio") == b"x" * 100


async def test_a_redirect_leads_to_allowed_hosts_alone(host: ThreadingHTTPServer) -> None:
    source = MediaSource(["127.0.0.1"])
    assert await source.fetch(url(host, "/to/" + url(host, "/a")), "audio") == b"x" * 100
    assert "localhost" in await refusal(source, url(host, "/to/" + url(host, "/b", "localhost")))
    assert "/b" not in host.asked  # type: ignore[attr-defined]
    assert "'file'" in await refusal(source, url(host, "/to/file:///etc/passwd"))
    forever = "/to/" * 9 + url(host, "/a")
    assert "redirects" in await refusal(source, url(host, forever))


async def test_what_a_host_sends_is_bounded(host: ThreadingHTTPServer) -> None:
    source = MediaSource(["127.0.0.1"], max_bytes=1000)
    assert "larger than the limit of 1000" in await refusal(source, url(host, "/large"))
    assert "404" in await refusal(source, url(host, "/absent"))
    assert "larger" in await refusal(source, "data:;base64," + "A" * 5000)


async def test_files_are_read_below_the_allowed_folder_alone(tmp_path: Path) -> None:
    allowed = tmp_path / "media"
    allowed.mkdir()
    (allowed / "a b.wav").write_bytes(b"RIFF")
    (tmp_path / "secret").write_bytes(b"secret")
    (allowed / "link").symlink_to(tmp_path / "secret")
    source = MediaSource(allowed_path=allowed)
    assert await source.fetch(str(allowed / "a b.wav"), "audio") == b"RIFF"
    assert await source.fetch(f"file://{allowed}/a%20b.wav", "audio") == b"RIFF"
    for reference in (tmp_path / "secret", allowed / "link", allowed / ".." / "secret", allowed, allowed / "absent"):
        assert "no file below" in await refusal(source, str(reference))
    assert "not allowed" in await refusal(MediaSource(), str(allowed / "a b.wav"))
    assert "no file below" in await refusal(source, "/a\0b")


@pytest.mark.parametrize("reference", ["ftp://a/b", "relative.wav", "", "gopher:x", "javascript:1"])
async def test_other_references_are_refused(reference: str) -> None:
    assert "must be a data:" in await refusal(MediaSource(["a"]), reference)


def encoded(image: Image.Image, format: str) -> bytes:
    file = io.BytesIO()
    image.save(file, format)
    return file.getvalue()


def test_pictures_become_pixels() -> None:
    red = Image.new("RGB", (3, 2), (255, 0, 0))
    assert decode_image(encoded(red, "PNG"), param="image").tolist() == [[[255, 0, 0]] * 3] * 2
    assert decode_image(encoded(red, "JPEG"), param="image").shape == (2, 3, 3)
    clear = Image.new("RGBA", (1, 1), (255, 0, 0, 0))
    assert decode_image(encoded(clear, "PNG"), param="image").tolist() == [[[255, 255, 255]]]
    turned = Image.Exif()
    turned[0x0112] = 6  # a camera held upright
    file = io.BytesIO()
    red.save(file, "JPEG", exif=turned)
    assert decode_image(file.getvalue(), param="image").shape == (3, 2, 3)


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header promises more pixels than it holds."""

    def part(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", header) + part(b"IDAT", zlib.compress(b"\0")) + part(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "none of"),
        (b"RIFF....WAVE", "none of"),
        (b"<svg></svg>", "none of"),
        (bomb(100_000, 100_000), "pixels"),
        (bomb(100, 100), "cannot be read"),
        (encoded(Image.fromarray(np.zeros((50, 50, 3), np.uint8)), "PNG")[:-40], "cannot be read"),
    ],
)
def test_what_is_no_picture_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        decode_image(data, param="image")
    assert caught.value.param == "image"
