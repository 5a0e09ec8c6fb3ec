"""Float samples in, bytes of an audio file out, chunk by chunk.

Every format is mono. WAV and PCM are written here; FLAC, MP3 and Opus come from libsndfile.
"""

from __future__ import annotations

import contextlib
import io
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import soundfile
from numpy.typing import NDArray

from sgl_omni.errors import InvalidRequest

Samples = NDArray[np.float32]

MEDIA_TYPES = {
    "mp3": "audio/mpeg",
    "opus": "audio/ogg; codecs=opus",
    "aac": "audio/aac",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm": "audio/pcm",
}
"""Every format a caller may name. Which of them can be written is ``available_formats``'s to say."""

UNKNOWN_SIZE = 0xFFFFFFFF
SFC_SET_OGG_PAGE_LATENCY_MS = 0x1302
OGG_PAGE_MS = 100.0


class Encoder(Protocol):
    """``start() + feed(a) + feed(b) + ... + finish()`` is one audio file."""

    media_type: str
    heavy: bool
    """Whether ``feed`` costs enough (milliseconds a second of audio) to be kept off an event loop."""

    def start(self) -> bytes: ...

    def feed(self, samples: Samples) -> bytes:
        """Takes samples ``[n]`` in [-1, 1] (clipped otherwise); returns the bytes that are ready."""
        ...

    def finish(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class LibraryFormat:
    """How libsndfile is asked for a format."""

    container: str
    codec: str
    options: tuple[tuple[str, Any], ...] = ()


# MP3 at a constant bit rate: readers take the length of a streamed file, whose header cannot be completed,
# from its bit rate, and a variable one makes libsndfile drop the last quarter. The level gives 80 kbit/s at 24 kHz.
LIBRARY_FORMATS = {
    "flac": LibraryFormat("FLAC", "PCM_16"),
    "mp3": LibraryFormat("MP3", "MPEG_LAYER_III", (("bitrate_mode", "CONSTANT"), ("compression_level", 0.5))),
    "opus": LibraryFormat("OGG", "OPUS"),
}


def int16(samples: Samples) -> NDArray[np.int16]:
    """Clips to [-1, 1], scales by 32767 and rounds."""
    rounded: NDArray[np.int16] = np.rint(np.clip(samples, -1.0, 1.0) * 32767.0).astype("<i2")
    return rounded


def wav_header(sample_rate: int, data_bytes: int | None = None) -> bytes:
    """44 bytes for 16-bit mono. Without a length both sizes are 0xFFFFFFFF, which readers take as "to the end"."""
    riff_size = UNKNOWN_SIZE if data_bytes is None else data_bytes + 36
    data_size = UNKNOWN_SIZE if data_bytes is None else data_bytes
    riff = struct.pack("<4sI4s", b"RIFF", riff_size, b"WAVE")
    layout = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, sample_rate, sample_rate * 2, 2, 16)
    return riff + layout + struct.pack("<4sI", b"data", data_size)


class PcmEncoder:
    """Bare 16-bit little-endian samples at the rate they come in."""

    media_type = MEDIA_TYPES["pcm"]
    heavy = False

    def start(self) -> bytes:
        return b""

    def feed(self, samples: Samples) -> bytes:
        return int16(samples).tobytes()

    def finish(self) -> bytes:
        return b""


class WavEncoder(PcmEncoder):
    """16-bit WAV of a length not known yet."""

    media_type = MEDIA_TYPES["wav"]

    def __init__(self, sample_rate: int) -> None:
        self._sample_rate = sample_rate

    def start(self) -> bytes:
        return wav_header(self._sample_rate)


class Outbox:
    """The file that libsndfile writes to. What was taken is gone: a later write to its place is dropped."""

    def __init__(self) -> None:
        self._taken = 0
        self._position = 0
        self._pending = bytearray()

    def take(self) -> bytes:
        data = bytes(self._pending)
        self._taken += len(data)
        self._pending.clear()
        return data

    def write(self, data: Any) -> int:
        view = bytes(data)
        start = self._position - self._taken
        self._position += len(view)
        if start >= 0:
            self._pending[start : start + len(view)] = view
        return len(view)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._taken + len(self._pending)}
        self._position = origin[whence] + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        return b""


class LibraryEncoder:
    """FLAC, MP3 or Ogg Opus by libsndfile.

    A streamed file keeps the header it began with; ``encode`` gives one whose header knows its length.
    """

    heavy = True

    def __init__(self, format: str, sample_rate: int) -> None:
        self.media_type = MEDIA_TYPES[format]
        self._outbox = Outbox()
        self._file = open_writer(self._outbox, format, sample_rate)

    def start(self) -> bytes:
        return self._outbox.take()

    def feed(self, samples: Samples) -> bytes:
        self._file.write(int16(samples))
        return self._outbox.take()

    def finish(self) -> bytes:
        self._file.close()
        return self._outbox.take()


def open_writer(target: Any, format: str, sample_rate: int) -> soundfile.SoundFile:
    """Raises ``soundfile.SoundFileError`` where the library lacks the format or the rate."""
    wanted = LIBRARY_FORMATS[format]
    file = soundfile.SoundFile(
        target,
        "w",
        samplerate=sample_rate,
        channels=1,
        format=wanted.container,
        subtype=wanted.codec,
        **dict(wanted.options),
    )
    if wanted.container == "OGG":
        shorten_pages(file)
    return file


def shorten_pages(file: soundfile.SoundFile) -> None:
    """Makes Ogg pages hold 100 ms instead of one second, so that sound leaves that much sooner.

    soundfile has no public name for this command of libsndfile; where a release moves the private one, pages
    stay long and all else works.
    """
    with contextlib.suppress(AttributeError):
        latency = soundfile._ffi.new("double*", OGG_PAGE_MS)
        soundfile._snd.sf_command(file._file, SFC_SET_OGG_PAGE_LATENCY_MS, latency, 8)


@lru_cache(maxsize=32)
def available_formats(sample_rate: int = 24000) -> tuple[str, ...]:
    """The formats that can be written at this rate: asked of libsndfile once, by opening a writer of each."""
    return tuple(name for name in MEDIA_TYPES if name in ("wav", "pcm") or library_writes(name, sample_rate))


def library_writes(format: str, sample_rate: int) -> bool:
    if format not in LIBRARY_FORMATS:
        return False
    try:
        open_writer(io.BytesIO(), format, sample_rate).close()
    except (soundfile.SoundFileError, ValueError):
        return False
    return True


def check_format(format: str, sample_rate: int, param: str = "response_format") -> None:
    """Raises ``InvalidRequest`` (``param``) that lists what is available."""
    available = available_formats(sample_rate)
    if format in available:
        return
    reason = f"cannot be written at {sample_rate} Hz by this server" if format in MEDIA_TYPES else "is not known"
    raise InvalidRequest(f"{param} {format[:100]!r} {reason}; choose from {', '.join(available)}", param)


def encoder(format: str, sample_rate: int) -> Encoder:
    """A streaming encoder. Raises ``InvalidRequest`` for a format that is not available."""
    check_format(format, sample_rate)
    if format == "pcm":
        return PcmEncoder()
    if format == "wav":
        return WavEncoder(sample_rate)
    return LibraryEncoder(format, sample_rate)


def encode(format: str, sample_rate: int, chunks: Iterable[Samples]) -> bytes:
    """A whole file, with a header that states its length. Raises ``InvalidRequest`` as ``encoder`` does."""
    check_format(format, sample_rate)
    samples = int16(np.concatenate([*chunks, np.zeros(0, dtype=np.float32)]))
    if format == "pcm":
        return samples.tobytes()
    if format == "wav":
        return wav_header(sample_rate, samples.nbytes) + samples.tobytes()
    target = io.BytesIO()
    with open_writer(target, format, sample_rate) as file:
        file.write(samples)
    return target.getvalue()
