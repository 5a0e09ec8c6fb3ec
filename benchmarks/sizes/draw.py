"""Random weights of any size as safetensors files, drawn where it is fast and written tensor by tensor."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from benchmarks.sizes.tensors import Shapes
from torch import Tensor

SHARD_BYTES = 5 * 10**9
BLOCK = 1 << 26
"""Numbers that are drawn at a time."""
_ELEMENT = 2  # bfloat16
_ONES = ("alpha", "beta", "cluster_usage", "initialized")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """``zero_rows``: rows of tensors that hold zeros: an end whose logit is 0 is never among the 50 largest of
    thousands of random ones. ``constants``: tensors whose rows are these numbers."""

    zero_rows: Mapping[str, tuple[int, ...]]
    constants: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    tensors: int
    numbers: int
    drawn_bytes: int
    hole_bytes: int
    """In the files, and not on the disk: these weights read as zeros."""


def write_weights(folder: Path, shapes: Shapes, rules: Rules, *, seed: int, drawn_bytes: int | None = None) -> Written:
    """``model.safetensors``, or shards of at most 5 GB and their index, in bfloat16.

    Once ``drawn_bytes`` are written, matrices of experts become holes in the files, which take no room on the disk.
    Raises ``ValueError`` where what must be drawn is more than that.
    """
    unknown = sorted((rules.zero_rows.keys() | rules.constants.keys()) - shapes.keys())
    if unknown:
        raise ValueError(f"no tensors to rule: {unknown}")
    holes = _holes(shapes, drawn_bytes)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device=device).manual_seed(seed)
    shards = _shards(shapes)
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    names = names if len(shards) > 1 else ["model.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        _write(folder / name, shard, holes, rules, generator)
    if len(shards) > 1:
        where = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        index = {"metadata": {"total_size": _bytes(shapes.values())}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    hole_bytes = _bytes(shapes[name] for name in holes)
    total = _bytes(shapes.values())
    return Written(
        tensors=len(shapes), numbers=total // _ELEMENT, drawn_bytes=total - hole_bytes, hole_bytes=hole_bytes
    )


def _bytes(shapes: Iterable[tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes) * _ELEMENT


def _holes(shapes: Shapes, drawn_bytes: int | None) -> set[str]:
    """The last experts' matrices, as many as must not be drawn."""
    if drawn_bytes is None:
        return set()
    over, found = _bytes(shapes.values()) - drawn_bytes, set()
    for name in reversed(shapes):
        if over <= 0:
            break
        if ".experts." in name:
            found.add(name)
            over -= _bytes([shapes[name]])
    if over > 0:
        raise ValueError(f"{over / 1e9:.1f} GB more than {drawn_bytes / 1e9:.1f} GB must be drawn")
    return found


def _shards(shapes: Shapes) -> list[Shapes]:
    shards: list[Shapes] = [{}]
    size = 0
    for name, shape in shapes.items():
        length = _bytes([shape])
        if size and size + length > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = shape
        size += length
    return shards


def _write(file: Path, shapes: Shapes, holes: set[str], rules: Rules, generator: torch.Generator) -> None:
    header, at = {}, 0
    for name, shape in shapes.items():
        end = at + _bytes([shape])
        header[name] = {"dtype": "BF16", "shape": [*shape], "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        opened.truncate(8 + len(text) + at)
        for name, shape in shapes.items():
            if name in holes:
                opened.seek(_bytes([shape]), os.SEEK_CUR)
            else:
                for block in _blocks(name, shape, rules, generator):
                    opened.write(block.contiguous().view(torch.uint8).cpu().numpy().data)


def _blocks(name: str, shape: tuple[int, ...], rules: Rules, generator: torch.Generator) -> Iterable[Tensor]:
    """The tensor in parts of whole rows, bfloat16 [rows, ...]."""
    rows = shape[0] if shape else 1
    width = math.prod(shape[1:])
    step = max(1, BLOCK // max(1, width))
    center, spread = scale(name, shape)
    zeros, constants = rules.zero_rows.get(name, ()), rules.constants.get(name)
    for start in range(0, rows, step):
        count = min(step, rows - start)
        block = torch.empty(count, width, dtype=torch.bfloat16, device=generator.device)
        if spread:
            block.normal_(center, spread, generator=generator)
        else:
            block.fill_(center)
        for row in zeros:
            if start <= row < start + count:
                block[row - start] = 0
        if constants is not None:
            block[:] = torch.tensor(constants, dtype=block.dtype, device=block.device)[start : start + count, None]
        yield block


def scale(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and spread of a tensor's numbers, for which what goes through a network keeps its size."""
    last = name.rsplit(".", 1)[-1]
    if last in _ONES or (len(shape) < 2 and last == "weight") or last in ("original0", "weight_g"):
        return 1.0, 0.0
    if last in ("gamma", "scale"):
        return 0.1, 0.0
    if len(shape) < 2:
        return 0.0, 0.02
    gain = 0.7 if len(shape) > 2 else 1.0  # convolutions add up over what they overlap
    if "embed" in name and "patch_embed" not in name and len(shape) == 2:
        return 0.0, 1.0 if "codebook" in name else shape[1] ** -0.5
    return 0.0, gain * math.prod(shape[1:]) ** -0.5
