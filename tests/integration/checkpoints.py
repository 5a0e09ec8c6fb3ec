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


def save_llama(folder: Path) -> Path:
    """The folder, with a Llama of random weights, 26 MB."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
    }
    return save_random(folder, config)
