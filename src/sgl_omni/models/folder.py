"""A model's folder, found and checked before any process starts. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sgl_omni.engine.headers import FLOATS, CheckpointError, Entry, check_shapes, is_derived, read_headers
from sgl_omni.engine.shapes import Named
from sgl_omni.errors import InvalidRequest, StartupError
from sgl_omni.json_files import read_object
from sgl_omni.models.fields import check_kinds
from sgl_omni.models.numbers import check_ids, check_numbers
from sgl_omni.text.template import check_template
from sgl_omni.text.vocabulary import read_merges

_MODEL_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_TOKENIZERS = ("tokenizer.json", "vocab.json")
_OF_PAIRS = frozenset({"Qwen2Tokenizer", "GPT2Tokenizer", "WhisperTokenizer", "RobertaTokenizer"})
"""Tokenizers that merge pairs, by a list in a file of its own."""

_MODEL_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "CsmForConditionalGeneration": "csm",
        "HiggsAudioV2ForConditionalGeneration": "higgs_audio_v2",
        "LlamaForCausalLM": "llama",
        "MistralForCausalLM": "mistral",
        "Qwen2ForCausalLM": "qwen2",
        "Qwen3ASRForConditionalGeneration": "qwen3_asr",
        "Qwen3ForCausalLM": "qwen3",
        "Qwen3MoeForCausalLM": "qwen3_moe",
        "Qwen3OmniMoeForConditionalGeneration": "qwen3_omni_moe",
        "Qwen3TTSForConditionalGeneration": "qwen3_tts",
        "WhisperForConditionalGeneration": "whisper",
    }
)
"""Of architectures that have one name for it everywhere. Others may have any, but none of these."""

LOADABLE = FLOATS | {"I64", "BOOL"}
"""Types of tensors in folders that are not quantised: weights, and counters and tables beside them."""


def find_folder(model_path: str) -> Path:
    """The folder itself, or where a Hugging Face id was downloaded to. Raises ``InvalidRequest`` for neither.

    Nothing is downloaded: a server that starts must not wait for the network.
    """
    folder = Path(model_path)
    if (folder / "config.json").is_file():
        return folder
    if folder.is_dir():
        raise InvalidRequest(f"{folder} holds no config.json", param="model_path")
    cached = _cached(model_path)
    if cached is not None:
        return cached
    if not _MODEL_ID.fullmatch(model_path):
        raise InvalidRequest(f"model_path {model_path!r}: there is no such folder", param="model_path")
    raise InvalidRequest(
        f"model_path {model_path!r} is neither a folder nor a downloaded model; "
        f"download it with `hf download {model_path}`, or give the folder",
        param="model_path",
    )


def read_json(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """Raises ``InvalidRequest`` that names the file where it is absent, malformed or no object."""
    return read_object(folder / name, lambda told: InvalidRequest(told, param="model_path"))


def read_sizes(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """A file of a model or codec whose numbers are then counted with. Raises ``InvalidRequest`` as ``read_json``
    does, where a field is none of its kind, and where weights are said to be quantised."""
    config = read_json(folder, name)
    check_numbers(config, folder / name)
    check_kinds(config, folder / name)
    _check_unquantised(config, folder / name)
    return config


def _check_unquantised(config: Mapping[str, Any], file: Path, within: str = "") -> None:
    for name, value in config.items():
        if name == "quantization_config" and value:
            told = f"{file} has a {within}{name}; this engine takes bfloat16, float16 and float32"
            raise InvalidRequest(told, param="model_path")
        if isinstance(value, Mapping):
            _check_unquantised(value, file, f"{within}{name}.")


def check_folder(
    folder: Path,
    architectures: Collection[str],
    *,
    tokenizer: bool = True,
    chat: bool = False,
    weights: Sequence[str] = ("",),
    fields: Sequence[str] = (),
    dtypes: Collection[str] = LOADABLE,
) -> dict[str, Any]:
    """The folder's ``config.json``, after a look at all that a start needs of it.

    ``chat``: a chat template that is there must be readable. Sizes must be numbers; ``fields`` are dotted paths that
    the config must have. ``weights`` are the sub-folders with safetensors, whose tensors may be of ``dtypes``; their
    headers and lengths are read, not their data. None where `check_tensors` follows, which reads them too.
    Raises ``InvalidRequest`` that names file and field.
    """
    config = read_sizes(folder)
    check_architecture(config, folder / "config.json", architectures)
    for field in fields:
        require(config, field, folder / "config.json")
    check_ids(config, fields, folder / "config.json")
    if tokenizer and not any((folder / name).is_file() for name in _TOKENIZERS):
        raise InvalidRequest(f"{folder} holds no tokenizer: neither {' nor '.join(_TOKENIZERS)}", param="model_path")
    if tokenizer:
        _check_tokenizer(folder)
    _check_sampling(folder)
    if chat:
        _check_template(folder)
    for part in weights:
        check_weights(folder / part, dtypes)
    return config


def check_architecture(config: Mapping[str, Any], file: Path, architectures: Collection[str]) -> None:
    """Raises ``InvalidRequest`` where a config names none of these, or the model type of another."""
    found, said = config.get("architectures"), config.get("model_type")
    named = set(architectures) & set(map(str, found)) if isinstance(found, list) else set[str]()
    if not named:
        raise InvalidRequest(
            f"{file}: architectures is {found}, not one of {', '.join(sorted(architectures))}", param="model_path"
        )
    types = {_MODEL_TYPES[name] for name in named if name in _MODEL_TYPES}
    if said is not None and (said not in types if types else said in _MODEL_TYPES.values()):
        wanted = f"; of {', '.join(sorted(named))} it is {' or '.join(sorted(types))}" if types else ""
        raise InvalidRequest(
            f"{file}: model_type is {said!r} and architectures {found}, which do not go together{wanted}",
            param="model_path",
        )


def _check_tokenizer(folder: Path) -> None:
    """Its files are JSON, and of the parts that a tokenizer consists of none is absent."""
    has_config = (folder / "tokenizer_config.json").is_file()
    kind = str(read_json(folder, "tokenizer_config.json").get("tokenizer_class")) if has_config else ""
    if not (folder / "tokenizer.json").is_file():
        read_json(folder, "vocab.json")
        if kind.removesuffix("Fast") in _OF_PAIRS and not (folder / "merges.txt").is_file():
            raise InvalidRequest(
                f"{folder} holds vocab.json and no merges.txt, which a {kind} needs, nor tokenizer.json",
                param="model_path",
            )
        if kind.removesuffix("Fast") in _OF_PAIRS:
            try:
                read_merges(folder)
            except StartupError as error:
                raise InvalidRequest(str(error), param="model_path") from error
        return
    found = read_json(folder, "tokenizer.json")
    for field, kind in (("model", dict), ("added_tokens", list)):
        if not isinstance(require(found, field, folder / "tokenizer.json"), kind):
            what = "object" if kind is dict else "list"
            raise InvalidRequest(f"{folder / 'tokenizer.json'}: {field} is no {what}", param="model_path")


def _check_sampling(folder: Path) -> None:
    """What a model's authors sample with, where they say it: requests that say nothing else get it as it is."""
    if (folder / "generation_config.json").is_file():
        read_sizes(folder, "generation_config.json")


def _check_template(folder: Path) -> None:
    try:
        check_template(folder)
    except StartupError as error:
        raise InvalidRequest(str(error), param="model_path") from error


def require(config: Mapping[str, Any], field: str, file: Path) -> Any:
    """The value at a dotted path. Raises ``InvalidRequest`` that names file and field where it is absent or null."""
    value: Any = config
    for part in field.split("."):
        if not isinstance(value, Mapping) or value.get(part) is None:
            raise InvalidRequest(f"{file} lacks the field {field}", param="model_path")
        value = value[part]
    return value


def check_weights(folder: Path, dtypes: Collection[str] = LOADABLE) -> dict[str, Entry]:
    """All tensors of a folder by name. Raises ``InvalidRequest`` that names the file where weights are missing,
    truncated or no safetensors, and the first tensor that is of another type than ``dtypes``."""
    try:
        entries = read_headers(folder)
    except CheckpointError as error:
        raise InvalidRequest(str(error), param="model_path") from error
    loaded = ((name, entry) for name, entry in entries.items() if not is_derived(name))
    other = next((name for name, entry in loaded if entry.dtype not in dtypes), None)
    if other is not None:
        raise InvalidRequest(
            f"{entries[other].file}: {other} is {entries[other].dtype}, not one of {', '.join(sorted(dtypes))}",
            param="model_path",
        )
    return entries


def check_tensors(
    folder: Path,
    shapes: Callable[[], Named],
    parts: Sequence[str] = (),
    *,
    within: str = "",
    ignore: Sequence[str] | None = None,
    entries: Mapping[str, Entry] | None = None,
) -> None:
    """Raises ``InvalidRequest`` that names the file and the tensors where those of ``shapes`` are missing, of another
    shape or no floats, and the field where the config has no such shapes.

    ``parts``: prefixes below which there must be something, told first and as such. With ``ignore``, patterns of names
    that published checkpoints may hold and nobody reads, all other tensors below ``within`` are refused too; without,
    the stage that loads a part refuses them before it takes memory. ``entries``: what `check_weights` says of the
    folder, where that has been asked.
    """
    if entries is None:
        entries = check_weights(folder)
    absent = [part for part in parts if not any(name.startswith(part) for name in entries)]
    if absent:
        raise InvalidRequest(f"{folder} holds no tensors below {', '.join(absent)}", param="model_path")
    try:
        prefix = None if ignore is None else within
        check_shapes(entries, shapes(), str(folder), prefix=prefix, ignore=ignore or ())
    except (CheckpointError, StartupError) as error:
        told = str(error) if isinstance(error, CheckpointError) else f"{folder / 'config.json'}: {error}"
        raise InvalidRequest(told, param="model_path") from error
    except KeyError as error:
        raise InvalidRequest(f"{folder / 'config.json'} lacks the field {error.args[0]}", param="model_path") from error
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{folder / 'config.json'}: {error}", param="model_path") from error


def _cached(model_id: str) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ModuleNotFoundError:  # it comes with the extra `models`, without which nothing was downloaded by it
        return None
    try:
        found = try_to_load_from_cache(model_id, "config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None
