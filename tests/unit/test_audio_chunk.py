"""Pieces of audio that vocoders hand on."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_omni.audio.chunk import audio_chunk
from sgl_omni.errors import NotFinite


def test_samples_and_their_rate() -> None:
    samples = np.array([0.5, -1.0], np.float32)
    chunk = audio_chunk(samples, 24000)
    assert chunk["audio"] is samples
    assert chunk["sample_rate"] == 24000


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_would_be_silence_is_an_error(bad: float) -> None:
    with pytest.raises(NotFinite, match="the vocoder's samples are not all finite"):
        audio_chunk(np.array([0.5, bad], np.float32), 24000)
