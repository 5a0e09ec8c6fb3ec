import numpy as np
import pytest

from sgl_omni.audio.stretch import TimeStretch

RATE = 24000
RATES = [0.25, 0.7, 1.0, 1.3, 2.0, 4.0]


def tone(seconds: float = 2.0, frequency: float = 220.0) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * frequency * np.arange(round(seconds * RATE)) / RATE)).astype(np.float32)


def voice(seconds: float = 2.0) -> np.ndarray:
    """A gliding buzz with pauses and breath: harmonics, onsets and noise."""
    t = np.arange(round(seconds * RATE)) / RATE
    phase = 2 * np.pi * np.cumsum(120 + 40 * np.sin(2 * np.pi * 1.5 * t)) / RATE
    buzz = sum(np.sin(k * phase) / k for k in range(1, 12)) * (np.sin(2 * np.pi * 2 * t) > -0.5)
    return (0.2 * buzz + 0.01 * np.random.default_rng(0).standard_normal(len(t))).astype(np.float32)


def stretch(samples: np.ndarray, rate: float, cuts: list[int] | None = None) -> np.ndarray:
    stretcher = TimeStretch(rate, RATE)
    pieces = np.split(samples, cuts) if cuts else [samples]
    return np.concatenate([*(stretcher.feed(piece) for piece in pieces), stretcher.flush()])


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("samples", [0, 1, 100, 5000, 48001])
def test_duration_is_the_input_over_the_rate(rate, samples):
    assert len(stretch(tone(3)[:samples], rate)) == round(samples / rate)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("frequency", [80.0, 220.0, 1000.0])
def test_pitch_and_level_are_kept(rate, frequency):
    out = stretch(tone(4, frequency), rate)[1000:-3000]
    spectrum = np.abs(np.fft.rfft(out * np.hanning(len(out))))
    assert np.argmax(spectrum) * RATE / len(out) == pytest.approx(frequency, abs=2)
    assert np.std(out) == pytest.approx(0.5 / np.sqrt(2), rel=0.02)


@pytest.mark.parametrize("rate", RATES)
def test_a_tone_has_no_clicks(rate):
    steepest = np.abs(np.diff(tone())).max()
    assert np.abs(np.diff(stretch(tone(), rate)[:-1500])).max() < 1.1 * steepest


def test_rate_one_changes_nothing():
    assert np.abs(stretch(voice(), 1.0) - voice()).max() < 1e-6


@pytest.mark.parametrize("rate", RATES)
def test_output_does_not_depend_on_how_the_input_is_cut(rate):
    whole = stretch(voice(), rate)
    random = np.random.default_rng(1)
    for _ in range(3):
        cuts = sorted(random.integers(0, 2 * RATE, size=40).tolist())
        assert np.array_equal(stretch(voice(), rate, cuts), whole)


def test_silence_stays_silent():
    assert not stretch(np.zeros(RATE, dtype=np.float32), 1.5).any()


def test_audio_comes_out_before_the_end():
    assert len(TimeStretch(1.25, RATE).feed(tone(1))) > 0.9 * RATE / 1.25


@pytest.mark.parametrize("rate", [0.0, 0.2, 4.1, float("nan"), float("inf")])
def test_a_rate_out_of_range_is_refused(rate):
    with pytest.raises(ValueError, match=r"between 0\.25 and 4\.0"):
        TimeStretch(rate, RATE)
