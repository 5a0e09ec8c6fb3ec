"""Files of audio to samples: WAV, FLAC, OGG, MP3 and what else libsndfile reads."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from sgl_omni.errors import InvalidRequest

MAX_SECONDS = 4 * 3600.0
MAX_CHANNELS = 16
LOWEST_RATE, HIGHEST_RATE = 1_000, 768_000
_BLOCK_FRAMES = 1 << 18


def decode_audio(
    data: bytes | memoryview, sample_rate: int, *, param: str, max_seconds: float = MAX_SECONDS
) -> NDArray[np.float32]:
    """A file to float32 [samples] at ``sample_rate``, its channels averaged.

    Raises ``InvalidRequest`` that names ``param`` for a file that is no audio, is empty, holds values that are not
    finite, or is longer than ``max_seconds``; the last is known before the samples are decoded where the file says its
    length, and while they are where it lies.
    """
    samples, rate = _read(data, lambda block: block.mean(axis=1, dtype=np.float32), param, max_seconds)
    return resample(samples, rate, sample_rate)


def decode_channels(
    data: bytes | memoryview, sample_rate: int, channels: int, *, param: str, max_seconds: float = MAX_SECONDS
) -> NDArray[np.float32]:
    """A file to float32 [channels, samples]: its first channels, or its only one as often as is asked.

    Raises ``InvalidRequest`` as ``decode_audio`` does, and for a file of fewer channels that has more than one.
    """

    def chosen(block: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.repeat(block, channels, axis=1) if block.shape[1] == 1 else block[:, :channels]

    samples, rate = _read(data, chosen, param, max_seconds)
    if samples.shape[1] != channels:
        raise InvalidRequest(f"audio of {samples.shape[1]} channels cannot be made {channels}", param)
    return np.ascontiguousarray(resample(samples, rate, sample_rate).T)


def _read(
    data: bytes | memoryview,
    chosen: Callable[[NDArray[np.float32]], NDArray[np.float32]],
    param: str,
    max_seconds: float,
) -> tuple[NDArray[np.float32], int]:
    """What ``chosen`` makes of blocks [frames, channels] of the file, one after another, and the file's sample rate."""
    import soundfile

    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            rate, channels = file.samplerate, file.channels
            if not LOWEST_RATE <= rate <= HIGHEST_RATE or channels > MAX_CHANNELS:
                raise InvalidRequest(f"audio of {channels} channels at {rate} Hz is not supported", param)
            longest = int(max_seconds * rate)
            if file.frames > longest and file.frames < 1 << 62:
                raise _too_long(file.frames / rate, max_seconds, param)
            blocks: list[NDArray[np.float32]] = []
            frames = 0
            while len(block := file.read(_BLOCK_FRAMES, dtype="float32", always_2d=True)):
                frames += len(block)
                if frames > longest:
                    raise _too_long(frames / rate, max_seconds, param)
                blocks.append(chosen(block))
    except (soundfile.LibsndfileError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidRequest(f"the audio cannot be read: {error}", param) from error
    samples = np.concatenate(blocks) if blocks else np.zeros(0, np.float32)
    if not len(samples):
        raise InvalidRequest("the audio is empty", param)
    if not np.isfinite(samples).all():
        raise InvalidRequest("the audio holds values that are not finite", param)
    return samples, rate


def resample(samples: NDArray[np.float32], rate: int, target: int) -> NDArray[np.float32]:
    """float32 [samples] or [samples, channels] at ``rate`` Hz -> at ``target`` Hz."""
    if rate == target:
        return samples
    import soxr

    found: NDArray[np.float32] = soxr.resample(samples, rate, target)
    return np.ascontiguousarray(found, dtype=np.float32)


def _too_long(seconds: float, max_seconds: float, param: str) -> InvalidRequest:
    return InvalidRequest(f"the audio lasts {seconds:.1f} s; the limit is {max_seconds:g} s", param)
