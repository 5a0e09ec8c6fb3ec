"""Files of audio that callers send: what is right becomes samples, what is wrong a refusal that says why."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

from sgl_omni.audio.decode import MAX_CHANNELS, decode_audio, decode_channels, resample
from sgl_omni.errors import InvalidRequest

USABLE = "use wav, flac, ogg (vorbis or opus), mp3, aiff, au or caf"
RATE = 16_000
CONTAINERS = {
    "wav": ("WAV", "PCM_16"),
    "wav of floats": ("WAV", "FLOAT"),
    "flac": ("FLAC", "PCM_16"),
    "vorbis": ("OGG", "VORBIS"),
    "opus": ("OGG", "OPUS"),
    "mp3": ("MP3", None),
    "aiff": ("AIFF", "PCM_16"),
}
LOSSY = {"vorbis", "opus", "mp3"}


def sine(seconds: float = 1.0, rate: int = RATE, pitch: float = 440.0) -> NDArray[np.float32]:
    return (0.5 * np.sin(2 * np.pi * pitch * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def written(samples: NDArray[np.float32], container: str = "wav of floats", rate: int = RATE) -> bytes:
    format, subtype = CONTAINERS[container]
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=format, subtype=subtype)
    return file.getvalue()


def decoded(data: bytes, rate: int = RATE, max_seconds: float = 60.0) -> NDArray[np.float32]:
    return decode_audio(data, rate, param="file", max_seconds=max_seconds)


def refusal(data: bytes, max_seconds: float = 60.0) -> str:
    with pytest.raises(InvalidRequest) as refused:
        decoded(data, max_seconds=max_seconds)
    assert refused.value.param == "file"
    return str(refused.value)


@pytest.mark.parametrize("container", CONTAINERS)
def test_each_container_gives_its_samples(container: str) -> None:
    samples = sine()
    found = decoded(written(samples, container))
    assert found.dtype == np.float32
    assert len(found) == len(samples)
    middle = slice(4000, 12000)
    if container in LOSSY:
        assert abs(np.corrcoef(found[middle], samples[middle])[0, 1]) > 0.99
    else:
        assert np.abs(found - samples).max() < 1e-4


def test_bytes_and_views_are_the_same() -> None:
    data = written(sine())
    assert np.array_equal(decode_audio(memoryview(data), RATE, param="file"), decoded(data))


@pytest.mark.parametrize(("rate", "target"), [(44_100, 16_000), (48_000, 16_000), (8_000, 16_000), (16_000, 24_000)])
def test_a_sine_stays_one_at_another_rate(rate: int, target: int) -> None:
    """The file is longer than one block, so that a seam between blocks would be heard."""
    seconds = 20.0
    found = decoded(written(sine(seconds, rate), rate=rate), target)
    expected = sine(seconds, target)
    assert abs(len(found) - len(expected)) <= 1
    inside = slice(target // 10, int(19.9 * target))
    assert np.abs(found[inside] - expected[inside]).max() < 2e-3
    assert np.abs(resample(sine(seconds, rate), rate, target)[inside] - found[inside]).max() < 1e-5


def test_what_the_target_rate_cannot_hold_is_filtered_out() -> None:
    found = decoded(written(sine(2.0, 48_000, pitch=15_000), rate=48_000))
    assert np.abs(found[1000:-1000]).max() < 1e-3


def test_channels_are_averaged() -> None:
    both = np.stack([sine(), np.zeros(RATE, np.float32)], 1)
    assert np.abs(decoded(written(both)) - sine() / 2).max() < 1e-6
    most = np.repeat(sine()[:, None], MAX_CHANNELS, 1)
    assert np.abs(decoded(written(most)) - sine()).max() < 1e-6


def test_too_many_channels_or_a_strange_rate_are_refused() -> None:
    assert refusal(written(np.zeros((10, MAX_CHANNELS + 1), np.float32))) == (
        "audio of 17 channels at 16000 Hz is not supported"
    )
    assert "at 999 Hz is not supported" in refusal(written(sine(0.1, 999), rate=999))
    assert "at 800000 Hz is not supported" in refusal(written(sine(0.1, 800_000), rate=800_000))


@pytest.mark.parametrize("container", ["wav", "aiff"])
def test_a_file_without_samples_is_empty(container: str) -> None:
    assert refusal(written(np.zeros(0, np.float32), container)) == "the audio is empty"


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 1e30])
def test_values_that_are_no_samples_are_refused(wrong: float) -> None:
    samples = sine()
    samples[777] = wrong
    assert refusal(written(samples)) == "the audio holds values that are not finite, or far beyond full scale"


@pytest.mark.parametrize("container", CONTAINERS)
def test_too_long_a_file_is_refused(container: str) -> None:
    assert "the limit is 2 s" in refusal(written(sine(3.0), container), max_seconds=2.0)
    assert len(decoded(written(sine(2.0), container), max_seconds=2.0)) == 2 * RATE


def test_a_length_that_is_declared_is_refused_before_anything_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(*args: object, **options: object) -> None:
        raise AssertionError("the samples were read")

    monkeypatch.setattr(soundfile.SoundFile, "read", unexpected)
    ten_hours = written(np.zeros(36_000 * 1000, np.float32), "flac", rate=1000)
    assert refusal(ten_hours, max_seconds=3600) == "the audio lasts 36000.0 s; the limit is 3600 s"


def test_a_length_that_is_not_declared_is_noticed_while_it_is_decoded() -> None:
    """FLAC as a stream: its header says that the number of samples is unknown, which is 0."""
    data = bytearray(written(sine(40.0), "flac"))
    assert data[:4] == b"fLaC"
    packed = int.from_bytes(data[18:26], "big")
    assert packed & ((1 << 36) - 1) == 40 * RATE
    data[18:26] = (packed >> 36 << 36).to_bytes(8, "big")
    assert len(decoded(bytes(data))) == 40 * RATE
    assert "the limit is 2 s" in refusal(bytes(data), max_seconds=2.0)


def test_a_length_that_is_a_lie_does_not_matter() -> None:
    data = bytearray(written(sine(), "wav"))
    at = data.index(b"data")
    data[at + 4 : at + 8] = struct.pack("<I", 0xFFFFFFF0)
    assert len(decoded(bytes(data))) == RATE


@pytest.mark.parametrize("container", ["wav", "aiff", "mp3", "vorbis", "opus"])
def test_a_file_that_breaks_off_is_read_as_far_as_it_goes(container: str) -> None:
    hiss = np.random.default_rng(0).uniform(-0.3, 0.3, 8 * RATE).astype(np.float32)
    data = written(hiss, container)
    found = decoded(data[: len(data) // 2])
    assert 2 * RATE < len(found) < 6 * RATE


def test_flac_that_breaks_off_is_refused() -> None:
    data = written(sine(4.0), "flac")
    assert refusal(data[: len(data) // 2]).startswith("the audio cannot be read: ")


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_header_alone_is_refused(container: str) -> None:
    data = written(sine(), container)
    for length in (0, 3, 12, 40):
        message = refusal(data[:length])
        assert message.startswith(("the audio cannot be read: ", "the audio is empty"))
        assert "object at" not in message


STRANGERS = {
    "text": b"hello, this is no sound. " * 50,
    "zeros": bytes(2000),
    "picture": b"\x89PNG\r\n\x1a\n" + bytes(200),
    "m4a": b"\x00\x00\x00\x20ftypM4A " + bytes(200),
    "webm": b"\x1aE\xdf\xa3" + bytes(200),
    "zip": b"PK\x03\x04" + bytes(200),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_what_is_no_audio_is_refused(stranger: str) -> None:
    assert refusal(STRANGERS[stranger]).startswith("the audio cannot be read: ")


def test_matrices_are_no_recordings() -> None:
    file = io.BytesIO()
    soundfile.write(file, sine(), RATE, format="MAT5")
    assert refusal(file.getvalue()) == f"audio in MAT5 is not supported; {USABLE}"


def test_noise_after_a_header_ends_in_samples_or_a_refusal() -> None:
    rng = np.random.default_rng(0)
    for container in CONTAINERS:
        data = bytearray(written(sine(0.2), container))
        for _ in range(20):
            damaged = bytearray(data)
            for at in rng.integers(0, len(data), 8):
                damaged[at] = int(rng.integers(256))
            try:
                found = decoded(bytes(damaged))
            except InvalidRequest as refused:
                assert refused.param == "file"
            else:
                assert np.isfinite(found).all()


@pytest.mark.parametrize(("found", "wanted"), [(1, 2), (2, 2), (3, 2)])
def test_channels_are_kept_apart(found: int, wanted: int) -> None:
    tones = np.stack([np.sin(2 * np.pi * 200 * (k + 1) * np.arange(16000) / 16000) for k in range(found)], axis=1)
    file = io.BytesIO()
    soundfile.write(file, (0.5 * tones).astype(np.float32), 16000, format="WAV", subtype="FLOAT")
    got = decode_channels(file.getvalue(), 16000, wanted, param="audio")
    assert got.shape == (wanted, 16000) and got.flags.c_contiguous
    for k in range(wanted):
        np.testing.assert_allclose(got[k], 0.5 * tones[:, min(k, found - 1)], atol=1e-6)
    halved = decode_channels(file.getvalue(), 8000, wanted, param="audio")
    assert halved.shape == (wanted, 8000)
    np.testing.assert_allclose(halved[0][500:-500], got[0][::2][500:-500], atol=1e-3)


def test_two_channels_are_not_made_three() -> None:
    file = io.BytesIO()
    soundfile.write(file, np.zeros((100, 2), np.float32), 16000, format="WAV")
    with pytest.raises(InvalidRequest, match="2 channels cannot be made 3"):
        decode_channels(file.getvalue(), 16000, 3, param="audio")


@pytest.mark.parametrize("head", [b"\0\0\0\x20ftypM4A ", b"\x1a\x45\xdf\xa3"], ids=["m4a", "webm"])
def test_a_container_that_is_not_read_is_answered_with_those_that_are(head: bytes) -> None:
    assert refusal(head + bytes(100)).endswith(USABLE)
