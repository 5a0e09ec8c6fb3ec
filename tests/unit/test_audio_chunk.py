"""Pieces of audio that vocoders hand on."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_omni.audio.chunk import audio_chunk, clipped
from sgl_omni.errors import NotFinite


def test_samples_and_their_rate() -> None:
    samples = np.array([0.5, -1.0], np.float32)
    chunk = audio_chunk(samples, 24000)
    assert chunk["audio"] is samples
    assert chunk["sample_rate"] == 24000


def test_clipping_keeps_what_is_within_full_scale() -> None:
    assert clipped(np.array([0.5, -1.5, 3.0], np.float32)).tolist() == [0.5, -1.0, 1.0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_clipping_would_hide_is_an_error(bad: float) -> None:
    with pytest.raises(NotFinite, match="the vocoder's samples are not all finite"):
        clipped(np.array([0.5, bad], np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_would_be_silence_is_an_error(bad: float) -> None:
    with pytest.raises(NotFinite, match="the vocoder's samples are not all finite"):
        audio_chunk(np.array([0.5, bad], np.float32), 24000)
