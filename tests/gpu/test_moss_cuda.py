"""MOSS-TTS-Local on a GPU: its codes through graphs, and its codec in batches, against the plain models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_moss_codec import codec, codes
from tiny_moss import BOOKS

from sgl_omni.models.moss_tts_local.codec import CodecDecoder
from test_moss_tts_local import Moss, codes_of, engine_for, moss

__all__ = ["codec", "codes", "moss"]

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def one_thread() -> None:
    """Here it is the GPU that computes."""


@pytest.mark.parametrize("graphs", [0, 8])
@pytest.mark.parametrize("pool", [2048, 220])
def test_greedy_codes_equal_the_plain_model(moss: Moss, churn: Any, pool: int, graphs: int) -> None:
    moss.model.to("cuda")
    engine = engine_for(moss.model, True, max_total_tokens=pool, cuda_graph_max_bs=graphs, chunked_prefill_tokens=16)
    seen = churn(engine, {name: case.payload for name, case in moss.cases.items()}, f"{pool}")
    assert {name: codes_of(seen[name]) for name in moss.cases} == {n: case.codes for n, case in moss.cases.items()}


def test_streams_that_are_decoded_together(codec: Any, codes: torch.Tensor) -> None:
    folder, plain = codec
    ours = CodecDecoder.load(folder, BOOKS, "cuda")
    streams = [ours.open() for _ in range(3)]
    recordings = torch.stack([codes.roll(shift, 0) for shift in range(3)])
    audio = torch.cat([ours.decode(piece, streams) for piece in recordings.split(12, 1)], 2)
    for found, recording in zip(audio, recordings, strict=True):
        expected = plain.decode(recording)
        assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
