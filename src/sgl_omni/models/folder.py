"""A model's folder, found and checked before any process starts. Imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from sgl_omni.errors import InvalidRequest

_MODEL_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_TOKENIZERS = ("tokenizer.json", "vocab.json")

FLOATS = frozenset({"BF16", "F16", "F32", "F64"})
"""Types of tensors, as headers of safetensors call them, that are weights as they are. Quantised ones are not."""


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
    try:
        found = json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{folder / name} cannot be read: {error}", param="model_path") from error
    if not isinstance(found, dict):
        raise InvalidRequest(f"{folder / name} is not a JSON object", param="model_path")
    return found


_WHOLE = frozenset(
    {
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        *("head_dim", "vocab_size", "max_position_embeddings", "d_model", "encoder_layers", "decoder_layers"),
        *("encoder_attention_heads", "decoder_attention_heads", "encoder_ffn_dim", "decoder_ffn_dim"),
    }
)
_REAL = frozenset({"rms_norm_eps", "layer_norm_eps", "rope_theta"})


def check_numbers(config: Mapping[str, Any], file: Path, within: str = "") -> None:
    """Raises ``InvalidRequest`` that names the first size anywhere in a config that is no number of its kind."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            check_numbers(value, file, f"{within}{name}.")
        elif value is None or name not in _WHOLE | _REAL:
            continue
        elif isinstance(value, bool) or not isinstance(value, int if name in _WHOLE else (int, float)) or value <= 0:
            kind = "whole number" if name in _WHOLE else "number"
            raise InvalidRequest(f"{file}: {within}{name} is {value!r}, no {kind} above 0", param="model_path")


def check_folder(
    folder: Path,
    architectures: Collection[str],
    *,
    tokenizer: bool = True,
    weights: Sequence[str] = ("",),
    fields: Sequence[str] = (),
    dtypes: Collection[str] | None = None,
) -> dict[str, Any]:
    """The folder's ``config.json``, after a look at all that a start needs of it.

    Sizes in it must be numbers; ``fields`` are dotted paths that it must have. ``weights`` are the sub-folders with
    safetensors, whose tensors may be of ``dtypes``, of any if None; their headers and lengths are read, not their data.
    Raises ``InvalidRequest`` that names file and field.
    """
    config = read_json(folder)
    found = config.get("architectures")
    if not isinstance(found, list) or not set(architectures) & set(map(str, found)):
        raise InvalidRequest(
            f"{folder / 'config.json'}: architectures is {found}, not one of {', '.join(sorted(architectures))}",
            param="model_path",
        )
    for field in fields:
        require(config, field, folder / "config.json")
    check_numbers(config, folder / "config.json")
    if tokenizer and not any((folder / name).is_file() for name in _TOKENIZERS):
        raise InvalidRequest(f"{folder} holds no tokenizer: neither {' nor '.join(_TOKENIZERS)}", param="model_path")
    if tokenizer and (folder / "tokenizer.json").is_file():
        read_json(folder, "tokenizer.json")
    for part in weights:
        check_weights(folder / part, dtypes)
    return config


def require(config: Mapping[str, Any], field: str, file: Path) -> Any:
    """The value at a dotted path. Raises ``InvalidRequest`` that names file and field where it is absent."""
    value: Any = config
    for part in field.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise InvalidRequest(f"{file} lacks the field {field}", param="model_path")
        value = value[part]
    return value


def check_weights(folder: Path, dtypes: Collection[str] | None = None) -> None:
    """Raises ``InvalidRequest`` that names the file where weights are missing, truncated or no safetensors, and the
    first tensor that is of another type than ``dtypes``."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        names = read_json(folder, index.name).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise InvalidRequest(f"{index} lacks the field weight_map", param="model_path")
        files = [folder / str(name) for name in sorted(set(names.values()))]
    else:
        files = [single]
    for file in files:
        _check_file(file, dtypes)


def _check_file(file: Path, dtypes: Collection[str] | None) -> None:
    """A safetensors file begins with the length of its header, and the header says where the data ends."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 2 <= length <= size - 8:
                raise ValueError(f"its header would take {length} of {size} bytes")
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        types = {name: str(entry["dtype"]) for name, entry in header.items()}
    except FileNotFoundError as error:
        raise InvalidRequest(f"{file} is missing", param="model_path") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidRequest(f"{file} is no safetensors file: {error}", param="model_path") from error
    if 8 + length + end != size:
        raise InvalidRequest(
            f"{file} has {size} bytes, and its header tells of {8 + length + end}: it is truncated or damaged",
            param="model_path",
        )
    other = next((name for name, type_ in types.items() if dtypes is not None and type_ not in dtypes), None)
    if dtypes is not None and other is not None:
        raise InvalidRequest(
            f"{file}: {other} is {types[other]}, not one of {', '.join(sorted(dtypes))}", param="model_path"
        )


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
