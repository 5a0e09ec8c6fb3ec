"""What may travel in a payload, and how each value looks on the wire.

Scalars, strings, small bytes, lists and dicts are msgpack's own. Arrays and tensors become an extension value that
holds their dtype and shape and either the bytes or a reference to a shared-memory segment; so do strings and
bytes of more than 64 KiB.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from sgl_omni.errors import PayloadError
from sgl_omni.runtime.segments import INLINE_LIMIT, Bytes

if TYPE_CHECKING:
    import torch

VALUE = 1
"""msgpack extension code of every value below."""

_SCALARS = frozenset({type(None), bool, int, float})
_FORBIDDEN_KINDS = "OVMm"  # objects, structured voids, dates: no stable bytes
_TORCH_ONLY = ("bfloat16", "float8_e4m3fn", "float8_e5m2")

Store = Callable[[int], tuple[int, Any]]
"""Takes a segment of a size: (segment id, writable buffer)."""

Load = Callable[[int, int], Bytes]
"""Maps the first n bytes of a segment."""

Fill = Callable[["torch.Tensor"], int | None]
"""Copies a tensor into a block of device memory: its number; None where the tensor goes through host memory."""

Read = Callable[[int, "torch.dtype", tuple[int, ...]], "torch.Tensor"]
"""The tensor that a block of device memory holds."""


class WireValue(msgspec.Struct, array_like=True, frozen=True):
    """`kind` is "array", "tensor", "bytes" or "str"; `inline` is None where the bytes lie in `segment`. Of a "device"
    tensor, `segment` is the block."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    segment: int
    inline: bytes | None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(WireValue)


def pack(payload: Any, stage: str, store: Store, fill: Fill | None = None) -> dict[str, Any]:
    """Replaces every value that msgpack cannot carry, or should not copy, by an extension value.

    Raises:
        PayloadError: for a value or key of another type, naming `stage` and the key's path.
    """
    if type(payload) is not dict:
        raise PayloadError(f"stage '{stage}' gave a {type(payload).__name__} where a payload (dict) was expected")
    return {key: _pack(value, stage, key, store, fill) for key, value in payload.items()}


def _pack(value: Any, stage: str, path: Any, store: Store, fill: Fill | None = None) -> Any:
    kind = type(value)
    if not isinstance(path, str):
        raise PayloadError(f"stage '{stage}': payload key {path!r} is not a string")
    if kind in _SCALARS:
        return value
    if kind is str:
        return value if len(value) <= INLINE_LIMIT // 4 else _pack_text(value, store)
    if kind is bytes or kind is bytearray or kind is memoryview:
        return bytes(value) if len(value) <= INLINE_LIMIT and kind is not memoryview else _pack_bytes(value, store)
    if kind is dict:
        return {k: _pack(v, stage, _joined(path, k), store, fill) for k, v in value.items()}
    if kind is list or kind is tuple:
        return [_pack(v, stage, f"{path}[{i}]", store, fill) for i, v in enumerate(value)]
    if isinstance(value, np.ndarray):
        return _pack_array(value, stage, path, store)
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):  # a long double stays itself
        return _pack(value.item(), stage, path, store)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _pack_tensor(value, store, fill)
    raise PayloadError(
        f"stage '{stage}': payload key '{path}' holds a {kind.__module__}.{kind.__qualname__}, which cannot leave its "
        "process; use None, bool, int, float, str, bytes, a numpy array, a torch tensor, or a list or dict of these"
    )


def tensors(payload: Any) -> Iterator[torch.Tensor]:
    """Those in a payload, however deep."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if isinstance(payload, torch.Tensor):
        yield payload
    elif isinstance(payload, dict | list | tuple):
        for value in payload.values() if isinstance(payload, dict) else payload:
            yield from tensors(value)


def _joined(path: str, key: Any) -> Any:
    return f"{path}.{key}" if isinstance(key, str) else key


def _pack_text(value: str, store: Store) -> Any:
    data = value.encode()
    return _wire("str", "", (), np.frombuffer(data, np.uint8), store) if len(data) > INLINE_LIMIT else value


def _pack_bytes(value: bytes | bytearray | memoryview, store: Store) -> msgspec.msgpack.Ext:
    flat = memoryview(value).cast("B") if memoryview(value).contiguous else memoryview(bytes(value))
    return _wire("bytes", "", (), np.frombuffer(flat, np.uint8), store)


def _pack_array(value: np.ndarray[Any, Any], stage: str, path: str, store: Store) -> msgspec.msgpack.Ext:
    if value.dtype.kind in _FORBIDDEN_KINDS:
        raise PayloadError(f"stage '{stage}': payload key '{path}' is an array of dtype {value.dtype}")
    return _wire("array", value.dtype.str, value.shape, value, store)


def _pack_tensor(value: torch.Tensor, store: Store, fill: Fill | None) -> msgspec.msgpack.Ext:
    import torch

    if fill is not None and not (value.is_conj() or value.is_neg()) and (block := fill(value)) is not None:
        dtype = str(value.dtype).removeprefix("torch.")
        wire = WireValue("device", dtype, tuple(value.shape), value.nbytes, block, None)
        return msgspec.msgpack.Ext(VALUE, _encoder.encode(wire))
    plain = value.detach().cpu().resolve_conj().resolve_neg()
    dtype = str(plain.dtype).removeprefix("torch.")
    if dtype in _TORCH_ONLY:
        return _wire("tensor", dtype, tuple(plain.shape), plain.reshape(-1).view(torch.uint8).numpy(), store)
    return _wire("tensor", dtype, tuple(plain.shape), plain.numpy(), store)


def _wire(
    kind: str, dtype: str, shape: tuple[int, ...], data: np.ndarray[Any, Any], store: Store
) -> msgspec.msgpack.Ext:
    """The one copy of a hop: from the sender's array into the message or the segment."""
    size = data.nbytes
    if size <= INLINE_LIMIT:
        return msgspec.msgpack.Ext(VALUE, _encoder.encode(WireValue(kind, dtype, shape, size, -1, data.tobytes())))
    segment, buffer = store(size)
    np.copyto(np.frombuffer(buffer, dtype=data.dtype, count=data.size).reshape(data.shape), data, casting="no")
    return msgspec.msgpack.Ext(VALUE, _encoder.encode(WireValue(kind, dtype, shape, size, segment, None)))


def unpack(code: int, data: memoryview, load: Load, read: Read | None = None) -> Any:
    """The value behind an extension. Views of a segment release it when the last of them is dropped."""
    if code != VALUE:
        raise PayloadError(f"unknown extension value {code}")
    value = _decoder.decode(data)
    if value.kind == "device":
        return _read(value, read)
    raw = (
        np.frombuffer(bytearray(value.inline), dtype=np.uint8)
        if value.inline is not None
        else load(value.segment, value.size)
    )
    if value.kind == "array":
        return raw.view(value.dtype).reshape(value.shape)
    if value.kind == "tensor":
        return _tensor(raw, value.dtype, value.shape)
    if value.kind == "str":
        return str(raw.data, "utf-8")
    return raw.data if value.inline is None else value.inline


def _read(value: WireValue, read: Read | None) -> torch.Tensor:
    import torch

    if read is None:
        raise PayloadError("a tensor in device memory came where there is none")
    dtype: torch.dtype = getattr(torch, value.dtype)
    return read(value.segment, dtype, value.shape)


def _tensor(raw: Bytes, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    return torch.from_numpy(raw).view(kind).reshape(shape) if raw.size else torch.empty(shape, dtype=kind)
