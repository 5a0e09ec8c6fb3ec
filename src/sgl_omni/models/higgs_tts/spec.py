"""What the config of a Higgs TTS 3 checkpoint says. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sgl_omni.engine.decoder_config import DecoderConfig
from sgl_omni.engine.shapes import Named, decoder_shapes
from sgl_omni.errors import StartupError

DEFAULT_ROPE_THETA = 1_000_000.0
"""Of Qwen3, where the config leaves it null, as published ones do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HiggsTts3Spec:
    """``codebook_size`` counts ``stream_bos_id`` and ``stream_eos_id``, the two ids above the codec's own."""

    decoder: DecoderConfig
    num_codebooks: int
    codebook_size: int
    tied: bool

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> HiggsTts3Spec:
        """Raises ``StartupError`` that names the field for a checkpoint of another kind."""
        text, audio = _part(config, "text_config"), _part(config, "audio_encoder_config")
        kind = audio.get("encoder_type", "discrete")
        if kind != "discrete":
            raise StartupError(f"audio_encoder_config.encoder_type is {kind!r}; this family speaks discrete codes")
        if not audio.get("use_delay_pattern", True):
            raise StartupError("audio_encoder_config.use_delay_pattern is false; this family delays its codebooks")
        for field in ("num_codebooks", "vocab_size"):
            if not isinstance(audio.get(field), int) or audio[field] < 3:
                raise StartupError(f"audio_encoder_config.{field} must be a whole number, not {audio.get(field)!r}")
        decoder = DecoderConfig.parse(with_rope(text))
        width = audio.get("out_dim", decoder.hidden_size)
        if width != decoder.hidden_size:
            raise StartupError(
                f"audio_encoder_config.out_dim is {width}, and text_config.hidden_size {decoder.hidden_size}"
            )
        return cls(
            decoder=decoder,
            num_codebooks=audio["num_codebooks"],
            codebook_size=audio["vocab_size"],
            tied=bool(audio.get("tie_word_embeddings", True)),
        )

    @property
    def stream_bos_id(self) -> int:
        return self.codebook_size - 2

    @property
    def stream_eos_id(self) -> int:
        return self.codebook_size - 1

    @property
    def codec_size(self) -> int:
        """Ids that the codec can decode."""
        return self.codebook_size - 2


def engine_shapes(spec: HiggsTts3Spec) -> Named:
    """What the engine reads of a checkpoint."""
    width, rows = spec.decoder.hidden_size, spec.num_codebooks * spec.codebook_size
    yield "tied.embedding.text_embedding.weight", (spec.decoder.vocab_size, width)
    yield "tied.embedding.modality_embeddings.0.embedding.weight", (rows, width)
    yield from decoder_shapes(spec.decoder, "body.")
    if not spec.tied:
        yield "tied.head.modality_heads.0.weight", (rows, width)


def with_rope(text: Mapping[str, Any]) -> dict[str, Any]:
    """A Qwen3 config whose rotation is said."""
    nested = text.get("rope_parameters") or {}
    if text.get("rope_theta") is None and nested.get("rope_theta") is None:
        return {**text, "rope_theta": DEFAULT_ROPE_THETA}
    return dict(text)


def _part(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    if not isinstance(found, Mapping):
        raise StartupError(f"config.json lacks the object {name}")
    return found
