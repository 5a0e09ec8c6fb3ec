"""Recordings as a load: which there are, what is asked of them, and what the events of an answer tell."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sgl_omni.bench.events import EventStream
from sgl_omni.errors import InvalidRequest

SUFFIXES = frozenset({".aif", ".aiff", ".caf", ".flac", ".mp3", ".oga", ".ogg", ".opus", ".wav"})


def find_recordings(folder: Path) -> dict[str, float]:
    """The recordings in a folder, each with its length in seconds, by path.

    Raises ``InvalidRequest`` where there are none, and for a file that is none whatever it is called.
    """
    import soundfile

    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    except OSError as error:
        raise InvalidRequest(f"audio {str(folder)!r}: {error}") from error
    if not paths:
        raise InvalidRequest(f"audio {str(folder)!r}: no recording in it; known are {', '.join(sorted(SUFFIXES))}")
    found: dict[str, float] = {}
    for path in paths:
        try:
            facts = soundfile.info(str(path))
        except (OSError, soundfile.SoundFileError) as error:
            raise InvalidRequest(f"audio {str(path)!r} cannot be read: {error}") from error
        if not facts.frames:
            raise InvalidRequest(f"audio {str(path)!r} is empty")
        found[str(path)] = facts.frames / facts.samplerate
    return found


@dataclass(frozen=True, slots=True)
class TranscriptionOptions:
    """``seconds`` of each recording by its path; the other fields are those of the request, where they are given."""

    seconds: Mapping[str, float]
    language: str | None = None
    prompt: str | None = None
    max_new_tokens: int | None = None

    def form(self, path: str, file: bytes, model: str) -> tuple[str, bytes]:
        """Content type and body of a streamed request."""
        boundary = uuid.uuid4().hex
        given = {"language": self.language, "prompt": self.prompt, "max_new_tokens": self.max_new_tokens}
        fields = {"model": model, "stream": "true", **{key: value for key, value in given.items() if value is not None}}
        head = "".join(
            f'--{boundary}\r\nContent-Disposition: form-data; name="{key}"\r\n\r\n{value}\r\n'
            for key, value in fields.items()
        )
        name = "audio" + Path(path).suffix
        head += f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n'
        head += "Content-Type: application/octet-stream\r\n\r\n"
        return f"multipart/form-data; boundary={boundary}", head.encode() + file + f"\r\n--{boundary}--\r\n".encode()


class _Usage(msgspec.Struct):
    output_tokens: int


class _Error(msgspec.Struct):
    message: str


class _Event(msgspec.Struct):
    type: str | None = None
    delta: str | None = None
    usage: _Usage | None = None
    error: _Error | None = None


class TranscriptStream(EventStream):
    """The events of one transcription. One without text counts: a recording may be silent."""

    def _take(self, event: bytes, now: float) -> None:
        try:
            found = msgspec.json.decode(event, type=_Event)
        except msgspec.DecodeError as error:
            self._failure = f"not an event of a transcription: {error}"
            return
        if found.error is not None:
            self._failure = found.error.message
        elif found.type == "transcript.text.delta" and found.delta:
            self.times.append(now)
        elif found.type == "transcript.text.done":
            self._done = True
            self.tokens = 0 if found.usage is None else found.usage.output_tokens
