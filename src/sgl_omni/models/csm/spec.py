"""What the engine takes from a CSM checkpoint's ``config.json``. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sgl_omni.engine.decoder_config import DecoderConfig
from sgl_omni.engine.shapes import Named, decoder_shapes
from sgl_omni.errors import StartupError


@dataclass(frozen=True, slots=True, kw_only=True)
class CsmSpec:
    """A row is a text id and ``num_codebooks`` codes. A row is a frame where its text id is ``audio_id``, or
    ``audio_end_id``, which ends the audio; else its codes do not count.

    Tables and heads on disk have ``vocab_size`` codes a codebook, of which the codec knows the first ``num_codes``.
    """

    backbone: DecoderConfig
    depth: DecoderConfig
    num_codebooks: int
    num_codes: int
    vocab_size: int
    text_vocab_size: int
    audio_id: int
    audio_end_id: int
    end_code: int

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> CsmSpec:
        """Reads a config that was checked. Raises ``StartupError`` for a decoder that there is no code for."""
        try:
            return cls(
                backbone=_decoder(config),
                depth=_decoder(config["depth_decoder_config"]),
                num_codebooks=config["num_codebooks"],
                num_codes=config["codec_config"]["codebook_size"],
                vocab_size=config["vocab_size"],
                text_vocab_size=config["text_vocab_size"],
                audio_id=config["audio_token_id"],
                audio_end_id=config["audio_eos_token_id"],
                end_code=config["codebook_eos_token_id"],
            )
        except KeyError as error:
            raise StartupError(f"CSM: the config lacks the field {error.args[0]}") from error


def engine_shapes(spec: CsmSpec, table: str) -> Named:
    """What the engine reads. ``table``: the name on disk of the embeddings of codes."""
    width, depth = spec.backbone.hidden_size, spec.depth.hidden_size
    yield from decoder_shapes(spec.backbone, "backbone_model.")
    yield from decoder_shapes(spec.depth, "depth_decoder.model.")
    yield "depth_decoder.model.inputs_embeds_projector.weight", (depth, width)
    yield "depth_decoder.codebooks_head.weight", (spec.num_codebooks - 1, depth, spec.vocab_size)
    yield table, (spec.num_codebooks * spec.vocab_size, width)
    yield "embed_text_tokens.weight", (spec.text_vocab_size, width)
    yield "lm_head.weight", (spec.vocab_size, width)


def _decoder(config: Mapping[str, Any]) -> DecoderConfig:
    """Both decoders are Llama's, under names of their own, and turn by this theta where none is written."""
    return DecoderConfig.parse({"rope_theta": 500000.0, **config, "model_type": "llama"})
