"""Qwen3-Omni's thinker: a mixture-of-experts language model over text and the encoders' embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from sgl_omni.engine.checkpoint import Checkpoint
from sgl_omni.engine.decoder import materialise
from sgl_omni.engine.model import CausalModel
from sgl_omni.models.qwen3_omni.spec import parse_multi_axis


def load_thinker(
    folder: Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    kept_layers: Sequence[int] = (),
) -> CausalModel:
    """Reads the language model of a whole checkpoint, and none of its encoders.

    A talker wants ``kept_layers`` 0 and its own ``accept_layer``.
    """
    checkpoint = Checkpoint(folder)
    with torch.device("meta"):
        config = parse_multi_axis(checkpoint.config()["thinker_config"]["text_config"])
        model = CausalModel(config, kept_layers=kept_layers)
    materialise(model, device, dtype)
    checkpoint.load(model.slots("thinker.model.", "thinker.lm_head"), prefix="thinker.model.")
    return model.eval()
