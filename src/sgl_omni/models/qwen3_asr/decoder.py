"""The decoder: Qwen3 over text and the tower's rows."""

from __future__ import annotations

from dataclasses import replace

import torch

from sgl_omni.engine.checkpoint import Checkpoint
from sgl_omni.engine.decoder_config import DecoderConfig
from sgl_omni.engine.model import CausalModel
from sgl_omni.engine.weights import SharePolicy, WeightStore
from sgl_omni.models.qwen3_asr.spec import ARCHITECTURE, AsrSpec


def load_decoder(
    spec: AsrSpec, device: str = "cpu", dtype: torch.dtype = torch.float32, weights: WeightStore | None = None
) -> CausalModel:
    """Reads the language model of a checkpoint, and not its tower; its tensors live where ``weights`` says."""
    layout = spec.layout
    return CausalModel.load(
        spec.folder,
        device,
        dtype,
        prefix=layout.decoder,
        head=layout.head,
        config=_config(spec),
        within=layout.decoder,
        weights=weights,
        policy=SharePolicy(ARCHITECTURE),
    )


def _config(spec: AsrSpec) -> DecoderConfig:
    """One axis of positions: the three that the config speaks of count the same rows where there are no pictures.

    A checkpoint without a head has its embedding for one, whatever its config says.
    """
    config = DecoderConfig.parse({**spec.text, "model_type": "qwen3"})
    tied = bool(spec.tied) or f"{spec.layout.head}.weight" not in Checkpoint(spec.folder).names(spec.layout.head)
    return replace(config, rope=replace(config.rope, sections=(), interleaved=False), tied_embeddings=tied)
