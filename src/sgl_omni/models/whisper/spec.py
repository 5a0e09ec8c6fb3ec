"""What a Whisper checkpoint's configuration says about its decoder and its special tokens. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sgl_omni.errors import InvalidRequest, StartupError
from sgl_omni.models.folder import check_folder, check_tensors, find_folder, read_json
from sgl_omni.models.whisper.shapes import tensor_shapes

ARCHITECTURE = "WhisperForConditionalGeneration"
TASKS = ("transcribe", "translate")
SAMPLE_RATE = 16_000

_WIDTHS = ("d_model", "vocab_size", "decoder_layers", "decoder_attention_heads", "decoder_ffn_dim")
_LENGTHS = ("max_source_positions", "max_target_positions", "num_mel_bins")
FIELDS = (*_WIDTHS, *_LENGTHS, "encoder_layers", "eos_token_id", "decoder_start_token_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class WhisperSpec:
    """``suppressed`` ids are never said, ``suppressed_first`` not as the first output.

    ``languages`` and ``tasks`` map codes and names to ids; both are empty for a model of English alone. Ids from
    ``timestamp_begin`` on are times in steps of ``time_step`` seconds; the first of a window is at most
    ``max_initial_timestamp`` steps in. ``previous_id`` begins the text that came before a window.
    """

    width: int
    num_layers: int
    num_heads: int
    feed_size: int
    vocab_size: int
    max_positions: int
    max_frames: int
    eos_id: int
    start_id: int
    no_timestamps_id: int
    previous_id: int
    time_step: float
    max_initial_timestamp: int | None = None
    languages: Mapping[str, int] = field(default_factory=dict)
    tasks: Mapping[str, int] = field(default_factory=dict)
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()

    @classmethod
    def load(cls, folder: Path) -> WhisperSpec:
        """Raises ``InvalidRequest`` or ``StartupError`` that names file and field."""
        preprocessor = read_json(folder, "preprocessor_config.json")
        seconds = preprocessor.get("chunk_length", 30)
        return cls.parse(read_json(folder), read_json(folder, "generation_config.json"), seconds)

    @classmethod
    def parse(cls, config: Mapping[str, Any], generation: Mapping[str, Any], seconds: float = 30) -> WhisperSpec:
        """Reads ``config.json`` and ``generation_config.json``; ``seconds`` of audio make up a window.

        Raises ``StartupError`` for what is not Whisper, or lacks a token that transcription needs.
        """
        if config.get("model_type") != "whisper":
            raise StartupError(f"model type {config.get('model_type')!r} is not whisper")
        if config.get("activation_function", "gelu") != "gelu":
            raise StartupError(f"activation {config['activation_function']!r} is not supported; the decoder has gelu")
        no_timestamps = generation.get("no_timestamps_token_id")
        if no_timestamps is None:
            raise StartupError(
                "generation_config.json lacks the field no_timestamps_token_id; take the model's own file"
            )
        multilingual = generation.get("is_multilingual", bool(generation.get("lang_to_id")))
        if multilingual and not (generation.get("lang_to_id") and generation.get("task_to_id")):
            raise StartupError(
                "generation_config.json lacks the fields lang_to_id and task_to_id of a multilingual model; "
                "take the model's own file"
            )
        spec = cls(
            width=config["d_model"],
            num_layers=config["decoder_layers"],
            num_heads=config["decoder_attention_heads"],
            feed_size=config["decoder_ffn_dim"],
            vocab_size=config["vocab_size"],
            max_positions=config["max_target_positions"],
            max_frames=config["max_source_positions"],
            eos_id=config["eos_token_id"],
            start_id=config["decoder_start_token_id"],
            no_timestamps_id=no_timestamps,
            # Every published vocabulary has <|startofprev|>, <|nospeech|> and <|notimestamps|> one after another.
            previous_id=generation.get("prev_sot_token_id") or no_timestamps - 2,
            time_step=seconds / config["max_source_positions"],
            max_initial_timestamp=generation.get("max_initial_timestamp_index"),
            languages=_languages(generation["lang_to_id"]) if multilingual else {},
            tasks={name: generation["task_to_id"][name] for name in TASKS} if multilingual else {},
            suppressed=tuple(generation.get("suppress_tokens") or ()),
            suppressed_first=tuple(generation.get("begin_suppress_tokens") or ()),
        )
        spec._check_ids()
        return spec

    def _check_ids(self) -> None:
        named = (self.eos_id, self.start_id, self.no_timestamps_id, self.previous_id)
        ids = (*named, *self.languages.values(), *self.tasks.values(), *self.suppressed, *self.suppressed_first)
        wrong = [i for i in ids if not 0 <= i < self.vocab_size]
        if wrong:
            raise StartupError(
                f"generation_config.json names id {wrong[0]}; the model's vocabulary has {self.vocab_size}"
            )

    @property
    def timestamp_begin(self) -> int:
        return self.no_timestamps_id + 1

    @property
    def longest_history(self) -> int:
        """Ids of earlier text that a prompt may hold."""
        return self.max_positions // 2 - 1

    @property
    def codes(self) -> tuple[str, ...]:
        """Languages that a request may name."""
        return tuple(self.languages) or ("en",)

    def prompt(self, language: int | None, task: str, *, timestamps: bool) -> list[int]:
        """What a window's decoding begins with. ``language``: an id, where the model has several."""
        which = [] if language is None else [language, self.tasks[task]]
        return [self.start_id, *which, *([] if timestamps else [self.no_timestamps_id])]


def resolve_folder(model_path: str) -> Path:
    """The checkpoint's folder, with all that a start needs in it. Raises ``InvalidRequest`` that names what is not."""
    folder = find_folder(model_path)
    config = check_folder(folder, (ARCHITECTURE,), fields=FIELDS)
    for name in ("generation_config.json", "preprocessor_config.json"):
        read_json(folder, name)
    try:
        WhisperSpec.load(folder)
    except StartupError as error:
        raise InvalidRequest(f"{folder}: {error}", param="model_path") from error
    check_tensors(folder, lambda: tensor_shapes(config))
    return folder


def _languages(ids: Mapping[str, int]) -> dict[str, int]:
    """``<|en|>`` is written ``en``."""
    return {token.removeprefix("<|").removesuffix("|>"): value for token, value in ids.items()}
