"""Names and shapes of the tensors of speech tokenizer and speaker encoder, from their configs. Imports no torch.

They are those of ``CodecDecoder`` and ``SpeakerEncoder``, known before anything is built; tests hold both equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sgl_omni.engine.headers import Entry
from sgl_omni.engine.shapes import Named, conv_shapes, grown_shapes, linear_shapes, mlp_shapes, norm_shapes
from sgl_omni.errors import StartupError
from sgl_omni.models.folder import check_tensors, read_sizes, require
from sgl_omni.models.mimi_shapes import mimi_shapes
from sgl_omni.models.qwen3_tts.facts import SPEECH_TOKENIZER

SPEAKER_DEFAULTS: Mapping[str, Any] = {
    "mel_dim": 128,
    "enc_dim": 1024,
    "enc_channels": [512, 512, 512, 512, 1536],
    "enc_kernel_sizes": [5, 3, 3, 3, 1],
    "enc_dilations": [1, 2, 3, 4, 1],
    "enc_attention_channels": 128,
    "enc_res2net_scale": 8,
    "enc_se_channels": 128,
    "sample_rate": 24000,
}
"""For what a ``speaker_encoder_config`` does not say."""

DECODER_FIELDS = (
    "latent_dim",
    "num_quantizers",
    "codebook_dim",
    "codebook_size",
    "upsampling_ratios",
    "upsample_rates",
    "decoder_dim",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "sliding_window",
)
"""What a ``decoder_config`` must say."""


ENCODER_FACTS = ("encoder_valid_num_quantizers", "input_sample_rate", "encode_downsample_rate")
"""What a config must say beside the ``encoder_config``."""


def check_decoder(folder: Path, of_speech: Mapping[str, Entry]) -> None:
    """Of a checkpoint's speech tokenizer, which holds the tensors ``of_speech``.

    Raises ``InvalidRequest`` that names file and tensor or field.
    """
    speech = folder / SPEECH_TOKENIZER
    config = read_sizes(speech)
    for field in DECODER_FIELDS:
        require(config, f"decoder_config.{field}", speech / "config.json")
    check_tensors(
        speech,
        lambda: decoder_shapes(config["decoder_config"], "decoder."),
        parts=["decoder."],
        ignore=["decoder.*.input_proj.weight", "encoder.*"],
        entries=of_speech,
    )


def check_encoders(folder: Path, of_speech: Mapping[str, Entry], entries: Mapping[str, Entry]) -> None:
    """What clones voices: the speech tokenizer's encoder, and the speaker's, whose tensors lie among ``entries`` of the
    folder itself. Raises as `check_decoder` does."""
    speech = folder / SPEECH_TOKENIZER
    config = read_sizes(speech)
    for field in ("encoder_config", *ENCODER_FACTS):
        require(config, field, speech / "config.json")
    mimi = config["encoder_config"]
    check_tensors(
        speech,
        lambda: mimi_shapes(mimi, "encoder.", decoder=False),
        ["encoder."],
        within="encoder.",
        ignore=(),
        entries=of_speech,
    )
    speaker = require(read_sizes(folder), "speaker_encoder_config", folder / "config.json")
    prefix = "speaker_encoder."
    check_tensors(folder, lambda: speaker_shapes(speaker, prefix), within=prefix, ignore=(), entries=entries)


def decoder_shapes(config: Mapping[str, Any], prefix: str) -> Named:
    """``config``: the ``decoder_config`` of a speech tokenizer. ``prefix`` ends with a dot."""
    latent, books, width = config["latent_dim"], config["num_quantizers"], config["codebook_dim"]
    for part, count in (("rvq_first", 1), ("rvq_rest", books - 1)):
        name = f"{prefix}quantizer.{part}"
        for i in range(count):
            yield f"{name}.vq.layers.{i}._codebook.cluster_usage", (config["codebook_size"],)
            yield f"{name}.vq.layers.{i}._codebook.embedding_sum", (config["codebook_size"], width // 2)
        yield from conv_shapes(f"{name}.output_proj", width // 2, width, 1, bias=False)
    yield from conv_shapes(f"{prefix}pre_conv.conv", width, latent, 3)
    yield from linear_shapes(f"{prefix}pre_transformer.input_proj", latent, config["hidden_size"], bias=True)
    yield from transformer_shapes(config, f"{prefix}pre_transformer")
    yield from linear_shapes(f"{prefix}pre_transformer.output_proj", config["hidden_size"], latent, bias=True)
    ratios, rates = config["upsampling_ratios"], config["upsample_rates"]
    yield from waveform_shapes(latent, config["decoder_dim"], ratios, rates, prefix)


def transformer_shapes(config: Mapping[str, Any], name: str) -> Named:
    """Layers that look back a window, and the last norm."""
    width, heads, bias = config["hidden_size"], config["num_attention_heads"], bool(config.get("attention_bias"))
    head_dim = config.get("head_dim") or width // heads
    q, kv = heads * head_dim, (config.get("num_key_value_heads") or heads) * head_dim
    for i in range(config["num_hidden_layers"]):
        layer = f"{name}.layers.{i}"
        for part, size in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            yield from linear_shapes(f"{layer}.self_attn.{part}", width, size, bias=bias)
        yield from linear_shapes(f"{layer}.self_attn.o_proj", q, width, bias=bias)
        yield from mlp_shapes(width, config["intermediate_size"], f"{layer}.mlp")
        for part in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            yield f"{layer}.{part}", (width,)
        for part in ("self_attn_layer_scale.scale", "mlp_layer_scale.scale"):
            yield f"{layer}.{part}", (width,)
    yield f"{name}.norm.weight", (width,)


def waveform_shapes(latent: int, channels: int, ratios: Sequence[int], rates: Sequence[int], prefix: str) -> Named:
    """From the transformer's rows to samples; Qwen3-Omni's vocoder ends like this too."""
    for i, ratio in enumerate(ratios):
        yield from grown_shapes(f"{prefix}upsample.{i}.0.conv", latent, latent, ratio)
        block = f"{prefix}upsample.{i}.1"
        yield f"{block}.gamma", (latent,)
        yield from conv_shapes(f"{block}.dwconv.conv", 1, latent, 7)
        yield from norm_shapes(f"{block}.norm", latent)
        yield from linear_shapes(f"{block}.pwconv1", latent, 4 * latent, bias=True)
        yield from linear_shapes(f"{block}.pwconv2", 4 * latent, latent, bias=True)
    yield from conv_shapes(f"{prefix}decoder.0.conv", latent, channels, 7)
    for i, rate in enumerate(rates):
        inputs, outputs, block = channels >> i, channels >> (i + 1), f"{prefix}decoder.{i + 1}.block"
        yield from _snake(f"{block}.0", inputs)
        yield from grown_shapes(f"{block}.1.conv", inputs, outputs, 2 * rate)
        for unit in (2, 3, 4):
            for part, kernel in ((1, 7), (2, 1)):
                yield from _snake(f"{block}.{unit}.act{part}", outputs)
                yield from conv_shapes(f"{block}.{unit}.conv{part}.conv", outputs, outputs, kernel)
    last, end = channels >> len(rates), len(rates) + 1
    yield from _snake(f"{prefix}decoder.{end}", last)
    yield from conv_shapes(f"{prefix}decoder.{end + 1}.conv", last, 1, 7)


def speaker_shapes(config: Mapping[str, Any], prefix: str) -> Named:
    """``config``: a ``speaker_encoder_config``. ``prefix`` ends with a dot."""
    said = {**SPEAKER_DEFAULTS, **config}
    lengths = {name: len(said[name]) for name in ("enc_channels", "enc_kernel_sizes", "enc_dilations")}
    if len({*lengths.values()}) > 1:
        told = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise StartupError(f"speaker_encoder_config: the lists differ in length: {told}")
    channels, kernels, scale = said["enc_channels"], said["enc_kernel_sizes"], said["enc_res2net_scale"]
    yield from conv_shapes(f"{prefix}blocks.0.conv", said["mel_dim"], channels[0], kernels[0])
    for i in range(1, len(channels) - 1):
        block, size = f"{prefix}blocks.{i}", channels[i]
        yield from conv_shapes(f"{block}.tdnn1.conv", channels[i - 1], size, 1)
        for part in range(scale - 1):
            yield from conv_shapes(
                f"{block}.res2net_block.blocks.{part}.conv", size // scale, size // scale, kernels[i]
            )
        yield from conv_shapes(f"{block}.tdnn2.conv", size, size, 1)
        yield from conv_shapes(f"{block}.se_block.conv1", size, said["enc_se_channels"], 1)
        yield from conv_shapes(f"{block}.se_block.conv2", said["enc_se_channels"], size, 1)
    last, heads = channels[-1], said["enc_attention_channels"]
    yield from conv_shapes(f"{prefix}mfa.conv", last, last, kernels[-1])
    yield from conv_shapes(f"{prefix}asp.tdnn.conv", 3 * last, heads, 1)
    yield from conv_shapes(f"{prefix}asp.conv", heads, last, 1)
    yield from conv_shapes(f"{prefix}fc", 2 * last, said["enc_dim"], 1)


def _snake(name: str, channels: int) -> Named:
    yield f"{name}.alpha", (channels,)
    yield f"{name}.beta", (channels,)
