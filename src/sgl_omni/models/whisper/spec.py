"""What a Whisper checkpoint's configuration says about its decoder and its special tokens. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sgl_omni.errors import InvalidRequest, StartupError
from sgl_omni.models.folder import check_folder, check_tensors, find_folder, read_json, read_sizes, require
from sgl_omni.models.mel import HOP, RATE, check_mel
from sgl_omni.models.numbers import check_id
from sgl_omni.models.tokens import check_tokens
from sgl_omni.models.whisper.shapes import tensor_shapes

ARCHITECTURE = "WhisperForConditionalGeneration"
TASKS = ("transcribe", "translate")
PREPROCESSOR = "preprocessor_config.json"

_WIDTHS = ("d_model", "vocab_size", "decoder_layers", "decoder_attention_heads", "decoder_ffn_dim")
_LENGTHS = ("max_source_positions", "max_target_positions", "num_mel_bins")
_OF_MANY: Mapping[str, type] = {
    "lang_to_id": dict,
    "task_to_id": dict,
    "suppress_tokens": list,
    "begin_suppress_tokens": list,
}
_TOKENS = {"decoder_start_token_id": "<|startoftranscript|>", "eos_token_id": "<|endoftext|>"}
_GENERATION_IDS = ("no_timestamps_token_id", "prev_sot_token_id", *_OF_MANY)
_NOWHERE = Path()
FIELDS = (*_WIDTHS, *_LENGTHS, "encoder_layers", "encoder_ffn_dim", "eos_token_id", "decoder_start_token_id")


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
        preprocessor = read_sizes(folder, PREPROCESSOR)
        seconds = preprocessor.get("chunk_length", 30)
        return cls.parse(read_json(folder), read_json(folder, "generation_config.json"), seconds, folder)

    @classmethod
    def parse(
        cls, config: Mapping[str, Any], generation: Mapping[str, Any], seconds: float = 30, folder: Path = _NOWHERE
    ) -> WhisperSpec:
        """Reads ``config.json`` and ``generation_config.json`` of ``folder``; ``seconds`` of audio make up a window.

        Raises ``StartupError`` for what is not Whisper, or lacks a token that transcription needs, and
        ``InvalidRequest`` for ids that its vocabulary has not.
        """
        file = folder / "generation_config.json"
        if config.get("model_type") != "whisper":
            raise StartupError(f"{folder / 'config.json'}: model type {config.get('model_type')!r} is not whisper")
        if config.get("activation_function", "gelu") != "gelu":
            raise StartupError(
                f"{folder / 'config.json'}: activation_function {config['activation_function']!r} is not supported; "
                "the decoder has gelu"
            )
        _check_ids(config, ("eos_token_id", "decoder_start_token_id"), folder / "config.json", config["vocab_size"])
        _check_ids(generation, _GENERATION_IDS, file, config["vocab_size"])
        no_timestamps = generation.get("no_timestamps_token_id")
        if no_timestamps is None:
            raise StartupError(f"{file} lacks the field no_timestamps_token_id; take the model's own file")
        multilingual = generation.get("is_multilingual", bool(generation.get("lang_to_id")))
        if multilingual and not (generation.get("lang_to_id") and generation.get("task_to_id")):
            raise StartupError(
                f"{file} lacks the fields lang_to_id and task_to_id of a multilingual model; take the model's own file"
            )
        return cls(
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
            tasks={name: require(generation, f"task_to_id.{name}", file) for name in TASKS} if multilingual else {},
            suppressed=tuple(generation.get("suppress_tokens") or ()),
            suppressed_first=tuple(generation.get("begin_suppress_tokens") or ()),
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
    config = check_folder(folder, (ARCHITECTURE,), weights=(), fields=FIELDS)
    read_sizes(folder, "generation_config.json")
    _check_windows(read_sizes(folder, PREPROCESSOR), config, folder / PREPROCESSOR)
    try:
        WhisperSpec.load(folder)
    except StartupError as error:
        raise InvalidRequest(str(error), param="model_path") from error
    check_tensors(folder, lambda: tensor_shapes(config), ignore=["proj_out.weight"])  # the embedding again
    return folder


def _check_windows(preprocessor: Mapping[str, Any], config: Mapping[str, Any], file: Path) -> None:
    check_mel(preprocessor, file, config["num_mel_bins"])
    seconds, taken = preprocessor.get("chunk_length", 30), 2 * config["max_source_positions"]
    made = seconds * RATE // HOP
    if made != taken:
        raise InvalidRequest(
            f"{file}: chunk_length is {seconds}, which makes windows of {made} frames; the encoder takes {taken}",
            param="model_path",
        )


def check_vocabulary(folder: Path, spec: WhisperSpec) -> None:
    """Raises ``InvalidRequest`` for a special token that the tokenizer lacks, or has as another id than the configs."""
    config, file = read_json(folder), folder / "generation_config.json"
    vocabulary = check_tokens(folder, config, "vocab_size", ids=_TOKENS)
    generation = read_json(folder, file.name)
    said = {
        ("no_timestamps_token_id", "<|notimestamps|>"): spec.no_timestamps_id,
        ("prev_sot_token_id", "<|startofprev|>"): spec.previous_id,
        **{(f"lang_to_id.{token}", token): id for token, id in (generation.get("lang_to_id") or {}).items()},
        **{(f"task_to_id.{name}", f"<|{name}|>"): id for name, id in (generation.get("task_to_id") or {}).items()},
    }
    for (name, token), id in said.items():
        known = vocabulary.id_of(token)
        if id != known:
            raise InvalidRequest(
                f"{file}: {name} is {id}, and {vocabulary.file} has {token!r} as {known}", param="model_path"
            )


def _check_ids(config: Mapping[str, Any], fields: Sequence[str], file: Path, size: int) -> None:
    """Ids, lists of them and ids by name; null is none."""
    for name in fields:
        found, kind = config.get(name), _OF_MANY.get(name, int)
        if found is None:
            continue
        if kind is int:
            check_id(found, name, file, size)
            continue
        if not isinstance(found, kind):
            raise InvalidRequest(f"{file}: {name} is {found!r}, no ids", param="model_path")
        for key, value in found.items() if kind is dict else enumerate(found):
            check_id(value, f"{name}.{key}", file, size)


def _languages(ids: Mapping[str, int]) -> dict[str, int]:
    """``<|en|>`` is written ``en``."""
    return {token.removeprefix("<|").removesuffix("|>"): value for token, value in ids.items()}
