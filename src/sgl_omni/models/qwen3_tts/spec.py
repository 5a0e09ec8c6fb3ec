"""The talker's shapes and ids, from a checkpoint's ``config.json``. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sgl_omni.engine.decoder_config import DecoderConfig
from sgl_omni.engine.shapes import Named, decoder_shapes, predictor_shapes, projection_shapes
from sgl_omni.errors import StartupError

_SPECIALS = 1024
"""The last ids of the talker's vocabulary are no codes; of them it may only say the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkerSpec:
    """``num_codes`` make up a frame: the talker's own and those of its code predictor."""

    decoder: DecoderConfig
    predictor: DecoderConfig
    num_codes: int
    text_vocab_size: int
    text_hidden_size: int
    eos_id: int
    pad_id: int
    bos_id: int
    think_id: int
    nothink_id: int
    think_bos_id: int
    think_eos_id: int
    tts_bos_id: int
    tts_eos_id: int
    tts_pad_id: int

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> TalkerSpec:
        """Raises ``StartupError`` that names the field which is missing, or what the decoder does not have."""
        try:
            return cls._parse(config)
        except KeyError as error:
            raise StartupError(f"the talker's config.json lacks the field {error}") from error

    @classmethod
    def _parse(cls, config: Mapping[str, Any]) -> TalkerSpec:
        talker = config["talker_config"]
        decoder = DecoderConfig.parse(talker)
        return cls(
            # The three axes of its positions always agree, so that one does.
            decoder=replace(decoder, rope=replace(decoder.rope, sections=(), interleaved=False)),
            predictor=DecoderConfig.parse(talker["code_predictor_config"]),
            num_codes=talker["num_code_groups"],
            text_vocab_size=talker["text_vocab_size"],
            text_hidden_size=talker["text_hidden_size"],
            eos_id=talker["codec_eos_token_id"],
            pad_id=talker["codec_pad_id"],
            bos_id=talker["codec_bos_id"],
            think_id=talker["codec_think_id"],
            nothink_id=talker["codec_nothink_id"],
            think_bos_id=talker["codec_think_bos_id"],
            think_eos_id=talker["codec_think_eos_id"],
            tts_bos_id=config["tts_bos_token_id"],
            tts_eos_id=config["tts_eos_token_id"],
            tts_pad_id=config["tts_pad_token_id"],
        )

    @property
    def first_special(self) -> int:
        return self.decoder.vocab_size - _SPECIALS


def talker_shapes(spec: TalkerSpec) -> Named:
    """What the engine reads of a checkpoint."""
    width, vocabulary, text = spec.decoder.hidden_size, spec.decoder.vocab_size, spec.text_hidden_size
    yield from decoder_shapes(spec.decoder, "talker.model.")
    yield from predictor_shapes(spec.predictor, spec.num_codes - 1, width, "talker.code_predictor.")
    yield from projection_shapes("talker.text_projection", text, text, width)
    yield "talker.model.codec_embedding.weight", (vocabulary, width)
    yield "talker.model.text_embedding.weight", (spec.text_vocab_size, text)
    yield "talker.codec_head.weight", (vocabulary, width)
