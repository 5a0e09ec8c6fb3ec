"""What the safetensors files of a folder hold, by their headers: no data is read, and no torch is needed."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from sgl_omni.errors import OmniError
from sgl_omni.json_files import parse_json

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
FLOATS = frozenset({"BF16", "F16", "F32", "F64"})
"""Types of tensors, as headers call them, that are weights as they are. Quantised ones are not."""

_LONGEST_HEADER = 100_000_000
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 8),
}

Shape = tuple[int, ...]


class CheckpointError(OmniError):
    """A checkpoint is unreadable, or holds other tensors than the model has. Names the file and the tensors."""

    code = "checkpoint"


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor on disk: its file, its type as the header calls it, its shape."""

    file: Path
    dtype: str
    shape: Shape


def read_header(fd: int) -> bytes:
    """The header of an open file. Raises ``ValueError`` where there is none."""
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if not 2 <= length <= _LONGEST_HEADER:
        raise ValueError("it does not begin with a safetensors header")
    header = os.pread(fd, length, 8)
    if len(header) != length:
        raise ValueError("its header is cut short")
    return header


def read_headers(folder: Path) -> dict[str, Entry]:
    """All tensors of ``model.safetensors``, or of the files that ``model.safetensors.index.json`` names.

    Raises ``CheckpointError`` that names the file which is missing, truncated or of another kind.
    """
    index = folder / INDEX
    if not index.is_file():
        if not (folder / SINGLE).is_file():
            raise CheckpointError(f"{folder / SINGLE} is missing, and {INDEX} too: {folder} holds neither")
        return _entries(folder / SINGLE)
    files = _index(index)
    absent = [name for name in sorted(set(files.values())) if not (folder / name).is_file()]
    if absent:
        raise CheckpointError(f"{folder} lacks {listed(absent)}, which {INDEX} names: {folder / absent[0]} is missing")
    found = {name: _entries(folder / name) for name in sorted(set(files.values()))}
    astray = next((name for name, file in files.items() if name not in found[file]), None)
    if astray is not None:
        raise CheckpointError(f"{folder / files[astray]} lacks the tensor {astray}, which {INDEX} says it holds")
    return {name: found[file][name] for name, file in files.items()}


_DERIVED = ("rotary_emb.inv_freq", "num_batches_tracked")


def is_derived(name: str) -> bool:
    """Whether a tensor is a buffer that some versions of a model's classes save, and nobody needs to load."""
    return name.endswith(_DERIVED)


def check_shapes(
    entries: Mapping[str, Entry],
    wanted: Iterable[tuple[str, Shape]],
    where: str,
    *,
    prefix: str | None = None,
    ignore: Sequence[str] = (),
) -> None:
    """Raises ``CheckpointError`` that names all tensors that are missing, of another shape, or no floats.

    ``prefix``: what lies below it and is not wanted is told too, with its file, unless a pattern of ``ignore`` matches
    it.
    """
    shapes = dict(wanted)
    missing = sorted(shapes.keys() - entries.keys())
    others = () if prefix is None else sorted(n for n in entries if n.startswith(prefix) and not is_derived(n))
    unknown: dict[Path, list[str]] = {}
    for name in others:
        if name not in shapes and not any(fnmatch(name, each) for each in ignore):
            unknown.setdefault(entries[name].file, []).append(name)
    problems = [f"{where}: missing: {listed(missing)}"] * bool(missing)
    problems += [f"{file}: unknown to this model: {listed(names)}" for file, names in unknown.items()]
    if problems:
        raise CheckpointError("; ".join(problems))
    wrong: dict[Path, list[str]] = {}
    for name, shape in shapes.items():
        entry = entries[name]
        if entry.shape != shape:
            wrong.setdefault(entry.file, []).append(f"{name} is {[*entry.shape]}, not {[*shape]}")
        elif entry.dtype not in FLOATS:
            told = f"{name} is {entry.dtype}, not one of {', '.join(sorted(FLOATS))}"
            wrong.setdefault(entry.file, []).append(told)
    if wrong:
        raise CheckpointError("; ".join(f"{file}: {listed(told)}" for file, told in wrong.items()))


def listed(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _index(path: Path) -> dict[str, str]:
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    names = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(names, dict) or not names:
        raise CheckpointError(f"{path} lacks the field weight_map")
    for tensor, file in names.items():
        if not isinstance(file, str) or not file or Path(file).name != file:
            raise CheckpointError(f"{path}: weight_map.{tensor} is {file!r}, no name of a file beside it")
    return names


def _entries(path: Path) -> dict[str, Entry]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    try:
        header = read_header(fd)
        tensors = parse_json(header)
        if not isinstance(tensors, dict):
            raise ValueError("its header is no object")
        tensors.pop("__metadata__", None)
        spans = sorted((_span(name, entry), name) for name, entry in tensors.items())
        end = 0
        for (begin, stop), name in spans:
            if begin != end:
                raise ValueError(f"{name} begins at byte {begin} of the data, and what is before it ends at {end}")
            end = stop
        size = os.fstat(fd).st_size
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error
    finally:
        os.close(fd)
    whole = 8 + len(header) + end
    if whole != size:
        raise CheckpointError(f"{path} has {size} bytes, and its header tells of {whole}: it is truncated or damaged")
    return {name: Entry(path, entry["dtype"], tuple(entry["shape"])) for name, entry in tensors.items()}


def _span(name: str, entry: Any) -> tuple[int, int]:
    """Where a tensor's bytes begin and end. Raises ``ValueError`` for an entry that does not fit itself."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        whole = all(isinstance(number, int) and number >= 0 for number in (*shape, begin, end))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"its header says of {name} neither type, shape nor place") from error
    if not isinstance(dtype, str) or not whole or end < begin:
        raise ValueError(f"its header says of {name}: {dtype} {shape} at {begin} to {end}")
    bits = _BITS.get(dtype)
    if bits is not None and math.prod(shape) * bits != (end - begin) * 8:
        raise ValueError(f"{name} is {dtype} {shape} and takes {end - begin} bytes")
    return begin, end
