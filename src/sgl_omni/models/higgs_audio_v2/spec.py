"""What the config of a Higgs Audio v2 checkpoint says beyond its decoder's shapes. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sgl_omni.engine.decoder_config import DecoderConfig
from sgl_omni.engine.shapes import Named, attention_shapes, mlp_shapes
from sgl_omni.errors import StartupError

UNREAD = ("text_lm_head.weight", "*.audio_tokens_offsets")
"""What checkpoints may hold besides: generation has no use for a text head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HiggsSpec:
    """``placeholder`` and ``delay_placeholder`` stand in a text prompt for a row of codes.

    ``codebook_size`` counts ``stream_bos_id`` and ``stream_eos_id``, which are the ids above the codec's own.
    """

    decoder: DecoderConfig
    num_codebooks: int
    codebook_size: int
    placeholder: int
    delay_placeholder: int
    audio_bos_id: int
    stream_bos_id: int
    stream_eos_id: int

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> HiggsSpec:
        """Raises ``StartupError`` where the special ids are not the last two of a codebook."""
        spec = cls(
            decoder=DecoderConfig.parse(config),
            num_codebooks=config["num_codebooks"],
            codebook_size=config["codebook_size"],
            placeholder=config["audio_token_id"],
            delay_placeholder=config["audio_delay_token_id"],
            audio_bos_id=config["audio_bos_token_id"],
            stream_bos_id=config["audio_stream_bos_id"],
            stream_eos_id=config["audio_stream_eos_id"],
        )
        if {spec.stream_bos_id, spec.stream_eos_id} != {spec.codebook_size - 2, spec.codebook_size - 1}:
            raise StartupError(
                f"audio_stream_bos_id {spec.stream_bos_id} and audio_stream_eos_id {spec.stream_eos_id} are not the "
                f"last two of the codebook_size {spec.codebook_size} ids"
            )
        return spec

    @property
    def codec_size(self) -> int:
        """Ids that the codec can decode."""
        return self.codebook_size - 2


def engine_shapes(spec: HiggsSpec) -> Named:
    """What the engine reads of a checkpoint."""
    config, rows = spec.decoder, spec.num_codebooks * spec.codebook_size
    width = config.hidden_size
    yield "model.embed_tokens.weight", (config.vocab_size, width)
    yield "model.embed_audio_tokens.embed_audio_tokens.weight", (rows, width)
    for i in range(config.num_layers):
        name = f"model.layers.{i}"
        yield from attention_shapes(config, f"{name}.self_attn")
        for kind in ("", "audio_"):
            yield f"{name}.{kind}input_layernorm.weight", (width,)
            yield f"{name}.{kind}post_attention_layernorm.weight", (width,)
            yield from mlp_shapes(width, config.intermediate_size, f"{name}.{kind}mlp", bias=config.mlp_bias)
    yield "model.norm.weight", (width,)
    yield "audio_lm_head.weight", (rows, width)
