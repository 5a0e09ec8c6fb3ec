"""What a checkpoint folder says about itself, without its weights: its kind, its voices, its prompts. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_omni.errors import InvalidRequest
from sgl_omni.models.folder import check_folder, find_folder, read_json, read_sizes, require
from sgl_omni.models.numbers import check_id, check_ids

ARCHITECTURE = "Qwen3TTSForConditionalGeneration"
SPEECH_TOKENIZER = "speech_tokenizer"
BASE, CUSTOM_VOICE, VOICE_DESIGN = "base", "custom_voice", "voice_design"
AUTO = "auto"
"""The language that the model finds out by itself."""

_FIELDS = (
    "tts_model_type",
    "tts_pad_token_id",
    "tts_bos_token_id",
    "tts_eos_token_id",
    "talker_config.hidden_size",
    "talker_config.num_hidden_layers",
    "talker_config.num_code_groups",
    "talker_config.vocab_size",
    "talker_config.text_vocab_size",
    "talker_config.text_hidden_size",
    "talker_config.codec_eos_token_id",
    "talker_config.codec_pad_id",
    "talker_config.codec_bos_id",
    "talker_config.codec_think_id",
    "talker_config.codec_nothink_id",
    "talker_config.codec_think_bos_id",
    "talker_config.codec_think_eos_id",
    "talker_config.codec_language_id",
    "talker_config.code_predictor_config.hidden_size",
)
_CODEC_FIELDS = ("output_sample_rate", "decoder_config.num_quantizers", "decoder_config.upsample_rates")
_DEFAULTS: Mapping[str, Any] = {
    "do_sample": True,
    "temperature": 0.9,
    "top_k": 50,
    "top_p": 1.0,
    "repetition_penalty": 1.05,
    "subtalker_dosample": True,
    "subtalker_temperature": 0.9,
    "subtalker_top_k": 50,
    "subtalker_top_p": 1.0,
    "max_new_tokens": 2048,
}
"""Where ``generation_config.json`` is silent."""

FIRST_FRAMES, MOST_FRAMES = 4, 16
LEAST_SECONDS, MOST_SECONDS = 0.5, 60.0
"""Of a recording whose voice is cloned."""


def next_cut(frames: int) -> int:
    """End of the piece of audio that begins at a frame: 0 -> 4 -> 8 -> 16 -> 32 -> 48 ...

    It begins small, for the first audio, and grows, for fewer and larger steps. Engine and vocoder cut alike.
    """
    return frames + min(max(frames, FIRST_FRAMES), MOST_FRAMES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """``kind`` is one of ``base``, ``custom_voice`` and ``voice_design``. ``speakers`` and ``languages`` are codec ids
    by lower-case name; ``dialects`` maps a speaker to the language of its dialect."""

    folder: Path
    kind: str
    speakers: Mapping[str, int]
    dialects: Mapping[str, str]
    languages: Mapping[str, int]
    takes_instructions: bool
    num_codes: int
    sample_rate: int
    generation: Mapping[str, Any]

    @classmethod
    def load(cls, model_path: str) -> ModelFacts:
        """Checks the whole folder but its tensors. Raises ``InvalidRequest`` that names file and field."""
        folder = find_folder(model_path)
        config = check_folder(folder, (ARCHITECTURE,), weights=(), fields=_FIELDS)
        kind, talker = config["tts_model_type"], config["talker_config"]
        if kind not in (BASE, CUSTOM_VOICE, VOICE_DESIGN):
            raise _wrong(folder, "tts_model_type", kind, f"{BASE}, {CUSTOM_VOICE} or {VOICE_DESIGN}")
        file = folder / "config.json"
        check_ids(config, [field for field in _FIELDS if "codec_" in field], file, talker["vocab_size"])
        check_ids(config, [field for field in _FIELDS if "tts_" in field], file, talker["text_vocab_size"])
        codec = cls._codec(folder)
        codes = talker["num_code_groups"]
        if codec["decoder_config"]["num_quantizers"] != codes:
            found = codec["decoder_config"]["num_quantizers"]
            raise _wrong(folder / SPEECH_TOKENIZER, "decoder_config.num_quantizers", found, f"the talker's {codes}")
        for field in ("spk_id", "codec_language_id"):
            for name, code in (talker.get(field) or {}).items():
                check_id(code, f"talker_config.{field}.{name}", folder / "config.json", talker["vocab_size"])
        speakers = {name.lower(): code for name, code in (talker.get("spk_id") or {}).items()}
        if kind == CUSTOM_VOICE and not speakers:
            raise _wrong(folder, "talker_config.spk_id", talker.get("spk_id"), "a voice or more")
        dialects = {name.lower(): value for name, value in (talker.get("spk_is_dialect") or {}).items() if value}
        if kind == BASE:
            require(config, "speaker_encoder_config", folder / "config.json")
        return cls(
            folder=folder,
            kind=kind,
            speakers=speakers if kind == CUSTOM_VOICE else {},
            dialects=dialects,
            languages={name.lower(): code for name, code in talker["codec_language_id"].items()},
            takes_instructions=kind == VOICE_DESIGN or (kind == CUSTOM_VOICE and config.get("tts_model_size") != "0b6"),
            num_codes=codes,
            sample_rate=int(codec["output_sample_rate"]),
            generation=_generation(folder),
        )

    @staticmethod
    def _codec(folder: Path) -> dict[str, Any]:
        codec = read_sizes(folder / SPEECH_TOKENIZER)
        for field in _CODEC_FIELDS:
            require(codec, field, folder / SPEECH_TOKENIZER / "config.json")
        model_type = codec.get("model_type")
        if model_type != "qwen3_tts_tokenizer_12hz":
            raise _wrong(folder / SPEECH_TOKENIZER, "model_type", model_type, "qwen3_tts_tokenizer_12hz")
        return codec

    @property
    def spoken_languages(self) -> tuple[str, ...]:
        """What a request may ask for; dialects belong to speakers."""
        return (AUTO, *(name for name in self.languages if "dialect" not in name))


def _generation(folder: Path) -> dict[str, Any]:
    given = read_json(folder, "generation_config.json") if (folder / "generation_config.json").is_file() else {}
    return {key: default if given.get(key) is None else given[key] for key, default in _DEFAULTS.items()}


def _wrong(folder: Path, field: str, found: object, wanted: str) -> InvalidRequest:
    return InvalidRequest(f"{folder / 'config.json'}: {field} is {found!r}, not {wanted}", param="model_path")
