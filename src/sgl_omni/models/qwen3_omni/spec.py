"""What the config of a Qwen3-Omni checkpoint says about its thinker and its talker. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sgl_omni.engine.decoder_config import DecoderConfig
from sgl_omni.engine.shapes import Named, causal_shapes, decoder_shapes, predictor_shapes, projection_shapes
from sgl_omni.errors import StartupError

_SPECIALS = 1024
"""The last ids of the talker's vocabulary are no codes; of them it may only say the end."""


def parse_multi_axis(config: Mapping[str, Any]) -> DecoderConfig:
    """Thinker and talker mix the three axes of their positions pair by pair, whether or not the config says so."""
    decoder = DecoderConfig.parse(config)
    sections = decoder.rope.sections or (24, 20, 20)
    return replace(decoder, rope=replace(decoder.rope, sections=sections, interleaved=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkerSpec:
    """``num_codes`` make up a row: the talker's own and those of its code predictor."""

    decoder: DecoderConfig
    predictor: DecoderConfig
    num_codes: int
    thinker_hidden_size: int
    thinker_vocab_size: int
    projection_size: int
    accept_layer: int
    eos_id: int
    think_ids: tuple[int, ...]
    """What a prompt says to the talker before the voice, and ``pad_id`` and ``bos_id`` after it."""
    pad_id: int
    bos_id: int
    speakers: Mapping[str, int]
    tts_bos_id: int
    tts_eos_id: int
    tts_pad_id: int
    start_id: int
    """Begins a turn of the conversation; ``user_id`` or ``assistant_id`` after it says whose."""
    user_id: int
    assistant_id: int
    media_ids: frozenset[int]
    """Places of the encoders' embeddings in the thinker's prompt."""

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> TalkerSpec:
        """Reads the ``config.json`` of a whole checkpoint. Raises ``StartupError`` where it has no talker."""
        talker = config.get("talker_config")
        if not talker:
            raise StartupError("the checkpoint's config has no talker_config")
        text = config["thinker_config"]["text_config"]
        spec = cls(
            decoder=parse_multi_axis(talker["text_config"]),
            predictor=DecoderConfig.parse(talker["code_predictor_config"]),
            num_codes=talker["num_code_groups"],
            thinker_hidden_size=talker["thinker_hidden_size"],
            thinker_vocab_size=text["vocab_size"],
            projection_size=talker["text_config"]["intermediate_size"],
            accept_layer=talker["accept_hidden_layer"],
            eos_id=talker["codec_eos_token_id"],
            think_ids=(talker["codec_nothink_id"], talker["codec_think_bos_id"], talker["codec_think_eos_id"]),
            pad_id=talker["codec_pad_id"],
            bos_id=talker["codec_bos_id"],
            speakers={name.lower(): code for name, code in (talker.get("speaker_id") or {}).items()},
            tts_bos_id=config["tts_bos_token_id"],
            tts_eos_id=config["tts_eos_token_id"],
            tts_pad_id=config["tts_pad_token_id"],
            start_id=config["im_start_token_id"],
            user_id=config["user_token_id"],
            assistant_id=config["assistant_token_id"],
            media_ids=frozenset(config["thinker_config"][f"{kind}_token_id"] for kind in ("audio", "image", "video")),
        )
        if spec.predictor.hidden_size != spec.decoder.hidden_size:
            raise StartupError(
                f"the code predictor's hidden size {spec.predictor.hidden_size} is not the talker's "
                f"{spec.decoder.hidden_size}"
            )
        return spec

    @property
    def first_special(self) -> int:
        return self.decoder.vocab_size - _SPECIALS


def engine_shapes(config: Mapping[str, Any]) -> Named:
    """What thinker and talker read of a whole checkpoint."""
    text = parse_multi_axis(config["thinker_config"]["text_config"])
    yield from causal_shapes(text, "thinker.model.", "thinker.lm_head")
    yield from talker_shapes(TalkerSpec.parse(config))


def talker_shapes(spec: TalkerSpec) -> Named:
    width, vocabulary = spec.decoder.hidden_size, spec.decoder.vocab_size
    yield from decoder_shapes(spec.decoder, "talker.model.")
    yield from predictor_shapes(spec.predictor, spec.num_codes - 1, width, "talker.code_predictor.")
    for name in ("text_projection", "hidden_projection"):
        yield from projection_shapes(f"talker.{name}", spec.thinker_hidden_size, spec.projection_size, width)
    yield "talker.model.codec_embedding.weight", (vocabulary, width)
    yield "talker.codec_head.weight", (vocabulary, width)
    yield "thinker.model.embed_tokens.weight", (spec.thinker_vocab_size, spec.thinker_hidden_size)
