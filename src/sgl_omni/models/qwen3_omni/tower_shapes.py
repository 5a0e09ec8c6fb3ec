"""Names and shapes of the tensors of encoders and vocoder, transformers' own modules, from their configs. No torch.

They are those that ``load_part`` reads, known before anything is built; tests hold both equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from sgl_omni.engine.shapes import Named, linear_shapes, norm_shapes, square_attention_shapes
from sgl_omni.models.qwen3_tts.codec_shapes import transformer_shapes, waveform_shapes

_AUDIO: Mapping[str, Any] = {
    "num_mel_bins": 128,
    "encoder_layers": 32,
    "encoder_ffn_dim": 5120,
    "d_model": 1280,
    "output_dim": 3584,
    "downsample_hidden_size": 480,
}
_VISION: Mapping[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": (8, 16, 24),
}
_CODE2WAV: Mapping[str, Any] = {
    "codebook_size": 2048,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_quantizers": 16,
    "upsample_rates": (8, 5, 4, 3),
    "upsampling_ratios": (2, 2),
    "decoder_dim": 1536,
}
"""transformers', for what a config does not say."""

COMPUTED = ("*.inv_freq", "*positional_embedding.positional_embedding", "*code_offset")
"""Buffers that a module makes itself, and that older files hold all the same."""


def towers_shapes(config: Mapping[str, Any]) -> Named:
    """All three of a whole checkpoint's ``config.json``."""
    thinker = config["thinker_config"]
    yield from audio_shapes(thinker["audio_config"], "thinker.audio_tower.")
    yield from vision_shapes(thinker["vision_config"], "thinker.visual.")
    yield from code2wav_shapes(config["code2wav_config"], "code2wav.")


def audio_shapes(config: Mapping[str, Any], prefix: str, elsewhere: Mapping[str, str] = MappingProxyType({})) -> Named:
    """``elsewhere``: submodules that lie under other names than below ``prefix``, which ends with a dot."""
    said = {**_AUDIO, **config}
    width, channels, inner = said["d_model"], said["downsample_hidden_size"], said["encoder_ffn_dim"]
    bins = said["num_mel_bins"]
    for i, inputs in enumerate((1, channels, channels), 1):
        yield f"{prefix}conv2d{i}.weight", (channels, inputs, 3, 3)
        yield f"{prefix}conv2d{i}.bias", (channels,)
        bins = (bins + 1) // 2
    yield from linear_shapes(f"{prefix}conv_out", channels * bins, width, bias=False)
    for i in range(said["encoder_layers"]):
        layer = f"{prefix}layers.{i}"
        yield from square_attention_shapes(f"{layer}.self_attn", width)
        yield from norm_shapes(f"{layer}.self_attn_layer_norm", width)
        yield from linear_shapes(f"{layer}.fc1", width, inner, bias=True)
        yield from linear_shapes(f"{layer}.fc2", inner, width, bias=True)
        yield from norm_shapes(f"{layer}.final_layer_norm", width)
    yield from norm_shapes(f"{prefix}ln_post", width)
    yield from linear_shapes(elsewhere.get("proj1", f"{prefix}proj1"), width, width, bias=True)
    yield from linear_shapes(elsewhere.get("proj2", f"{prefix}proj2"), width, said["output_dim"], bias=True)


def vision_shapes(config: Mapping[str, Any], prefix: str) -> Named:
    said = {**_VISION, **config}
    width, inner = said["hidden_size"], said["intermediate_size"]
    patch = said["patch_size"], said["patch_size"]
    yield f"{prefix}patch_embed.proj.weight", (width, said["in_channels"], said["temporal_patch_size"], *patch)
    yield f"{prefix}patch_embed.proj.bias", (width,)
    yield f"{prefix}pos_embed.weight", (said["num_position_embeddings"], width)
    for i in range(said["depth"]):
        block = f"{prefix}blocks.{i}"
        yield from norm_shapes(f"{block}.norm1", width)
        yield from norm_shapes(f"{block}.norm2", width)
        yield from linear_shapes(f"{block}.attn.qkv", width, 3 * width, bias=True)
        yield from linear_shapes(f"{block}.attn.proj", width, width, bias=True)
        yield from linear_shapes(f"{block}.mlp.linear_fc1", width, inner, bias=True)
        yield from linear_shapes(f"{block}.mlp.linear_fc2", inner, width, bias=True)
    merged = width * said["spatial_merge_size"] ** 2
    mergers = [f"{prefix}merger_list.{i}" for i in range(len(said["deepstack_visual_indexes"]))]
    for name, normed in ((f"{prefix}merger", width), *((name, merged) for name in mergers)):
        yield from norm_shapes(f"{name}.ln_q", normed)
        yield from linear_shapes(f"{name}.mlp.0", merged, merged, bias=True)
        yield from linear_shapes(f"{name}.mlp.2", merged, said["out_hidden_size"], bias=True)


def code2wav_shapes(config: Mapping[str, Any], prefix: str) -> Named:
    said = {**_CODE2WAV, **config}
    width = said["hidden_size"]
    yield f"{prefix}code_embedding.weight", (said["codebook_size"] * said["num_quantizers"], width)
    yield from transformer_shapes(said, f"{prefix}pre_transformer")
    ratios, rates = said["upsampling_ratios"], said["upsample_rates"]
    yield from waveform_shapes(width, said["decoder_dim"], ratios, rates, prefix)
