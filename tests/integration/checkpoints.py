"""Checkpoints of random weights, under the names that real ones have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sgl_omni.engine.decoder_config import DecoderConfig
from sgl_omni.engine.model import CausalModel


def save_random(folder: Path, config: dict[str, Any]) -> Path:
    """The folder, with the config and weights that are the same each time."""
    (folder / "config.json").write_text(json.dumps(config))
    model = CausalModel(DecoderConfig.parse(config))
    generator = torch.Generator().manual_seed(0)
    slots = model.slots("model.", "lm_head")
    tensors = {slot.name: torch.randn(slot.shape, generator=generator) * 0.2 for slot in slots}
    save_file(tensors, folder / "model.safetensors")
    return folder
