"""Ming-Omni-TTS on a GPU: the vocoder's streams, through graphs and without, against the plain model."""

from __future__ import annotations

import pytest
from test_ming_vocoder import THEN, alike, chunks_of, come_and_go, latents_of, tiny, whole
from tiny_ming import PATCH, Tiny, audio_of

from sgl_omni.models.ming_omni_tts.vae_decoder import VaeDecoder
from sgl_omni.models.ming_omni_tts.vae_streams import VaeStreams

__all__ = ["tiny"]

pytestmark = pytest.mark.gpu

WITHIN = 1e-4


@pytest.fixture(scope="module")
def one_thread() -> None:
    """Here it is the GPU that computes."""


@pytest.mark.parametrize("seed", range(4))
def test_streams_that_come_and_go(tiny: Tiny, seed: int) -> None:
    """The memory grows once under the graphs."""
    streams = VaeStreams(VaeDecoder.load(tiny.folder, "cuda"), rows=1)
    streams.capture(6, THEN)
    assert (streams._graphs is None) == streams.decoder.sees_all
    come_and_go(streams, tiny, seed, longest=THEN, within=WITHIN)


@pytest.mark.parametrize(("dtype", "within"), [("float32", WITHIN), ("bfloat16", 0.1)])
def test_the_stage_as_a_server_makes_it(tiny: Tiny, dtype: str, within: float) -> None:
    latents = latents_of(31, 5)
    found = audio_of(tiny.folder, chunks_of(latents, PATCH), device="cuda:0", dtype=dtype, max_batch=4)
    assert alike(found, whole(tiny, latents).clip(-1, 1), within)
