"""Files of audio to samples: WAV, FLAC, OGG (Vorbis, Opus), MP3 and the relatives of WAV."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator

import numpy as np
import soundfile
from numpy.typing import NDArray

from sgl_omni.errors import InvalidRequest

MAX_SECONDS = 4 * 3600.0
MAX_CHANNELS = 16
LOWEST_RATE, HIGHEST_RATE = 1_000, 768_000
FORMATS = frozenset({"WAV", "WAVEX", "W64", "RF64", "FLAC", "OGG", "MP3", "AIFF", "AU", "CAF"})
"""What libsndfile reads besides is no format of recordings, and no caller's business."""

_USABLE = "use wav, flac, ogg (vorbis or opus), mp3, aiff, au or caf"
_UNRECOGNISED = 1
"""libsndfile's number for a container that it does not know: M4A or WebM, say."""

LARGEST_SAMPLE = 2.0**31
"""Full scale is 1; files of floats that mean whole numbers go up to this. Beyond, a spectrum has no finite energy."""

_BLOCK_FRAMES = 1 << 18

Chosen = Callable[[NDArray[np.float32]], NDArray[np.float32]]


class _Recording(soundfile.SoundFile):  # type: ignore[misc]
    """Read from its beginning to its end, so that it need not be able to seek: FLAC of unknown length cannot."""

    def seekable(self) -> bool:
        return False


class _Bytes(io.BytesIO):
    """libsndfile looks before the beginning of broken files, and has no place for Python's exception."""

    def seek(self, offset: int, whence: int = 0) -> int:
        return super().seek(max(0, offset) if whence == io.SEEK_SET else offset, whence)


def decode_audio(
    data: bytes | memoryview, sample_rate: int, *, param: str, max_seconds: float = MAX_SECONDS
) -> NDArray[np.float32]:
    """A file to float32 [samples] at ``sample_rate``, its channels averaged.

    A file that breaks off is read as far as it goes where its format allows that. Memory for the result twice and for
    one block is enough, whatever the file's own rate.

    Raises ``InvalidRequest`` that names ``param`` for a file that is no audio, is empty, holds values that are no
    samples, or is longer than ``max_seconds``; the last is known before the samples are decoded where the file says
    its length, and while they are where it lies.
    """
    return _read(data, sample_rate, 1, lambda block: block.mean(axis=1, keepdims=True), param, max_seconds)[:, 0]


def decode_channels(
    data: bytes | memoryview, sample_rate: int, channels: int, *, param: str, max_seconds: float = MAX_SECONDS
) -> NDArray[np.float32]:
    """A file to float32 [channels, samples]: its first channels, or its only one as often as is asked.

    Raises ``InvalidRequest`` as ``decode_audio`` does, and for a file of fewer channels that has more than one.
    """

    def chosen(block: NDArray[np.float32]) -> NDArray[np.float32]:
        found = block.shape[1]
        if found == 1:
            return np.repeat(block, channels, axis=1)
        if found < channels:
            raise InvalidRequest(f"audio of {found} channels cannot be made {channels}", param)
        return np.ascontiguousarray(block[:, :channels])

    return np.ascontiguousarray(_read(data, sample_rate, channels, chosen, param, max_seconds).T)


def _read(
    data: bytes | memoryview, sample_rate: int, channels: int, chosen: Chosen, param: str, max_seconds: float
) -> NDArray[np.float32]:
    """[samples, channels] of what ``chosen`` makes of blocks of the file."""
    try:
        with _Recording(_Bytes(data)) as file:
            _check(file, max_seconds, param)
            blocks = (chosen(block) for block in _blocks(file, max_seconds, param))
            samples = _joined(blocks, channels, file.samplerate, sample_rate)
    except soundfile.LibsndfileError as error:
        advice = f" {_USABLE}" if error.code == _UNRECOGNISED else ""
        raise InvalidRequest(f"the audio cannot be read: {error.error_string}{advice}", param) from error
    except (RuntimeError, TypeError, ValueError) as error:
        raise InvalidRequest(f"the audio cannot be read: {error}", param) from error
    if not len(samples):
        raise InvalidRequest("the audio is empty", param)
    return samples


def resample(samples: NDArray[np.float32], rate: int, target: int) -> NDArray[np.float32]:
    """float32 [samples] or [samples, channels] at ``rate`` Hz -> at ``target`` Hz."""
    if rate == target:
        return samples
    import soxr

    found: NDArray[np.float32] = soxr.resample(samples, rate, target)
    return np.ascontiguousarray(found, dtype=np.float32)


def _check(file: _Recording, max_seconds: float, param: str) -> None:
    """By what the file says of itself."""
    rate, channels = file.samplerate, file.channels
    if file.format not in FORMATS:
        raise InvalidRequest(f"audio in {file.format} is not supported; {_USABLE}", param)
    if not LOWEST_RATE <= rate <= HIGHEST_RATE or channels > MAX_CHANNELS:
        raise InvalidRequest(f"audio of {channels} channels at {rate} Hz is not supported", param)
    unknown = 1 << 62
    if max_seconds * rate < file.frames < unknown:
        raise _too_long(file.frames / rate, max_seconds, param)


def _blocks(file: _Recording, max_seconds: float, param: str) -> Iterator[NDArray[np.float32]]:
    """The samples as they are decoded, float32 [frames, channels] each."""
    frames, longest = 0, int(max_seconds * file.samplerate)
    while len(block := file.read(_BLOCK_FRAMES, dtype="float32", always_2d=True)):
        frames += len(block)
        if frames > longest:
            raise _too_long(frames / file.samplerate, max_seconds, param)
        if not (np.abs(block) <= LARGEST_SAMPLE).all():
            raise InvalidRequest("the audio holds values that are not finite, or far beyond full scale", param)
        yield block


def _joined(blocks: Iterator[NDArray[np.float32]], channels: int, rate: int, target: int) -> NDArray[np.float32]:
    parts: list[NDArray[np.float32]] = []
    if rate == target:
        parts += blocks
    else:
        import soxr

        stream = soxr.ResampleStream(rate, target, channels, dtype="float32")
        parts += [_columns(stream.resample_chunk(_shaped(block)), channels) for block in blocks]
        parts.append(_columns(stream.resample_chunk(_shaped(np.zeros((0, channels), np.float32)), last=True), channels))
    return np.concatenate(parts) if parts else np.zeros((0, channels), np.float32)


def _shaped(block: NDArray[np.float32]) -> NDArray[np.float32]:
    """As the resampler wants it: one channel without its axis."""
    return block[:, 0] if block.shape[1] == 1 else block


def _columns(samples: NDArray[np.float32], channels: int) -> NDArray[np.float32]:
    return samples.reshape(-1, channels)


def _too_long(seconds: float, max_seconds: float, param: str) -> InvalidRequest:
    return InvalidRequest(f"the audio lasts {seconds:.1f} s; the limit is {max_seconds:g} s", param)
