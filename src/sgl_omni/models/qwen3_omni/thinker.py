"""Qwen3-Omni's thinker: a mixture-of-experts language model over text and the encoders' embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from sgl_omni.engine.checkpoint import read_config
from sgl_omni.engine.model import CausalModel
from sgl_omni.engine.shard import Shard
from sgl_omni.engine.weights import SharePolicy, WeightStore
from sgl_omni.models.qwen3_omni.spec import parse_multi_axis
from sgl_omni.models.text_llm.model import TextModel


def load_thinker(
    folder: Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    kept_layers: Sequence[int] = (),
    shard: Shard | None = None,
    weights: WeightStore | None = None,
    policy: SharePolicy | None = None,
) -> CausalModel:
    """Reads the language model of a whole checkpoint, and none of its encoders; of its layers this ``shard``'s part.

    A talker wants ``kept_layers`` 0 and its own ``accept_layer``. Its tensors live where ``weights`` says.
    """
    return TextModel.load(
        folder,
        device,
        dtype,
        prefix="thinker.model.",
        head="thinker.lm_head",
        config=parse_multi_axis(read_config(folder)["thinker_config"]["text_config"]),
        within="thinker.model.",
        kept_layers=kept_layers,
        shard=shard,
        weights=weights,
        policy=policy,
    )
