"""Names and shapes of Mimi's tensors as checkpoints hold them, from a config of transformers' ``MimiConfig``.

Known without torch, before anything is built; tests hold them equal to what the codecs' loaders read.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, prod
from typing import Any

from sgl_omni.engine.shapes import Named, conv_shapes, grown_shapes, linear_shapes, norm_shapes

_DEFAULTS: Mapping[str, Any] = {
    "sampling_rate": 24_000,
    "audio_channels": 1,
    "hidden_size": 512,
    "num_filters": 64,
    "num_residual_layers": 1,
    "upsampling_ratios": (8, 6, 5, 4),
    "kernel_size": 7,
    "last_kernel_size": 3,
    "residual_kernel_size": 3,
    "compress": 2,
    "codebook_size": 2048,
    "codebook_dim": 256,
    "num_quantizers": 32,
    "vector_quantization_hidden_dimension": 256,
    "num_semantic_quantizers": 1,
    "upsample_groups": 512,
    "num_hidden_layers": 8,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
"""transformers', for what a config does not say."""


def mimi_shapes(config: Mapping[str, Any], prefix: str, *, decoder: bool = True) -> Named:
    """The encoder, the codebooks, and unless it is left out the ``decoder``. ``prefix`` ends with a dot."""
    said = {**_DEFAULTS, **{key: value for key, value in config.items() if value is not None}}
    width, kernel = said["hidden_size"], 2 * _latent_stride(said)
    yield from _encoder(said, f"{prefix}encoder.layers")
    yield from _transformer(said, f"{prefix}encoder_transformer")
    yield from conv_shapes(f"{prefix}downsample.conv", width, width, kernel, bias=False)
    semantic = said["num_semantic_quantizers"]
    for part, books in (("semantic", semantic), ("acoustic", said["num_quantizers"] - semantic)):
        yield from _codebooks(said, books, f"{prefix}quantizer.{part}_residual_vector_quantizer")
    if decoder:
        yield f"{prefix}upsample.conv.weight", (width, width // said["upsample_groups"], kernel)
        yield from _transformer(said, f"{prefix}decoder_transformer")
        yield from _decoder(said, f"{prefix}decoder.layers")


def _latent_stride(said: Mapping[str, Any]) -> int:
    """How many steps of the convolutions make a frame."""
    hop, rate = prod(said["upsampling_ratios"]), said["sampling_rate"]
    frames = said.get("frame_rate") or said.get("_frame_rate") or rate / (2 * hop)
    return int(ceil(rate / hop) / frames)


def _encoder(said: Mapping[str, Any], name: str) -> Named:
    """Layers are counted with the activations between them, which hold nothing."""
    channels, at = said["num_filters"], 1
    yield from conv_shapes(f"{name}.0.conv", said["audio_channels"], channels, said["kernel_size"])
    for ratio in reversed(said["upsampling_ratios"]):
        for _ in range(said["num_residual_layers"]):
            yield from _residual(said, channels, f"{name}.{at}")
            at += 1
        yield from conv_shapes(f"{name}.{at + 1}.conv", channels, 2 * channels, 2 * ratio)
        channels, at = 2 * channels, at + 2
    yield from conv_shapes(f"{name}.{at + 1}.conv", channels, said["hidden_size"], said["last_kernel_size"])


def _decoder(said: Mapping[str, Any], name: str) -> Named:
    channels, at = said["num_filters"] << len(said["upsampling_ratios"]), 1
    yield from conv_shapes(f"{name}.0.conv", said["hidden_size"], channels, said["kernel_size"])
    for ratio in said["upsampling_ratios"]:
        yield from grown_shapes(f"{name}.{at + 1}.conv", channels, channels // 2, 2 * ratio)
        channels, at = channels // 2, at + 2
        for _ in range(said["num_residual_layers"]):
            yield from _residual(said, channels, f"{name}.{at}")
            at += 1
    yield from conv_shapes(f"{name}.{at + 1}.conv", channels, said["audio_channels"], said["last_kernel_size"])


def _residual(said: Mapping[str, Any], channels: int, name: str) -> Named:
    inner = channels // said["compress"]
    yield from conv_shapes(f"{name}.block.1.conv", channels, inner, said["residual_kernel_size"])
    yield from conv_shapes(f"{name}.block.3.conv", inner, channels, 1)


def _transformer(said: Mapping[str, Any], name: str) -> Named:
    width, heads, bias = said["hidden_size"], said["num_attention_heads"], bool(said.get("attention_bias"))
    head_dim = said.get("head_dim") or width // heads
    q, kv = heads * head_dim, said["num_key_value_heads"] * head_dim
    for i in range(said["num_hidden_layers"]):
        layer = f"{name}.layers.{i}"
        for part, size in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            yield from linear_shapes(f"{layer}.self_attn.{part}", width, size, bias=bias)
        yield from linear_shapes(f"{layer}.self_attn.o_proj", q, width, bias=bias)
        yield from linear_shapes(f"{layer}.mlp.fc1", width, said["intermediate_size"], bias=False)
        yield from linear_shapes(f"{layer}.mlp.fc2", said["intermediate_size"], width, bias=False)
        for part in ("input_layernorm", "post_attention_layernorm"):
            yield from norm_shapes(f"{layer}.{part}", width)
        for part in ("self_attn_layer_scale", "mlp_layer_scale"):
            yield f"{layer}.{part}.scale", (width,)


def _codebooks(said: Mapping[str, Any], books: int, name: str) -> Named:
    width, inner, size = said["hidden_size"], said["vector_quantization_hidden_dimension"], said["codebook_size"]
    for i in range(books):
        book = f"{name}.layers.{i}.codebook"
        yield f"{book}.initialized", (1,)
        yield f"{book}.cluster_usage", (size,)
        yield f"{book}.embed_sum", (size, said["codebook_dim"])
    if inner != width:
        yield from conv_shapes(f"{name}.input_proj", width, inner, 1, bias=False)
        yield from conv_shapes(f"{name}.output_proj", inner, width, 1, bias=False)
