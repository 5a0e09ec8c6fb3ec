"""Names and shapes of the audio tokenizer's tensors as a checkpoint holds them, from its config. Imports no torch.

They are those that ``CodecDecoder`` and ``CodecEncoder`` read, known before anything is built; tests hold both equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from itertools import pairwise
from typing import Any

from sgl_omni.engine.shapes import Named, conv_shapes, grown_shapes, linear_shapes, norm_shapes, square_attention_shapes
from sgl_omni.models.higgs_audio_v2.codec_spec import CodecSpec

_NORMALISED = (("weight_g", "weight_v"), ("parametrizations.weight.original0", "parametrizations.weight.original1"))
"""Names of length and direction of a convolution's weight, by the age of the format."""

_HUBERT: Mapping[str, Any] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "intermediate_size": 3072,
    "feat_proj_layer_norm": True,
    "feat_extract_norm": "group",
    "conv_dim": (512,) * 7,
    "conv_kernel": (10, 3, 3, 3, 3, 2, 2),
    "conv_bias": False,
    "num_conv_pos_embeddings": 128,
    "num_conv_pos_embedding_groups": 16,
}
"""transformers', for what a config does not say."""

UNREAD = (
    *("fc1.*", "decoder_semantic.*", "semantic_model.masked_spec_embed"),
    *("quantizer.*.inited", "quantizer.*.cluster_size", "quantizer.*.embed_avg"),
)
"""What only training needs."""

_SEMANTIC = "semantic_model."
_POSITIONS = f"{_SEMANTIC}encoder.pos_conv_embed."
"""Its weight is always length and direction, unless a checkpoint holds it as it is."""
_ACOUSTIC = ("acoustic_encoder.", "acoustic_decoder.")
"""Parts whose weights are all of one sort."""


def on_disk(prefix: str, name: str, names: Set[str]) -> tuple[str, str] | None:
    """Length and direction, where a checkpoint with these ``names`` holds a weight as such; None where as it is.

    Of a weight that is not whole, or not there, the names are those that it should have beside the others.
    """
    base = (prefix + name).removesuffix("weight")
    if base == prefix + name or prefix + name in names:
        return None
    for length, direction in _NORMALISED:
        if not names.isdisjoint((base + length, base + direction)):
            return base + length, base + direction
    if name.startswith(_POSITIONS):
        age = _age_of(names) or _NORMALISED[-1]
    else:
        part = f"{prefix}{name.split('.')[0]}."
        age = _age_of(other for other in names if other.startswith(part)) if name.startswith(_ACOUSTIC) else None
    return None if age is None else (base + age[0], base + age[1])


def _age_of(names: Iterable[str]) -> tuple[str, str] | None:
    """How lengths and directions are called among ``names``; None where there are none."""
    suffixes = {length: (length, direction) for length, direction in _NORMALISED}
    found = (suffix for name in names for suffix in suffixes if name.endswith(f".{suffix}"))
    return suffixes.get(next(found, ""))


def codec_shapes(spec: CodecSpec, prefix: str, names: Set[str]) -> Named:
    """``names``: of all tensors in the checkpoint. ``prefix``: where the tokenizer lies among them."""
    for name, shape in _plain(spec):
        pair = on_disk(prefix, name, names)
        if pair is None:
            yield prefix + name, shape
            continue
        kept = 2 if name.startswith(_SEMANTIC) else 0
        yield pair[0], tuple(size if dim == kept else 1 for dim, size in enumerate(shape))
        yield pair[1], shape


def _plain(spec: CodecSpec) -> Named:
    """With every weight as it is."""
    acoustic, semantic = int(spec.acoustic["hidden_size"]), {**_HUBERT, **spec.semantic}
    yield from _acoustic_encoder(spec)
    yield from _acoustic_decoder(spec)
    yield from _hubert(semantic)
    yield from _semantic_encoder(spec, int(semantic["hidden_size"]))
    yield from linear_shapes("fc", spec.hidden_size, spec.hidden_size, bias=True)
    yield from linear_shapes("fc2", spec.hidden_size, acoustic, bias=True)
    for k in range(spec.num_codebooks):
        name = f"quantizer.quantizers.{k}"
        yield f"{name}.codebook.embed", (spec.codebook_size, spec.codebook_dim)
        yield from linear_shapes(f"{name}.project_in", spec.hidden_size, spec.codebook_dim, bias=True)
        yield from linear_shapes(f"{name}.project_out", spec.codebook_dim, spec.hidden_size, bias=True)


def _acoustic_encoder(spec: CodecSpec) -> Named:
    name, channels = "acoustic_encoder", int(spec.acoustic["encoder_hidden_size"])
    yield from conv_shapes(f"{name}.conv1", 1, channels, 7)
    for i, stride in enumerate(spec.acoustic["downsampling_ratios"]):
        yield from _units(f"{name}.block.{i}", channels)
        yield f"{name}.block.{i}.snake1.alpha", (1, channels, 1)
        yield from conv_shapes(f"{name}.block.{i}.conv1", channels, 2 * channels, 2 * stride)
        channels *= 2
    yield f"{name}.snake1.alpha", (1, channels, 1)
    yield from conv_shapes(f"{name}.conv2", channels, int(spec.acoustic["hidden_size"]), 3)


def _acoustic_decoder(spec: CodecSpec) -> Named:
    name, channels = "acoustic_decoder", int(spec.acoustic["decoder_hidden_size"])
    yield from conv_shapes(f"{name}.conv1", int(spec.acoustic["hidden_size"]), channels, 7)
    for i, stride in enumerate(spec.upsampling):
        yield f"{name}.block.{i}.snake1.alpha", (1, channels, 1)
        yield from grown_shapes(f"{name}.block.{i}.conv_t1", channels, channels // 2, 2 * stride)
        channels //= 2
        yield from _units(f"{name}.block.{i}", channels)
    yield f"{name}.snake1.alpha", (1, channels, 1)
    yield from conv_shapes(f"{name}.conv2", channels, 1, 7)


def _units(name: str, channels: int) -> Named:
    for unit in (1, 2, 3):
        for part, kernel in ((1, 7), (2, 1)):
            yield f"{name}.res_unit{unit}.snake{part}.alpha", (1, channels, 1)
            yield from conv_shapes(f"{name}.res_unit{unit}.conv{part}", channels, channels, kernel)


def _semantic_encoder(spec: CodecSpec, width: int) -> Named:
    name = "encoder_semantic"
    yield from conv_shapes(f"{name}.conv", width, width, spec.kernel_size, bias=False)
    widths = [width, *(int(width * ratio) for ratio in spec.channel_ratios)]
    for i, ((inner, outer), stride) in enumerate(zip(pairwise(widths), spec.strides, strict=True)):
        block = f"{name}.conv_blocks.{i}"
        for unit in range(len(spec.dilations)):
            yield from conv_shapes(f"{block}.res_units.{unit}.conv1", inner, inner, spec.unit_kernel_size, bias=False)
            yield from conv_shapes(f"{block}.res_units.{unit}.conv2", inner, inner, 1, bias=False)
        yield from conv_shapes(f"{block}.conv", inner, outer, 3 if stride == 1 else 2 * stride)


def _hubert(said: Mapping[str, Any]) -> Named:
    width, inner, sizes = said["hidden_size"], said["intermediate_size"], said["conv_dim"]
    for i, (inputs, size) in enumerate(pairwise((1, *sizes))):
        layer = f"{_SEMANTIC}feature_extractor.conv_layers.{i}"
        yield from conv_shapes(f"{layer}.conv", inputs, size, said["conv_kernel"][i], bias=said["conv_bias"])
        if i == 0 or said["feat_extract_norm"] == "layer":
            yield from norm_shapes(f"{layer}.layer_norm", size)
    if said["feat_proj_layer_norm"]:
        yield from norm_shapes(f"{_SEMANTIC}feature_projection.layer_norm", sizes[-1])
    yield from linear_shapes(f"{_SEMANTIC}feature_projection.projection", sizes[-1], width, bias=True)
    groups, kernel = said["num_conv_pos_embedding_groups"], said["num_conv_pos_embeddings"]
    yield from conv_shapes(f"{_SEMANTIC}encoder.pos_conv_embed.conv", width // groups, width, kernel)
    yield from norm_shapes(f"{_SEMANTIC}encoder.layer_norm", width)
    for i in range(said["num_hidden_layers"]):
        layer = f"{_SEMANTIC}encoder.layers.{i}"
        yield from square_attention_shapes(f"{layer}.attention", width)
        yield from norm_shapes(f"{layer}.layer_norm", width)
        yield from linear_shapes(f"{layer}.feed_forward.intermediate_dense", width, inner, bias=True)
        yield from linear_shapes(f"{layer}.feed_forward.output_dense", inner, width, bias=True)
        yield from norm_shapes(f"{layer}.final_layer_norm", width)
