"""Towers and vocoder, transformers' own modules: parts of a checkpoint, found by what they are called on disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from sgl_omni.engine.checkpoint import Checkpoint, Slot
from sgl_omni.models.qwen3_omni.tower_shapes import COMPUTED


def load_part(
    architecture: Any,
    config: Any,
    folder: Path,
    prefix: str,
    device: str,
    dtype: torch.dtype = torch.float32,
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """A module of transformers with the tensors that lie below ``prefix`` of the checkpoint, each exactly once.

    ``elsewhere``: submodules that lie under other names, as ``{"proj1": "projector.linear_1"}``.
    Raises ``CheckpointError`` that names tensors that are missing, unknown or of another shape.
    """
    checkpoint = Checkpoint(folder)

    def made(device: str) -> nn.Module:
        with torch.device(device):
            module: nn.Module = architecture._from_config(config, dtype=dtype)
        return module

    def slots(module: nn.Module) -> Iterator[Slot]:
        for name, tensor in module.state_dict().items():
            first, _, rest = name.partition(".")
            place = f"{elsewhere[first]}.{rest}" if first in elsewhere else prefix + name
            yield Slot(place, tensor, tuple(tensor.shape))

    checkpoint.check(slots(made("meta")), prefix=prefix, ignore=COMPUTED)  # before the device's memory is taken
    module = made(device)
    checkpoint.load(slots(module), prefix=prefix, ignore=COMPUTED)
    return module.eval().requires_grad_(False)


def whole_config(folder: Path) -> Any:
    """The checkpoint's config as transformers reads it."""
    from transformers import Qwen3OmniMoeConfig

    return Qwen3OmniMoeConfig.from_pretrained(folder)
