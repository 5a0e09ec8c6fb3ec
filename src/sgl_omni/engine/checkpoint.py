"""Reads parts of safetensors checkpoints, one file or several, by the names that tensors have on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sgl_omni.engine.headers import CheckpointError, check_shapes, read_headers
from sgl_omni.engine.tensor_file import Rows, TensorFile, read_all
from sgl_omni.json_files import read_object


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
    """A folder with ``model.safetensors``, or with the files that ``model.safetensors.index.json`` names.

    Raises ``CheckpointError`` for a file that is missing, truncated or of another kind.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._entries = read_headers(folder)

    def config(self) -> dict[str, Any]:
        return read_config(self.folder)

    def names(self, prefix: str = "") -> list[str]:
        return sorted(name for name in self._entries if name.startswith(prefix))

    def fingerprint(self) -> str:
        """Tells this checkpoint from another, or from itself after a change, without reading its data: by its
        configuration, its files' headers, their sizes and the times of their last changes."""
        parts = [(self.folder / "config.json").read_bytes() if (self.folder / "config.json").is_file() else b""]
        for path in sorted({entry.file for entry in self._entries.values()}):
            with _opened(path) as file:
                parts.append(f"{path.name} {file.fingerprint}".encode())
        return hashlib.sha256(b"\0".join(parts)).hexdigest()

    def check(self, slots: Iterable[Slot], *, prefix: str = "", ignore: Sequence[str] = ()) -> None:
        """What ``load`` would refuse, without reading data or touching a target, which may be on the meta device.

        Raises ``CheckpointError`` that names all missing, unknown and ill-shaped tensors, and those that are no floats.
        """
        wanted = ((slot.name, slot.shape) for slot in slots)
        check_shapes(self._entries, wanted, str(self.folder), prefix=prefix, ignore=ignore)

    @torch.no_grad()
    def load(self, slots: Iterable[Slot], *, prefix: str = "", ignore: Sequence[str] = ()) -> None:
        """Fills all slots. Every tensor below ``prefix`` must have one, unless a pattern of ``ignore`` matches it.

        Raises what ``check`` does, before anything is copied. Slots on the meta device are checked and nothing else.
        """
        wanted = list(slots)
        self.check(wanted, prefix=prefix, ignore=ignore)
        wanted = [slot for slot in wanted if not slot.target.is_meta]
        with ExitStack() as stack:
            paths = {self._entries[slot.name].file for slot in wanted}
            files = {path: stack.enter_context(_readable(path)) for path in sorted(paths)}
            raw = {path: stack.enter_context(_opened(path)) for path in files}
            straight: list[Rows] = []
            for slot in wanted:
                path = self._entries[slot.name].file
                rows = raw[path].rows(slot.name, slot.start, slot.target) if slot.dim == 0 else None
                if rows is None:
                    slot.target.copy_(files[path].get_slice(slot.name)[slot.index])
                else:
                    straight.append(rows)
            try:
                read_all(straight)
            except (OSError, EOFError) as error:
                raise CheckpointError(f"{self.folder} cannot be read: {error}") from error


def read_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """A JSON object of a checkpoint folder. Raises ``CheckpointError`` where it is absent or no object."""
    return read_object(folder / name, CheckpointError)


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
