"""What the ``config.json`` of a Ming-Omni-TTS checkpoint says. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from sgl_omni.engine.decoder_config import DecoderConfig
from sgl_omni.engine.shapes import Named, decoder_shapes, linear_shapes
from sgl_omni.errors import StartupError

_ENCODER_AGGREGATOR_LAYERS = 4
_LANGUAGE_MODELS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "qwen2": {"rms_norm_eps": 1e-6},
        "bailing_moe": {"rms_norm_eps": 1e-5, "norm_topk_prob": True, "use_bias": True},
    }
)
"""What the published code takes for granted of a language model's config."""
SPEAKER_RATE, SPEAKER_SIZE = 16_000, 192
"""Samples a second by which a speaker is told, and numbers of the speaker's vector."""
TIME_SIZE = 256
"""Numbers that a time of the flow is written in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksSpec:
    """Transformer blocks that see all of a short sequence at once."""

    hidden_size: int
    num_layers: int
    num_heads: int
    inner_size: int

    @classmethod
    def parse(cls, config: Mapping[str, Any], name: str) -> BlocksSpec:
        missing = [key for key in ("hidden_size", "depth", "num_heads") if config.get(key) is None]
        if missing:
            raise StartupError(f"Ming-Omni-TTS: the config lacks the field {name}.{missing[0]}")
        width, heads = int(config["hidden_size"]), int(config["num_heads"])
        if width % heads or (width // heads) % 2:
            raise StartupError(f"Ming-Omni-TTS: {name}.num_heads {heads} does not divide the width {width} into pairs")
        inner = int(width * float(config.get("mlp_ratio", 4.0)))
        return cls(hidden_size=width, num_layers=int(config["depth"]), num_heads=heads, inner_size=inner)


@dataclass(frozen=True, slots=True, kw_only=True)
class VaeSpec:
    """``hop`` samples make up a frame, and ``patch`` frames a latent of ``latent_size`` numbers.

    The encoder's frames are ``window`` samples long; without ``aggregator`` (patch 1) a frame is a latent.
    """

    sample_rate: int
    latent_size: int
    patch: int
    hop: int
    window: int
    output_hop: int
    encoder: DecoderConfig
    aggregator: DecoderConfig | None
    decoder: DecoderConfig

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> VaeSpec:
        inside, outside = config["enc_kwargs"], config["dec_kwargs"]
        patch = int(config.get("patch_size", -1))
        if patch == 0:
            raise StartupError("Ming-Omni-TTS: audio_tokenizer_config.patch_size is 0")
        encoder = _backbone(inside["backbone"])
        window = int(inside.get("input_dim", 320))
        # The published code cuts the encoder's own config to as many layers, by its rule for windows, not its list.
        cut = {key: value for key, value in inside["backbone"].items() if key != "layer_types"}
        cut["num_hidden_layers"] = _ENCODER_AGGREGATOR_LAYERS
        if int(outside.get("latent_dim", inside["latent_dim"])) != int(inside["latent_dim"]):
            raise StartupError("Ming-Omni-TTS: latent_dim of enc_kwargs and dec_kwargs differ")
        return cls(
            sample_rate=int(config["sample_rate"]),
            latent_size=int(inside["latent_dim"]),
            patch=max(1, patch),
            hop=int(inside.get("hop_size", 320)),
            window=window,
            output_hop=int(outside["output_dim"]),
            encoder=encoder,
            aggregator=None if patch == -1 else _backbone(cut),
            decoder=_backbone(outside["backbone"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MingSpec:
    """A step makes ``patch`` latents; the flow sees the last ``history`` latents before them."""

    decoder: DecoderConfig
    flow: BlocksSpec
    aggregator: BlocksSpec
    patch: int
    history: int
    vae: VaeSpec

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> MingSpec:
        """Raises ``StartupError`` that names what is missing or not supported."""
        flow = config["ditar_config"]
        patch = int(flow["patch_size"])
        history = int(flow.get("history_patch_size", patch))
        if history < patch:
            raise StartupError(f"Ming-Omni-TTS: history_patch_size {history} is less than patch_size {patch}")
        return cls(
            decoder=_language_model(config["llm_config"]),
            flow=BlocksSpec.parse(flow, "ditar_config"),
            aggregator=BlocksSpec.parse(config["aggregator_config"], "aggregator_config"),
            patch=patch,
            history=history,
            vae=VaeSpec.parse(config["audio_tokenizer_config"]),
        )

    @property
    def latent_size(self) -> int:
        return self.vae.latent_size


def _language_model(config: Mapping[str, Any]) -> DecoderConfig:
    """Positions of three axes are alike on all of them as long as there are no pictures, which is one axis."""
    kind = config.get("model_type", "qwen2")
    rope = config.get("rope_scaling") or {}
    plain = {"rope_scaling": None} if rope.get("type", rope.get("rope_type")) == "3D" else {}
    return DecoderConfig.parse({"model_type": kind, **_LANGUAGE_MODELS.get(kind, {}), **config, **plain})


def engine_shapes(spec: MingSpec) -> Named:
    """What the engine reads of a checkpoint: its language model, flow and aggregator."""
    width = spec.decoder.hidden_size
    flow, mark = "flowloss.cfm.model.", "linear_proj_audio."
    yield f"model.model.{spec.decoder.names.embedding}.weight", (spec.decoder.vocab_size, width)
    yield from decoder_shapes(spec.decoder, "model.model.")
    yield from _blocks(spec.flow, flow, spec.latent_size, spec.latent_size)
    yield from linear_shapes(f"{flow}t_embedder.time_mlp.0", TIME_SIZE, spec.flow.hidden_size, bias=True)
    yield from linear_shapes(f"{flow}t_embedder.time_mlp.2", spec.flow.hidden_size, spec.flow.hidden_size, bias=True)
    yield from linear_shapes(f"{flow}c_embedder.cond_embedder", width, spec.flow.hidden_size, bias=True)
    yield from _blocks(spec.aggregator, mark, spec.latent_size, width)
    yield f"{mark}word_embedder.weight", (1, spec.aggregator.hidden_size)
    yield from linear_shapes("stop_head", width, 2, bias=True)
    yield from linear_shapes("spk_head", SPEAKER_SIZE, width, bias=True)


def vae_shapes(spec: VaeSpec) -> Named:
    """What the audio VAE's encoder and decoder read."""
    width, latent = spec.encoder.hidden_size, spec.latent_size
    yield from decoder_shapes(spec.encoder, "audio.encoder.encoder.")
    yield from linear_shapes("audio.encoder.fc1", spec.window, width, bias=False)
    yield from linear_shapes("audio.encoder.fc2", width, width, bias=True)
    yield from linear_shapes("audio.encoder.fc3", width, 2 * latent, bias=True)
    if spec.aggregator is not None:
        yield from decoder_shapes(spec.aggregator, "audio.encoder.aggregator.")
        yield "audio.encoder.cls_embed", (1, 1, width)
    width = spec.decoder.hidden_size
    yield from linear_shapes("audio.decoder.fc1", latent, width, bias=True)
    yield from decoder_shapes(spec.decoder, "audio.decoder.decoder.")
    yield from linear_shapes("audio.decoder.head.out", width, 4 * spec.output_hop + 2, bias=True)


def _blocks(spec: BlocksSpec, prefix: str, in_size: int, out_size: int) -> Named:
    width, inner = spec.hidden_size, spec.inner_size
    yield from linear_shapes(f"{prefix}x_embedder", in_size, width, bias=True)
    for i in range(spec.num_layers):
        name = f"{prefix}blocks.{i}"
        for part in ("to_q", "to_k", "to_v", "to_out.0"):
            yield from linear_shapes(f"{name}.attn.{part}", width, width, bias=True)
        for part in ("norm1", "norm2"):
            yield f"{name}.{part}.weight", (width,)
        yield from linear_shapes(f"{name}.mlp.ff.0.0", width, inner, bias=True)
        yield from linear_shapes(f"{name}.mlp.ff.2", inner, width, bias=True)
    yield f"{prefix}final_layer.norm_final.weight", (width,)
    yield from linear_shapes(f"{prefix}final_layer.linear", width, out_size, bias=True)


def _backbone(config: Mapping[str, Any]) -> DecoderConfig:
    return DecoderConfig.parse({"model_type": "qwen2", "rms_norm_eps": 1e-6, "max_window_layers": 28, **config})
