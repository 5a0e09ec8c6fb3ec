"""MOSS-TTS-Local on a GPU: its codes through graphs, and its codec in batches, against the plain models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_moss_codec import codec, codes, decoded, published, spoken_in_turns
from tiny_moss import BOOKS

from sgl_omni.engine.decoder import materialise
from sgl_omni.models.moss_tts_local.codec import CodecDecoder, Quantizer
from sgl_omni.models.moss_tts_local.codec_spec import CodecSpec
from sgl_omni.models.moss_tts_local.codec_stack import CodecStack
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


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(("slots", "together"), [(4, 4), (4, 3), (3, 3), (2, 1)])
def test_streams_that_are_decoded_together(
    codec: Any, codes: torch.Tensor, captured: bool, slots: int, together: int
) -> None:
    """Of unequal pieces, with spare rows in the graphs, and with more streams than slots."""
    folder, plain = codec
    ours = CodecDecoder.load(folder, BOOKS, "cuda")
    ours.make_room(slots)
    if captured:
        ours.capture(together, {3, 12})
        assert [graphs.frames for graphs in ours._graphs] == [3, 12]
    recordings = [codes.roll(shift, 0)[: 20 + 10 * (shift % 5)] for shift in range(7)]
    for found, recording in zip(spoken_in_turns(ours, recordings, together), recordings, strict=True):
        expected = plain.decode(recording)
        assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


def test_published_sizes_in_bfloat16_through_graphs() -> None:
    """Random weights: what the graphs of 32 pieces make is what is made kernel by kernel."""
    spec = CodecSpec.parse(published())
    with torch.device("meta"):
        stack = CodecStack(spec.decoder, down=False, frame_places=1)
        quantizer = Quantizer(spec.quantizer, 12)
    materialise(stack, "cuda", torch.bfloat16)
    materialise(quantizer, "cuda", torch.float32)
    generator = torch.Generator("cuda").manual_seed(0)
    for part in (*stack.parameters(), *quantizer.parameters()):
        part.data.normal_(0, 0.02, generator=generator)
    ours = CodecDecoder(spec, stack, quantizer)
    ours.make_room(40)
    recordings = torch.randint(0, 1024, (32, 27, 12), generator=torch.Generator().manual_seed(1))

    def spoken() -> torch.Tensor:
        streams = [ours.open() for _ in recordings]
        parts = [torch.stack(decoded(ours, [*piece], streams)) for piece in recordings.split([3, 12, 12], 1)]
        for stream in streams:
            ours.close(stream)
        return torch.cat(parts, 2)

    loose = spoken()
    ours.capture(32, {3, 12})
    found = spoken()
    assert loose.isfinite().all() and loose.abs().max() > 0
    assert (found - loose).abs().max() < 1e-2 * loose.abs().max()
