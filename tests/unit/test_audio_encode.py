import io
import wave

import numpy as np
import pytest
import soundfile

from sgl_omni.audio.encode import available_formats, encode, encoder, int16
from sgl_omni.errors import InvalidRequest

RATE = 24000
SPEECHLIKE = (0.4 * np.sin(2 * np.pi * 220 * np.arange(2 * RATE) / RATE)).astype(np.float32)


def streamed(format: str, samples: np.ndarray = SPEECHLIKE, rate: int = RATE, step: int = 1777) -> list[bytes]:
    target = encoder(format, rate)
    pieces = [target.start()]
    pieces += [target.feed(samples[at : at + step]) for at in range(0, len(samples), step)]
    return [*pieces, target.finish()]


def decoded(data: bytes) -> tuple[np.ndarray, int]:
    return soundfile.read(io.BytesIO(data), dtype="float32")


def test_every_format_but_aac_is_available():
    assert available_formats(RATE) == ("mp3", "opus", "flac", "wav", "pcm")


def test_opus_is_not_available_at_a_rate_it_cannot_hold():
    assert "opus" not in available_formats(44100)
    assert "mp3" in available_formats(44100)


@pytest.mark.parametrize("format", ["aac", "midi"])
def test_an_unavailable_format_is_refused_with_the_list(format):
    with pytest.raises(InvalidRequest, match="choose from mp3, opus, flac, wav, pcm") as caught:
        encoder(format, RATE)
    assert caught.value.param == "response_format"


def test_int16_clips_and_rounds():
    assert int16(np.float32([-2, -1, -0.5, 0, 0.5 / 32767, 0.6 / 32767, 1, 2])).tolist() == [
        -32767, -32767, -16384, 0, 0, 1, 32767, 32767,
    ]  # fmt: skip


@pytest.mark.parametrize("format", ["wav", "flac"])
def test_lossless_formats_give_the_samples_back(format):
    samples, rate = decoded(encode(format, RATE, [SPEECHLIKE]))
    assert rate == RATE
    assert np.array_equal(np.rint(samples * 32768), int16(SPEECHLIKE))


@pytest.mark.parametrize(("format", "header_bytes"), [("wav", 44), ("flac", 42)])
def test_a_streamed_file_differs_from_a_whole_one_in_its_header_alone(format, header_bytes):
    assert b"".join(streamed(format))[header_bytes:] == encode(format, RATE, [SPEECHLIKE])[header_bytes:]


def test_pcm_is_bare_little_endian_samples():
    assert b"".join(streamed("pcm")) == encode("pcm", RATE, [SPEECHLIKE]) == int16(SPEECHLIKE).astype("<i2").tobytes()


@pytest.mark.parametrize("format", ["mp3", "opus"])
@pytest.mark.parametrize("rate", [16000, 24000, 48000])
def test_lossy_formats_keep_tone_level_and_duration(format, rate):
    tone = (0.4 * np.sin(2 * np.pi * 440 * np.arange(2 * rate) / rate)).astype(np.float32)
    for data in (b"".join(streamed(format, tone, rate)), encode(format, rate, [tone])):
        samples, decoded_rate = decoded(data)
        assert decoded_rate == rate
        assert len(samples) / rate == pytest.approx(2.0, abs=0.13)
        peak = np.argmax(np.abs(np.fft.rfft(samples))) * rate / len(samples)
        assert peak == pytest.approx(440, abs=1)
        assert np.std(samples[rate // 2 : rate]) == pytest.approx(np.std(tone), rel=0.1)


@pytest.mark.parametrize("format", ["wav", "pcm", "mp3", "opus", "flac"])
def test_bytes_come_out_while_audio_goes_in(format):
    pieces = streamed(format, step=RATE // 4)
    first_half = b"".join(pieces[: len(pieces) // 2])
    assert len(first_half) > 0.3 * len(b"".join(pieces))


def test_opus_sends_pages_of_a_tenth_of_a_second():
    target = encoder("opus", RATE)
    target.start()
    arrived = [len(target.feed(SPEECHLIKE[at : at + RATE // 10])) for at in range(0, RATE, RATE // 10)]
    assert all(arrived[2:])


def test_a_streamed_wav_says_that_its_length_is_unknown():
    header = encoder("wav", RATE).start()
    assert header[4:8] == header[40:44] == b"\xff\xff\xff\xff"
    samples, _ = soundfile.read(io.BytesIO(b"".join(streamed("wav"))))
    assert len(samples) == len(SPEECHLIKE)


@pytest.mark.parametrize("format", ["wav", "flac", "mp3", "opus"])
def test_a_whole_file_states_its_length(format):
    assert soundfile.info(io.BytesIO(encode(format, RATE, [SPEECHLIKE[:RATE], SPEECHLIKE[RATE:]]))).frames == 2 * RATE


def test_a_whole_wav_satisfies_the_standard_library():
    with wave.open(io.BytesIO(encode("wav", RATE, [SPEECHLIKE]))) as file:
        assert (file.getnchannels(), file.getframerate(), file.getnframes()) == (1, RATE, 2 * RATE)


@pytest.mark.parametrize("format", ["wav", "flac", "mp3", "opus", "pcm"])
def test_no_audio_at_all_is_still_a_file(format):
    assert isinstance(encode(format, RATE, []), bytes)
    assert isinstance(b"".join(streamed(format, SPEECHLIKE[:0])), bytes)
