"""Reads parts of safetensors checkpoints, one file or several, by the names that tensors have on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sgl_omni.engine.tensor_file import Rows, TensorFile, read_all
from sgl_omni.errors import OmniError


class CheckpointError(OmniError):
    """A checkpoint is unreadable, or holds other tensors than the model has."""

    code = "checkpoint"


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor on disk and where it goes.

    ``target`` takes ``start`` to ``start + target.shape[dim]`` of dimension ``dim`` (0: rows) of it: all of it, or this
    shard's part. ``shape`` is that of the whole tensor.
    """

    name: str
    target: Tensor
    shape: tuple[int, ...]
    dim: int = 0
    start: int = 0

    @property
    def index(self) -> tuple[slice, ...]:
        part = slice(self.start, self.start + self.target.shape[self.dim])
        return (*[slice(None)] * self.dim, part)


class Checkpoint:
    """A folder with ``model.safetensors``, or with the files that ``model.safetensors.index.json`` names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of = _file_of_each_tensor(folder)

    def config(self) -> dict[str, Any]:
        return read_config(self.folder)

    def names(self, prefix: str = "") -> list[str]:
        return sorted(name for name in self._file_of if name.startswith(prefix))

    def fingerprint(self) -> str:
        """Tells this checkpoint from another, or from itself after a change, without reading its data: by its
        configuration, its files' headers, their sizes and the times of their last changes."""
        parts = [(self.folder / "config.json").read_bytes() if (self.folder / "config.json").is_file() else b""]
        for name in sorted(set(self._file_of.values())):
            with _opened(self.folder / name) as file:
                parts.append(f"{name} {file.fingerprint}".encode())
        return hashlib.sha256(b"\0".join(parts)).hexdigest()

    @torch.no_grad()
    def load(self, slots: Iterable[Slot], *, prefix: str = "", ignore: Sequence[str] = ()) -> None:
        """Fills all slots. Every tensor below ``prefix`` must have one, unless a pattern of ``ignore`` matches it.

        Raises ``CheckpointError`` that names all missing, unknown and ill-shaped tensors, before anything is copied.
        """
        wanted = list(slots)
        missing = sorted({slot.name for slot in wanted} - self._file_of.keys())
        unknown = sorted(set(self.names(prefix)) - {slot.name for slot in wanted})
        unknown = [name for name in unknown if not any(fnmatch(name, pattern) for pattern in ignore)]
        problems = [f"missing: {_listed(missing)}"] * bool(missing) + [f"unknown: {_listed(unknown)}"] * bool(unknown)
        if problems:
            raise CheckpointError(f"{self.folder}, tensors below {prefix!r}: {'; '.join(problems)}")
        with ExitStack() as stack:
            names = {self._file_of[slot.name] for slot in wanted}
            files = {name: stack.enter_context(_readable(self.folder / name)) for name in sorted(names)}
            parts = [(slot, files[self._file_of[slot.name]].get_slice(slot.name)) for slot in wanted]
            wrong = [
                f"{slot.name} is {part.get_shape()}, not {[*slot.shape]}"
                for slot, part in parts
                if tuple(part.get_shape()) != slot.shape
            ]
            if wrong:
                raise CheckpointError(f"{self.folder}: {_listed(wrong)}")
            raw = {name: stack.enter_context(_opened(self.folder / name)) for name in files}
            straight: list[Rows] = []
            for slot, part in parts:
                rows = raw[self._file_of[slot.name]].rows(slot.name, slot.start, slot.target) if slot.dim == 0 else None
                if rows is None:
                    slot.target.copy_(part[slot.index])
                else:
                    straight.append(rows)
            try:
                read_all(straight)
            except (OSError, EOFError) as error:
                raise CheckpointError(f"{self.folder} cannot be read: {error}") from error


def read_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """A JSON object of a checkpoint folder. Raises ``CheckpointError`` where it is absent or no object."""
    try:
        config = json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / name} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder / name} is not a JSON object")
    return config


def _file_of_each_tensor(folder: Path) -> dict[str, str]:
    if (folder / "model.safetensors.index.json").is_file():
        weight_map: dict[str, str] = read_config(folder, "model.safetensors.index.json")["weight_map"]
        absent = [name for name in sorted(set(weight_map.values())) if not (folder / name).is_file()]
        if absent:
            raise CheckpointError(f"{folder} lacks {_listed(absent)}, which its index names")
        return weight_map
    if not (folder / "model.safetensors").is_file():
        raise CheckpointError(f"{folder} holds neither model.safetensors nor model.safetensors.index.json")
    with _readable(folder / "model.safetensors") as file:
        return dict.fromkeys(_keys(file), "model.safetensors")


def _readable(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except SafetensorError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _opened(path: Path) -> TensorFile:
    try:
        return TensorFile(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _keys(file: Any) -> Iterator[str]:
    yield from file.keys()


def _listed(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
