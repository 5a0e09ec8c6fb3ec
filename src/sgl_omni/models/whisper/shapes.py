"""Names and shapes that the tensors of a Whisper checkpoint have on disk. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sgl_omni.engine.shapes import Named, linear_shapes, norm_shapes, square_attention_shapes

_SIDES = (("encoder", "source", ("self_attn",)), ("decoder", "target", ("self_attn", "encoder_attn")))


def tensor_shapes(config: Mapping[str, Any]) -> Named:
    """What encoder and decoder read of a checkpoint."""
    width, bins = config["d_model"], config["num_mel_bins"]
    for side, source, kinds in _SIDES:
        prefix = f"model.{side}."
        yield f"{prefix}embed_positions.weight", (config[f"max_{source}_positions"], width)
        yield from norm_shapes(f"{prefix}layer_norm", width)
        for i in range(config[f"{side}_layers"]):
            yield from _layer(f"{prefix}layers.{i}", width, config[f"{side}_ffn_dim"], kinds)
    yield "model.decoder.embed_tokens.weight", (config["vocab_size"], width)
    for i, size in ((1, bins), (2, width)):
        yield f"model.encoder.conv{i}.weight", (width, size, 3)
        yield f"model.encoder.conv{i}.bias", (width,)


def _layer(name: str, width: int, feed_size: int, kinds: Sequence[str]) -> Named:
    for kind in kinds:
        yield from square_attention_shapes(f"{name}.{kind}", width, key_bias=False)
        yield from norm_shapes(f"{name}.{kind}_layer_norm", width)
    yield from linear_shapes(f"{name}.fc1", width, feed_size, bias=True)
    yield from linear_shapes(f"{name}.fc2", feed_size, width, bias=True)
    yield from norm_shapes(f"{name}.final_layer_norm", width)
