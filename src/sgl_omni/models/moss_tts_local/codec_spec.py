"""What the ``config.json`` of MOSS-Audio-Tokenizer says. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sgl_omni.errors import StartupError

MODEL_TYPE = "moss-audio-tokenizer"
_NORMALISED = {"rlfq": True, "random_prefix_rlfq": True, "rvq": False, "spec_rvq": False}
_FIXED = {"causal": True, "gating": "none", "norm": "layer_norm", "positional_embedding": "rope"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchSpec:
    """``size`` neighbouring places become one in the encoder, or one becomes as many in the decoder."""

    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerSpec:
    """``context``: places that each sees, itself and those before it."""

    in_size: int
    out_size: int
    width: int
    num_heads: int
    num_layers: int
    inner_size: int
    context: int
    scaled: bool
    rope_theta: float

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads


BlockSpec = PatchSpec | TransformerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizerSpec:
    """``normalised``: whether the nearest code is looked for on the unit sphere."""

    in_size: int
    size: int
    out_size: int
    num_codebooks: int
    codebook_size: int
    codebook_dim: int
    normalised: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpec:
    """``frame_samples`` of each channel make up a frame of codes; the channels are interleaved sample by sample."""

    sample_rate: int
    frame_samples: int
    channels: int
    encoder: tuple[BlockSpec, ...]
    decoder: tuple[BlockSpec, ...]
    quantizer: QuantizerSpec

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> CodecSpec:
        """Raises ``StartupError`` that names the field for a codec of another kind."""
        if config.get("model_type") not in (MODEL_TYPE, MODEL_TYPE.replace("-", "_")):
            raise StartupError(f"audio tokenizer: model_type is {config.get('model_type')!r}, not {MODEL_TYPE!r}")
        rate, frame = int(_field(config, "sampling_rate")), int(_field(config, "downsample_rate"))
        channels = int(config.get("number_channels") or 1)
        if channels > 1 and config.get("enable_channel_interleave") is False:
            raise StartupError("audio tokenizer: enable_channel_interleave false is not supported")
        seconds = float(config.get("causal_transformer_context_duration", 10.0))
        fastest = float(rate * channels)
        encoder, slowest = _blocks(_field(config, "encoder_kwargs"), "encoder_kwargs", fastest, seconds, down=True)
        decoder, end = _blocks(_field(config, "decoder_kwargs"), "decoder_kwargs", slowest, seconds, down=False)
        if round(end) != round(fastest) or round(fastest / slowest) != frame * channels:
            raise StartupError(
                f"audio tokenizer: the patch sizes make frames of {fastest / slowest:g} samples and samples at {end:g} "
                f"Hz of them, not {frame * channels} and {fastest:g}"
            )
        return cls(
            sample_rate=rate,
            frame_samples=frame,
            channels=channels,
            encoder=encoder,
            decoder=decoder,
            quantizer=_quantizer(config),
        )


def _blocks(
    found: Sequence[Mapping[str, Any]], name: str, rate: float, seconds: float, *, down: bool
) -> tuple[tuple[BlockSpec, ...], float]:
    """The blocks, and places a second after the last of them, ``rate`` being those before the first."""
    blocks: list[BlockSpec] = []
    for i, block in enumerate(found):
        kind, at = block.get("module_type"), f"{name}[{i}]."
        if kind == "PatchedPretransform":
            size = int(_field(block, "patch_size", at))
            blocks.append(PatchSpec(size=size))
            rate = rate / size if down else rate * size
        elif kind == "Transformer":
            blocks.append(_transformer(block, at, round(rate * float(block.get("context_duration", seconds)))))
        else:
            raise StartupError(f"audio tokenizer: {at}module_type {kind!r} is not supported")
    return tuple(blocks), rate


def _transformer(block: Mapping[str, Any], at: str, context: int) -> TransformerSpec:
    for key, value in _FIXED.items():
        if block.get(key, value) != value:
            raise StartupError(f"audio tokenizer: {at}{key} {block[key]!r} is not supported, only {value!r}")
    spec = TransformerSpec(
        in_size=int(_field(block, "input_dimension", at)),
        out_size=int(_field(block, "output_dimension", at)),
        width=int(_field(block, "d_model", at)),
        num_heads=int(_field(block, "num_heads", at)),
        num_layers=int(_field(block, "num_layers", at)),
        inner_size=int(_field(block, "dim_feedforward", at)),
        context=context,
        scaled=block.get("layer_scale") is not None,
        rope_theta=float(block.get("max_period", 10000)),
    )
    if spec.width % spec.num_heads or spec.head_dim % 2:
        raise StartupError(f"audio tokenizer: {at}num_heads {spec.num_heads} does not divide d_model into pairs")
    if context < 1:
        raise StartupError(f"audio tokenizer: {at}context_duration leaves no place to attend to")
    return spec


def _quantizer(config: Mapping[str, Any]) -> QuantizerSpec:
    found, at = _field(config, "quantizer_kwargs"), "quantizer_kwargs."
    kind = found.get("quantizer_type") or config.get("quantizer_type") or "rlfq"
    if kind not in _NORMALISED:
        raise StartupError(f"audio tokenizer: {at}quantizer_type {kind!r} is not one of {', '.join(_NORMALISED)}")
    in_size = int(_field(found, "input_dim", at))
    return QuantizerSpec(
        in_size=in_size,
        size=int(found.get("rvq_dim") or in_size),
        out_size=int(found.get("output_dim") or in_size),
        num_codebooks=int(_field(found, "num_quantizers", at)),
        codebook_size=int(_field(found, "codebook_size", at)),
        codebook_dim=int(_field(found, "codebook_dim", at)),
        normalised=_NORMALISED[kind],
    )


def _field(config: Mapping[str, Any], name: str, at: str = "") -> Any:
    if config.get(name) is None:
        raise StartupError(f"audio tokenizer: the config lacks the field {at}{name}")
    return config[name]
