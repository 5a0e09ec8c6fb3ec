"""What lies where in an arena, and whose weights they are: the description that leader and followers compare."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from sgl_omni.errors import WeightShareError

ALIGNMENT = 256
"""Bytes; what cudaMalloc gives, and so what kernels that were written for separate tensors may expect."""

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor. ``private``: the arena holds only its first content, and each replica works on a copy."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    private: bool

    @property
    def torch_dtype(self) -> torch.dtype:
        return _dtype(self.dtype)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes


@dataclass(frozen=True, slots=True)
class Manifest:
    """All tensors of one model, in the order of their offsets.

    ``size`` is the arena's, in bytes. ``fingerprint`` tells one checkpoint from another.
    """

    architecture: str
    fingerprint: str
    size: int
    entries: tuple[Entry, ...]

    @classmethod
    def lay_out(
        cls, wanted: Mapping[str, Tensor], *, architecture: str, fingerprint: str, private: Sequence[str] = ()
    ) -> Manifest:
        """Places the tensors one after another, each on a boundary of ``ALIGNMENT``.

        Args:
            wanted: tensors on the meta device; only their shapes, strides and dtypes matter.
            private: patterns of names.

        Raises:
            WeightShareError: a tensor has gaps or overlaps itself, there is none, or a pattern matches nothing.
        """
        if not any(tensor.numel() for tensor in wanted.values()):
            raise WeightShareError(f"{architecture}: there is no tensor to share")
        unused = [pattern for pattern in private if not any(fnmatchcase(name, pattern) for name in wanted)]
        if unused:
            raise WeightShareError(f"{architecture}: its share policy names {unused}, which match none of its tensors")
        entries: list[Entry] = []
        offset = 0
        for name, tensor in wanted.items():
            _check_dense(name, tensor)
            entry = Entry(
                name,
                str(tensor.dtype).removeprefix("torch."),
                tuple(tensor.shape),
                tensor.stride(),
                offset,
                any(fnmatchcase(name, pattern) for pattern in private),
            )
            entries.append(entry)
            offset = _aligned(entry.end)
        return cls(architecture, fingerprint, offset, tuple(entries))

    @property
    def shared_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries if not entry.private)

    @property
    def digest(self) -> str:
        return _digest(self._fields())

    def to_bytes(self) -> bytes:
        return json.dumps({**self._fields(), "digest": self.digest}, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Raises ``WeightShareError`` for what is no manifest, was changed, or describes an impossible arena."""
        try:
            fields = json.loads(data)
            digest = fields.pop("digest")
            if fields.pop("format") != FORMAT:
                raise WeightShareError("the manifest of shared weights is of another version of this program")
            rows = fields.pop("entries")
            entries = tuple(Entry(**{**row, "shape": (*row["shape"],), "strides": (*row["strides"],)}) for row in rows)
            manifest = cls(**fields, entries=entries)
            if manifest.digest != digest:
                raise WeightShareError("the manifest of shared weights was changed: its hash does not fit it")
            manifest._check_geometry()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightShareError(f"the manifest of shared weights cannot be read: {error!r}") from error
        return manifest

    def check_same(self, found: Manifest) -> None:
        """Raises ``WeightShareError`` that says how a manifest ``found`` differs from this one, the expected."""
        if self == found:
            return
        if self.architecture != found.architecture:
            raise WeightShareError(
                f"the weights found are those of {found.architecture}, but {self.architecture} was to be loaded"
            )
        if self.fingerprint != found.fingerprint:
            raise WeightShareError(
                f"{self.architecture}: the checkpoint was changed after its weights had been loaded; "
                "restart the server to serve what it holds now"
            )
        mine, theirs = ({entry.name: entry for entry in m.entries} for m in (self, found))
        differing = {
            "missing": sorted(mine.keys() - theirs.keys()),
            "unknown": sorted(theirs.keys() - mine.keys()),
            "different": sorted(name for name in mine.keys() & theirs.keys() if mine[name] != theirs[name]),
        }
        listed = "; ".join(f"{what}: {', '.join(names[:8])}" for what, names in differing.items() if names)
        raise WeightShareError(f"{self.architecture}: the weights found are laid out otherwise ({listed or 'size'})")

    def _fields(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    def _check_geometry(self) -> None:
        position = 0
        for entry in self.entries:
            dense = entry.offset >= position and entry.offset % ALIGNMENT == 0 and entry.end <= self.size
            if not dense or min((*entry.shape, *entry.strides), default=0) < 0:
                raise WeightShareError(f"the manifest of shared weights puts '{entry.name}' where it cannot be")
            _check_dense(entry.name, torch.empty_strided(entry.shape, entry.strides, device="meta"))
            position = entry.end


def _digest(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise WeightShareError(f"the manifest of shared weights names a data type '{name}', which torch does not have")
    return found


def _check_dense(name: str, tensor: Tensor) -> None:
    """Its elements fill one run of memory, each place once: the strides are those of a permuted contiguous tensor."""
    expected = 1
    for stride, length in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected and tensor.numel():
            raise WeightShareError(f"tensor '{name}' (strides {tensor.stride()}) does not fill one run of memory")
        expected *= length
