"""What a checkpoint's own files say about how to sample from it and where its answers end. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_omni.errors import InvalidRequest
from sgl_omni.models.folder import read_json
from sgl_omni.models.numbers import check_id

FILE = "generation_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Used where a request is silent. Without a file of its own a model samples from its plain probabilities.

    ``eos_ids`` are those of ``config.json`` and ``generation_config.json`` together: chat models often name the end of
    a turn in one and the end of a document in the other.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    eos_ids: tuple[int, ...] = ()

    @classmethod
    def load(cls, folder: Path, vocab_size: int | None = None) -> GenerationDefaults:
        """Raises ``InvalidRequest`` that names file and field for values that mean nothing, and ids outside of a
        vocabulary of ``vocab_size``."""
        file = folder / FILE
        own = read_json(folder, FILE) if file.is_file() else {}
        ends = [*end_ids(read_json(folder), folder / "config.json", vocab_size), *end_ids(own, file, vocab_size)]
        sampled = own.get("do_sample") is not False
        return cls(
            temperature=_number(own, "temperature", 1.0, file) if sampled else 0.0,
            top_p=_number(own, "top_p", 1.0, file, most=1.0),
            top_k=0 if own.get("top_k") == -1 else int(_number(own, "top_k", 0, file)),
            repetition_penalty=_number(own, "repetition_penalty", 1.0, file),
            eos_ids=tuple(dict.fromkeys(ends)),
        )

    def fill(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Sampling options of a request, each as it says or as the checkpoint does."""
        names = ("temperature", "top_p", "top_k", "repetition_penalty")
        return {name: getattr(self, name) if payload.get(name) is None else payload[name] for name in names}


def end_ids(config: Mapping[str, Any], file: Path, vocab_size: int | None = None) -> list[int]:
    """``eos_token_id`` of one file, which may be an id or several. Raises as ``GenerationDefaults.load`` does."""
    value = config.get("eos_token_id")
    found = [] if value is None else value if isinstance(value, list) else [value]
    if found != [] or value is None:
        for each in found:
            check_id(each, "eos_token_id", file, vocab_size)
        return found
    raise InvalidRequest(f"{file}: eos_token_id is {value!r}, not an id or a list of ids", param="model_path")


def _number(own: Mapping[str, Any], name: str, default: float, file: Path, most: float = float("inf")) -> float:
    value = own.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
        raise InvalidRequest(f"{file}: {name} is {value!r}, which is no such number", param="model_path")
    return value
