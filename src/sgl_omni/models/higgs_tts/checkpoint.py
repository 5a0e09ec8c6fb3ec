"""What a Higgs checkpoint says, and where its audio tokenizer lies. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_omni.engine.shapes import Named
from sgl_omni.errors import InvalidRequest
from sgl_omni.models.folder import (
    check_folder,
    check_tensors,
    check_weights,
    find_folder,
    read_json,
    read_sizes,
    require,
)
from sgl_omni.models.higgs_audio_v2.codec_shapes import UNREAD as CODEC_UNREAD
from sgl_omni.models.higgs_audio_v2.codec_shapes import codec_shapes
from sgl_omni.models.higgs_audio_v2.codec_spec import CodecSpec
from sgl_omni.models.higgs_audio_v2.spec import UNREAD as V2_UNREAD
from sgl_omni.models.higgs_audio_v2.spec import HiggsSpec
from sgl_omni.models.higgs_audio_v2.spec import engine_shapes as v2_shapes
from sgl_omni.models.higgs_tts.prompts import SHORTEST, TaggedPrompts
from sgl_omni.models.higgs_tts.spec import HiggsTts3Spec
from sgl_omni.models.higgs_tts.spec import engine_shapes as v3_shapes
from sgl_omni.models.tokens import check_chat, check_tokens

V2 = "HiggsAudioV2ForConditionalGeneration"
V3 = "HiggsMultimodalQwen3ForConditionalGeneration"

CODEC_PREFIX = "tied.embedding.modality_embeddings.0.model."
"""Where a Higgs TTS 3 checkpoint keeps the audio tokenizer."""

V3_UNREAD = (f"{CODEC_PREFIX}*", "*.rotary_emb.inv_freq", "tied.head.*")
CODEC_ID = "bosonai/higgs-audio-v2-tokenizer"
CODEC_FOLDER = "audio_tokenizer"
MAX_REFERENCE_SECONDS = 60.0

_V2_FIELDS = (
    "hidden_size",
    "num_hidden_layers",
    "num_codebooks",
    "codebook_size",
    "audio_token_id",
    "audio_delay_token_id",
    "audio_bos_token_id",
    "audio_stream_bos_id",
    "audio_stream_eos_id",
)
_V2_TOKENS = {
    "audio_token_id": "<|AUDIO_OUT|>",
    "audio_delay_token_id": "<|reserved_special_token_6|>",
    "audio_bos_token_id": "<|audio_out_bos|>",
}
_V3_FIELDS = (
    "text_config.hidden_size",
    "text_config.num_hidden_layers",
    "audio_encoder_config.num_codebooks",
    "audio_encoder_config.vocab_size",
)


@dataclass(frozen=True, slots=True)
class Defaults:
    """Sampling of a request that says nothing about it."""

    temperature: float
    top_k: int
    top_p: float


_DEFAULTS = {V2: Defaults(0.3, 50, 0.95), V3: Defaults(0.8, 50, 1.0)}
"""As the models' cards sample, where the checkpoint's generation_config.json does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HiggsCheckpoint:
    """A folder that has been looked at. ``config`` is its config.json."""

    folder: Path
    architecture: str
    config: Mapping[str, Any]
    num_codebooks: int
    codebook_size: int
    """With the ids of begin and end."""
    codec: CodecSpec
    codec_folder: Path
    codec_prefix: str
    defaults: Defaults

    @classmethod
    def load(cls, model_path: str) -> HiggsCheckpoint:
        """Raises ``InvalidRequest`` that names file and field for whatever is missing or does not fit."""
        folder = find_folder(model_path)
        config = check_folder(folder, (V2, V3), weights=())
        is_v2 = V2 in config["architectures"]
        for field in _V2_FIELDS if is_v2 else _V3_FIELDS:
            _positive(require(config, field, folder / "config.json"), field, folder / "config.json")
        sizes = config if is_v2 else config["audio_encoder_config"]
        found = cls(
            folder=folder,
            architecture=V2 if is_v2 else V3,
            config=config,
            num_codebooks=sizes["num_codebooks"],
            codebook_size=sizes["codebook_size" if is_v2 else "vocab_size"],
            **(_codec_apart(folder) if is_v2 else _codec_inside(folder)),
            defaults=_sampling(folder, _DEFAULTS[V2 if is_v2 else V3]),
        )
        found._check_codec()
        return found

    @property
    def is_v2(self) -> bool:
        return self.architecture == V2

    def check_tensors(self) -> None:
        """Raises ``InvalidRequest`` that names the tensors of engine and codec that are missing or ill-shaped."""
        entries = check_weights(self.folder)
        unread = V2_UNREAD if self.is_v2 else V3_UNREAD
        check_tensors(self.folder, lambda: _engine_shapes(self.config, self.is_v2), ignore=unread, entries=entries)
        if self.codec_folder != self.folder:
            entries = check_weights(self.codec_folder)
        parts = [f"{self.codec_prefix}{part}" for part in ("acoustic_decoder.", "acoustic_encoder.", "quantizer.")]
        check_tensors(
            self.codec_folder,
            lambda: codec_shapes(self.codec, self.codec_prefix, entries.keys()),
            parts,
            within=self.codec_prefix,
            ignore=[self.codec_prefix + pattern for pattern in CODEC_UNREAD],
            entries=entries,
        )

    def check_tokens(self) -> None:
        """Raises ``InvalidRequest`` that names what a prompt needs and the tokenizer lacks, or has as another id."""
        if self.is_v2:
            vocabulary = check_tokens(self.folder, self.config, "vocab_size", ids=_V2_TOKENS)
            check_chat(self.folder, vocabulary, self.config["vocab_size"], "vocab_size", SHORTEST)
        else:
            check_tokens(self.folder, self.config, "text_config.vocab_size", TaggedPrompts.PARTS)

    def _check_codec(self) -> None:
        codec, codes = self.codec, self.codebook_size - 2
        if (codec.num_codebooks, codec.codebook_size) != (self.num_codebooks, codes):
            raise InvalidRequest(
                f"{self.folder / 'config.json'} speaks {self.num_codebooks} codebooks of {codes} codes, and the audio "
                f"tokenizer of {self.codec_folder} has {codec.num_codebooks} of {codec.codebook_size}",
                param="model_path",
            )


def _engine_shapes(config: Mapping[str, Any], is_v2: bool) -> Named:
    return v2_shapes(HiggsSpec.parse(config)) if is_v2 else v3_shapes(HiggsTts3Spec.parse(config))


def _codec_apart(folder: Path) -> dict[str, Any]:
    """The tokenizer in a folder or repository of its own, as Higgs Audio v2 has it."""
    own = folder / CODEC_FOLDER
    codec_folder = own if own.is_dir() else find_folder(_codec_name(folder))
    config = read_sizes(codec_folder)
    spec = CodecSpec.parse(config, str(codec_folder / "config.json"))
    return {"codec": spec, "codec_folder": codec_folder, "codec_prefix": ""}


def _codec_inside(folder: Path) -> dict[str, Any]:
    """The tokenizer's weights in the checkpoint itself; a config, where it differs from the published one, beside."""
    file = folder / CODEC_FOLDER / "config.json"
    config = read_sizes(file.parent) if file.is_file() else {}
    spec = CodecSpec.parse(config, str(file))
    return {"codec": spec, "codec_folder": folder, "codec_prefix": CODEC_PREFIX}


def _codec_name(folder: Path) -> str:
    file = folder / "processor_config.json"
    if not file.is_file():
        return CODEC_ID
    part = read_json(folder, file.name).get("audio_tokenizer")
    name = part.get("audio_tokenizer_name_or_path") if isinstance(part, Mapping) else None
    return name if isinstance(name, str) and name else CODEC_ID


def _sampling(folder: Path, default: Defaults) -> Defaults:
    file = folder / "generation_config.json"
    if not file.is_file():
        return default
    found = read_json(folder, file.name)
    if not found.get("do_sample"):
        return default
    values = {}
    for key, standard in (("temperature", 1.0), ("top_k", 50), ("top_p", 1.0)):
        value = found.get(key, standard)
        if key == "top_k" and value == -1:
            value = 0  # all
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise InvalidRequest(f"{file}: {key} is {value!r}, no number of 0 or more", param="model_path")
        values[key] = value
    return Defaults(float(values["temperature"]), int(values["top_k"]), float(values["top_p"]))


def _positive(value: Any, field: str, file: Path) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidRequest(f"{file}: {field} is {value!r}, no whole number", param="model_path")
