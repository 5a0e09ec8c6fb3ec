"""The Higgs codec's decoder on a GPU: its kernels and their graphs against transformers' module on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_higgs as tiny
import torch

from sgl_omni.models.higgs_audio_v2.codec_decoder import CodecDecoder
from sgl_omni.models.higgs_audio_v2.codec_spec import CodecSpec

pytestmark = pytest.mark.gpu

SPEC = CodecSpec.parse(tiny.CODEC, "tiny")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("codec")
    tiny.reference_codec().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pieces() -> list[Any]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, tiny.CODES, (frames, tiny.BOOKS)).astype(np.int16) for frames in (14, 80, 1, 33, 44)]


@pytest.fixture(scope="module")
def whole(folder: Path, pieces: list[Any]) -> list[Any]:
    decoder = CodecDecoder.load(folder, SPEC)
    return [decoder.decode_pieces([piece])[0] for piece in pieces]


@pytest.mark.parametrize(("tf32", "most"), [(False, 1e-5), (True, 1e-2)])
def test_pieces_of_any_lengths_are_those_alone(
    folder: Path, pieces: list[Any], whole: list[Any], monkeypatch: pytest.MonkeyPatch, tf32: bool, most: float
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    decoder = CodecDecoder.load(folder, SPEC, device="cuda:0")
    for found, expected in zip(decoder.decode_pieces(pieces), whole, strict=True):
        assert found.shape == expected.shape
        assert np.abs(found - expected).max() / np.abs(expected).max() < most


def test_graphs_decode_the_same_bits(folder: Path, pieces: list[Any]) -> None:
    decoder = CodecDecoder.load(folder, SPEC, device="cuda:0")
    loose = decoder.decode_pieces(pieces)
    decoder.capture(6, 80)
    for order in ((0, 1, 2, 3, 4), (3,), (2, 1), (4, 0, 3), (1,)):
        found = decoder.decode_pieces([pieces[i] for i in order])
        assert all(np.array_equal(a, loose[i]) for a, i in zip(found, order, strict=True)), order


def test_longer_pieces_than_were_captured(folder: Path, pieces: list[Any]) -> None:
    decoder = CodecDecoder.load(folder, SPEC, device="cuda:0")
    decoder.capture(2, 40)
    (found,) = decoder.decode_pieces([pieces[1]])
    assert len(found) == 80 * SPEC.hop
