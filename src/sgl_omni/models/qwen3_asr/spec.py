"""What a Qwen3-ASR checkpoint's files say, in the layout of its authors and in that of transformers. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sgl_omni.errors import InvalidRequest
from sgl_omni.models.folder import check_folder, find_folder, read_sizes, require
from sgl_omni.models.mel import check_mel
from sgl_omni.models.numbers import check_ids
from sgl_omni.models.text_llm.generation import GenerationDefaults

ARCHITECTURE = "Qwen3ASRForConditionalGeneration"

LANGUAGES: Mapping[str, str] = MappingProxyType(
    {
        "ar": "Arabic",
        "cs": "Czech",
        "da": "Danish",
        "de": "German",
        "el": "Greek",
        "en": "English",
        "es": "Spanish",
        "fa": "Persian",
        "fi": "Finnish",
        "fil": "Filipino",
        "fr": "French",
        "hi": "Hindi",
        "hu": "Hungarian",
        "id": "Indonesian",
        "it": "Italian",
        "ja": "Japanese",
        "ko": "Korean",
        "mk": "Macedonian",
        "ms": "Malay",
        "nl": "Dutch",
        "pl": "Polish",
        "pt": "Portuguese",
        "ro": "Romanian",
        "ru": "Russian",
        "sv": "Swedish",
        "th": "Thai",
        "tr": "Turkish",
        "vi": "Vietnamese",
        "yue": "Cantonese",
        "zh": "Chinese",
    }
)
"""What the model calls each, by its code."""

UNSPACED = frozenset({"ja", "th", "yue", "zh"})
"""Written without spaces between words."""

_FIELDS = (
    "audio_token_id",
    "audio_config.d_model",
    "audio_config.encoder_layers",
    "audio_config.num_mel_bins",
    "audio_config.output_dim",
    "text_config.hidden_size",
    "text_config.intermediate_size",
    "text_config.num_attention_heads",
    "text_config.num_hidden_layers",
    "text_config.rms_norm_eps",
    "text_config.vocab_size",
)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a checkpoint keeps what: its fields below ``config`` of ``config.json``, its tensors below the others."""

    config: str
    tower: str
    decoder: str
    head: str
    elsewhere: Mapping[str, str] = field(default_factory=dict[str, str])
    """Submodules of the audio tower that do not lie below ``tower``."""


AUTHORS = Layout("thinker_config.", "thinker.audio_tower.", "thinker.model.", "thinker.lm_head")
TRANSFORMERS = Layout(
    "",
    "model.audio_tower.",
    "model.language_model.",
    "lm_head",
    MappingProxyType(
        {"proj1": "model.multi_modal_projector.linear_1", "proj2": "model.multi_modal_projector.linear_2"}
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AsrSpec:
    """``audio`` and ``text`` are the parts of ``config.json``; ``mel`` says how frames are made of samples.

    ``languages`` maps codes to the model's names. ``tied``: what the config says of embedding and head, if anything.
    """

    folder: Path
    layout: Layout
    audio: Mapping[str, Any]
    text: Mapping[str, Any]
    mel: Mapping[str, Any]
    audio_id: int
    eos_ids: tuple[int, ...]
    languages: Mapping[str, str]
    tied: bool | None

    @classmethod
    def load(cls, model_path: str) -> AsrSpec:
        """Raises ``InvalidRequest`` that names file and field for a folder that is not whole."""
        folder = find_folder(model_path)
        config = check_folder(folder, (ARCHITECTURE,), weights=())
        file = folder / "config.json"
        layout = AUTHORS if "thinker_config" in config else TRANSFORMERS
        for name in _FIELDS:
            require(config, layout.config + name, file)
        check_ids(config, [layout.config + name for name in _FIELDS], file)
        part = config.get("thinker_config", config)
        if part.get("classify_num") or part.get("model_type") == "qwen3_forced_aligner":
            raise InvalidRequest(f"{file}: this checkpoint aligns text and does not write any", param="model_path")
        eos_ids = GenerationDefaults.load(folder, part["text_config"]["vocab_size"]).eos_ids
        if not eos_ids:
            raise InvalidRequest(f"{folder / 'generation_config.json'} lacks the field eos_token_id", "model_path")
        said = (each.get("tie_word_embeddings") for each in (part["text_config"], part, config))
        return cls(
            folder=folder,
            layout=layout,
            audio=part["audio_config"],
            text=part["text_config"],
            mel=_mel(folder, part["audio_config"]["num_mel_bins"]),
            audio_id=part["audio_token_id"],
            eos_ids=eos_ids,
            languages=_languages(config),
            tied=next((each for each in said if each is not None), None),
        )

    @property
    def window(self) -> int:
        """Half of the mel frames that the tower's convolutions see together."""
        return int(self.audio.get("n_window", 50))


def _languages(config: Mapping[str, Any]) -> dict[str, str]:
    """All, or those that the checkpoint names."""
    named = config.get("support_languages")
    return {code: name for code, name in LANGUAGES.items() if not named or name in named}


def _mel(folder: Path, bins: int) -> dict[str, Any]:
    """Of ``preprocessor_config.json``, or of transformers' newer ``processor_config.json``."""
    name = "preprocessor_config.json"
    if (folder / name).is_file() or not (folder / "processor_config.json").is_file():
        found = read_sizes(folder, name)
    else:
        name = "processor_config.json"
        found = require(read_sizes(folder, name), "feature_extractor", folder / name)
    check_mel(found, folder / name, bins)
    return {key: found[key] for key in ("feature_size", "sampling_rate", "hop_length", "n_fft") if key in found}
