"""Codes that are nearest to no number are told, not taken: encoders of a recording whose weights are damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import tiny_higgs
import tiny_moss
import torch
from tiny_checkpoints import BUILDERS
from torch import Tensor, nn

from sgl_omni.errors import NotFinite
from sgl_omni.models.csm.codec import CodecEncoder as CsmEncoder
from sgl_omni.models.higgs_audio_v2.codec_encoder import CodecEncoder as HiggsEncoder
from sgl_omni.models.higgs_audio_v2.codec_spec import CodecSpec as HiggsCodec
from sgl_omni.models.moss_tts_local.codec import CodecEncoder as MossEncoder
from sgl_omni.models.qwen3_tts.references import CodecEncoder as Qwen3Encoder


def csm(folder: Path) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    BUILDERS["csm"](folder)
    encoder = CsmEncoder.load(folder)
    return encoder._parts["encoder"], encoder.encode


def higgs(folder: Path) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    tiny_higgs.reference_codec().save_pretrained(folder)
    encoder = HiggsEncoder.load(folder, HiggsCodec.parse(tiny_higgs.CODEC, "tiny"))
    return encoder.acoustic_encoder, encoder.encode


def moss(folder: Path) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    tiny_moss.write_codec(folder / "codec")
    encoder = MossEncoder.load(folder / "codec", tiny_moss.BOOKS)
    return encoder.quantizer, lambda samples: encoder.encode(samples.repeat(tiny_moss.CHANNELS, 1))


def qwen3_tts(folder: Path) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    BUILDERS["qwen3_tts"](folder)
    encoder = Qwen3Encoder.load(folder / "speech_tokenizer")
    return encoder._model, encoder


@pytest.mark.parametrize("build", [csm, higgs, moss, qwen3_tts])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_an_encoder_whose_weights_are_damaged_fails_the_request(tmp_path: Path, build: Any, bad: float) -> None:
    module, encode = build(tmp_path)
    heard = 0.3 * torch.randn(24_000, generator=torch.Generator().manual_seed(1))
    assert encode(heard).numel() > 0
    first = next(weight for weight in module.parameters() if weight.dim() > 1)
    with torch.no_grad():
        first.view(-1)[0] = bad
    with pytest.raises(NotFinite, match="the features of the reference's audio are not all finite"):
        encode(heard)
