"""What a checkpoint folder says about prompts, media and sampling. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_omni.errors import InvalidRequest
from sgl_omni.models.folder import check_folder, find_folder, read_json, read_sizes, require
from sgl_omni.models.mel import check_mel
from sgl_omni.models.numbers import check_id, check_ids
from sgl_omni.models.text_llm.generation import end_ids

ARCHITECTURE = "Qwen3OmniMoeForConditionalGeneration"
SAMPLE_RATE = 24_000
_FIELDS = (
    "im_start_token_id",
    "im_end_token_id",
    "user_token_id",
    "assistant_token_id",
    "tts_pad_token_id",
    "tts_bos_token_id",
    "tts_eos_token_id",
    "thinker_config.text_config.hidden_size",
    "thinker_config.text_config.vocab_size",
    "thinker_config.audio_config.num_mel_bins",
    "thinker_config.vision_config.patch_size",
    "thinker_config.vision_config.deepstack_visual_indexes",
    "thinker_config.audio_token_id",
    "thinker_config.image_token_id",
    "thinker_config.video_token_id",
    "talker_config.text_config.vocab_size",
    "talker_config.code_predictor_config",
    "talker_config.accept_hidden_layer",
    "talker_config.speaker_id",
    "talker_config.codec_eos_token_id",
    "talker_config.codec_nothink_id",
    "talker_config.codec_think_bos_id",
    "talker_config.codec_think_eos_id",
    "talker_config.codec_pad_id",
    "talker_config.codec_bos_id",
    "code2wav_config.num_quantizers",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pixels:
    """How many pixels a picture, or each frame of a video, is brought to."""

    least: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSpec:
    """Patches of ``patch`` x ``patch`` pixels of ``frames`` frames; ``merge`` x ``merge`` of them make one token."""

    patch: int
    frames: int
    merge: int
    images: Pixels
    videos: Pixels
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float

    @classmethod
    def parse(cls, config: Mapping[str, Any], folder: Path) -> VisionSpec:
        """``config`` is the vision encoder's; the rest is in ``preprocessor_config.json``."""
        images = read_sizes(folder, "preprocessor_config.json")
        name = "video_preprocessor_config.json"
        videos = read_sizes(folder, name) if (folder / name).is_file() else {}
        return cls(
            patch=int(config["patch_size"]),
            frames=int(config.get("temporal_patch_size", 2)),
            merge=int(config.get("spatial_merge_size", 2)),
            images=_pixels(images, Pixels(least=56 * 56, most=28 * 28 * 1280), folder / "preprocessor_config.json"),
            videos=_pixels(videos, Pixels(least=128 * 32 * 32, most=768 * 32 * 32), folder / name),
            mean=_colours(images, "image_mean", folder / "preprocessor_config.json"),
            std=_colours(images, "image_std", folder / "preprocessor_config.json"),
            scale=float(images.get("rescale_factor") or 1 / 255),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSpec:
    """Ids, shapes and defaults that preprocessing goes by."""

    vocab_size: int
    max_positions: int
    image_id: int
    video_id: int
    audio_id: int
    start_id: int
    user_id: int
    pad_id: int
    """Stands for the answer's rows in the talker's prompt."""
    positions_per_second: float
    talker_positions_per_second: float
    audio_window: int
    vision: VisionSpec
    voices: tuple[str, ...]
    default_voice: str
    thinker_defaults: Mapping[str, Any]
    talker_defaults: Mapping[str, Any]

    @classmethod
    def load(cls, model_path: str) -> PromptSpec:
        """Raises ``InvalidRequest`` that names file and field for a folder that is not whole."""
        folder = find_folder(model_path)
        config = check_checkpoint(folder)
        thinker, talker = config["thinker_config"], config["talker_config"]
        voices = tuple(str(name) for name in talker["speaker_id"])
        generation = _generation(folder)
        return cls(
            vocab_size=thinker["text_config"]["vocab_size"],
            max_positions=thinker["text_config"].get("max_position_embeddings", 32768),
            image_id=thinker["image_token_id"],
            video_id=thinker["video_token_id"],
            audio_id=thinker["audio_token_id"],
            start_id=config["im_start_token_id"],
            user_id=config["user_token_id"],
            pad_id=config["tts_pad_token_id"],
            positions_per_second=thinker.get("position_id_per_seconds", 25),
            talker_positions_per_second=talker.get("position_id_per_seconds", 25),
            audio_window=thinker["audio_config"].get("n_window", 50),
            vision=VisionSpec.parse(thinker["vision_config"], folder),
            voices=voices,
            default_voice=next((name for name in voices if name.lower() == "ethan"), voices[0]),
            thinker_defaults=_thinker_defaults(generation),
            talker_defaults=_talker_defaults(generation),
        )


def check_checkpoint(folder: Path) -> dict[str, Any]:
    """The folder's ``config.json``. Raises ``InvalidRequest`` for one that cannot speak, or is not whole."""
    config = check_folder(folder, [ARCHITECTURE], weights=())
    file = folder / "config.json"
    if config.get("enable_audio_output") is False or not config.get("talker_config"):
        raise InvalidRequest(
            f"{file}: enable_audio_output is {config.get('enable_audio_output')} and talker_config is "
            f"{'there' if config.get('talker_config') else 'absent'}: this checkpoint does not speak, and this "
            "pipeline serves those that do (Qwen3-Omni Instruct)",
            param="model_path",
        )
    for field in _FIELDS:
        require(config, field, file)
    if not config["talker_config"]["speaker_id"]:
        raise InvalidRequest(f"{file}: talker_config.speaker_id names no voice", param="model_path")
    talker = config["talker_config"]
    text, codes = config["thinker_config"]["text_config"]["vocab_size"], talker["text_config"]["vocab_size"]
    check_ids(config, [field for field in _FIELDS if "codec_" not in field], file, text)
    check_ids(config, [field for field in _FIELDS if "codec_" in field], file, codes)
    for name, code in talker["speaker_id"].items():
        check_id(code, f"talker_config.speaker_id.{name}", file, codes)
    end_ids(_generation(folder), folder / "generation_config.json", text)
    name = "preprocessor_config.json"
    check_mel(read_sizes(folder, name), folder / name, config["thinker_config"]["audio_config"]["num_mel_bins"])
    return config


def eos_ids(config: Mapping[str, Any], folder: Path) -> tuple[int, ...]:
    """Ids that end the thinker's answer."""
    ends = end_ids(_generation(folder), folder / "generation_config.json")
    return tuple(dict.fromkeys([int(config["im_end_token_id"]), *ends]))


def _generation(folder: Path) -> dict[str, Any]:
    name = "generation_config.json"
    return read_json(folder, name) if (folder / name).is_file() else {}


def _thinker_defaults(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Greedy unless the checkpoint says that it samples."""
    if not generation.get("do_sample"):
        return {}
    return {key: generation[key] for key in ("temperature", "top_k", "top_p") if generation.get(key) is not None}


def _talker_defaults(generation: Mapping[str, Any]) -> dict[str, Any]:
    """As the checkpoint says; where it is silent, what its authors' own code samples with."""
    usual = {"temperature": 0.9, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.05, "max_new_tokens": 4096}
    found = {key: generation.get(f"talker_{key}", value) for key, value in usual.items()}
    if generation.get("talker_do_sample") is False:
        found["temperature"] = 0.0
    return found


def _colours(config: Mapping[str, Any], name: str, file: Path) -> tuple[float, ...]:
    found = tuple(config.get(name) or (0.5, 0.5, 0.5))
    if len(found) != 3:
        raise InvalidRequest(f"{file}: {name} has {len(found)} numbers, not one a colour", param="model_path")
    return found


def _pixels(config: Mapping[str, Any], default: Pixels, file: Path) -> Pixels:
    size = config.get("size") or {}
    if not isinstance(size, Mapping):
        raise InvalidRequest(f"{file}: size is {size!r}, no object", param="model_path")
    least = config.get("min_pixels") or size.get("shortest_edge") or default.least
    most = config.get("max_pixels") or size.get("longest_edge") or default.most
    if least > most:
        raise InvalidRequest(f"{file}: pictures have at least {least} pixels and at most {most}", param="model_path")
    return Pixels(least=int(least), most=int(most))
