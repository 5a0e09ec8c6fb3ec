"""Payloads and channels: what may travel, what arrives, and what becomes of the shared memory."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from sgl_omni.errors import PayloadError
from sgl_omni.runtime import payload as wire
from sgl_omni.runtime.channel import Channel
from sgl_omni.runtime.messages import Abort, Header, Message, Submit
from sgl_omni.runtime.segments import INLINE_LIMIT, Allowance, SegmentPool, size_class

HEADER = Header("r", {}, ())


def no_segment(size: int) -> Any:
    raise AssertionError("a small payload took a segment")


def round_trip(payload: dict[str, Any]) -> dict[str, Any]:
    """Through the encoding alone, with inline values."""
    data = msgspec.msgpack.encode(wire.pack(payload, "s", no_segment))
    found: dict[str, Any] = msgspec.msgpack.decode(data, ext_hook=lambda c, d: wire.unpack(c, d, no_segment))
    return found


SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=20)
)
VALUES = st.recursive(
    SCALARS | st.binary(max_size=50),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=8), VALUES, max_size=5))
def test_plain_values_come_back_as_they_were(payload: dict[str, Any]) -> None:
    assert round_trip(payload) == payload


@given(
    arrays.arrays(
        st.sampled_from(["f4", "f8", "i2", "i8", "u1", "?", "c8", ">f4"]), arrays.array_shapes(min_dims=0, min_side=0)
    )
)
@settings(deadline=None)
def test_arrays_keep_dtype_shape_and_values(array: np.ndarray) -> None:
    back = round_trip({"a": array, "t": array.T})
    assert back["a"].dtype == array.dtype and back["a"].shape == array.shape
    np.testing.assert_array_equal(back["a"], array)
    np.testing.assert_array_equal(back["t"], array.T)
    assert back["a"].flags.writeable


def test_numpy_scalars_are_plain_values_and_a_long_double_is_refused() -> None:
    assert round_trip({"a": np.float32(1.5), "b": np.int8(-3), "c": np.bool_(True)}) == {"a": 1.5, "b": -3, "c": True}
    with pytest.raises(PayloadError, match=r"payload key 'a' holds a numpy\.longdouble"):
        round_trip({"a": np.longdouble(1)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8])
@pytest.mark.parametrize("shape", [(3, 5), (), (0, 4)])
def test_tensors_keep_dtype_shape_and_values(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.rand(shape) * 5).to(dtype)
    back = round_trip({"t": tensor})["t"]
    assert back.dtype == dtype and back.shape == tensor.shape
    assert torch.equal(back, tensor)


def test_a_value_of_another_type_is_named_by_stage_and_path() -> None:
    for bad, path in [
        ({"a": {"b": [1, {2}]}}, r"a\.b\[1\]"),
        ({"f": lambda: 0}, "f"),
        ({"o": np.array([None])}, "o"),
    ]:
        with pytest.raises(PayloadError, match=f"stage 's'.*'{path}'"):
            wire.pack(bad, "s", no_segment)
    with pytest.raises(PayloadError, match="key 3 is not a string"):
        wire.pack({"d": {3: 1}}, "s", no_segment)


def test_numpy_scalars_travel_as_python_ones() -> None:
    assert round_trip({"x": np.float32(1.5), "n": np.int64(3)}) == {"x": 1.5, "n": 3}


class Pair:
    """Two channels over one connection, and what each has received."""

    def __init__(self) -> None:
        left, right = socket.socketpair()
        self.received: asyncio.Queue[Message] = asyncio.Queue()
        self.closed: list[str] = []
        self.left = Channel(left, lambda c, m: None, lambda c, r: None)
        self.right = Channel(right, lambda c, m: self.received.put_nowait(m), lambda c, r: self.closed.append(r))

    def send(self, payload: dict[str, Any]) -> None:
        self.left.send_payload(Submit(HEADER, "", "s", payload), "s")

    async def receive(self) -> Any:
        message = await asyncio.wait_for(self.received.get(), 5)
        return message.payload if isinstance(message, Submit) else message


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = Pair()
    yield pair
    pair.left.close()
    pair.right.close()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0.005)


async def test_messages_keep_their_order_among_payloads_of_all_sizes(pair: Pair) -> None:
    sizes = [1, INLINE_LIMIT, INLINE_LIMIT + 1, 10, 1_000_000, 0, 300_000]
    for i, size in enumerate(sizes):
        pair.send({"i": i, "b": b"x" * size, "a": np.full(size, i, np.uint8)})
        pair.left.send(Abort(str(i)))
    for i, size in enumerate(sizes):
        payload = await pair.receive()
        assert payload["i"] == i and len(payload["b"]) == size and payload["a"].sum() == i * size
        assert await pair.receive() == Abort(str(i))


async def test_bulk_bytes_are_writable_views_and_their_segment_returns_when_dropped(pair: Pair) -> None:
    pair.send({"b": b"abc" * 100_000})
    payload = await pair.receive()
    assert isinstance(payload["b"], memoryview) and bytes(payload["b"][:3]) == b"abc"
    payload["b"][0] = 0
    assert (pair.left.leased_out, pair.right.leased_in) == (1, 1)
    part = payload["b"][10:20]
    del payload
    await settle()
    assert pair.left.leased_out == 1, "a slice keeps the segment"
    del part
    await settle()
    assert (pair.left.leased_out, pair.right.leased_in) == (0, 0)


async def test_segments_are_used_again_and_memory_stays_flat(pair: Pair) -> None:
    for i in range(50):
        pair.send({"a": np.full(200_000, i, np.uint8)})
        payload = await pair.receive()
        assert payload["a"][-1] == i
        del payload
        await settle()
    assert pair.left.mapped_bytes == size_class(200_000)


async def test_views_of_tensors_and_arrays_dropped_in_another_thread_release(pair: Pair) -> None:
    pair.send({"t": torch.ones(100_000), "a": np.ones(100_000)})
    held = [await pair.receive()]
    assert pair.right.leased_in == 2
    await asyncio.to_thread(held.clear)
    await settle()
    assert (pair.left.leased_out, pair.right.leased_in) == (0, 0)


async def test_surplus_segments_are_unmapped_on_both_sides(pair: Pair) -> None:
    big = np.zeros(40 * 1024 * 1024, np.uint8)
    for _ in range(2):
        pair.send({"a": big})
    held = [await pair.receive(), await pair.receive()]
    held.clear()
    await settle()
    assert pair.left.leased_out == 0
    assert pair.left.mapped_bytes == size_class(big.nbytes), "two would be more than a channel keeps"


async def test_a_refused_payload_queues_nothing_and_leaks_nothing(pair: Pair) -> None:
    with pytest.raises(PayloadError):
        pair.send({"a": np.zeros(100_000), "bad": object()})
    with pytest.raises(PayloadError, match="64 bits"):
        pair.send({"a": np.zeros(100_000), "bad": 2**65})
    assert pair.left.leased_out == 0
    pair.send({"ok": 1})
    assert await pair.receive() == {"ok": 1}


async def test_a_large_message_without_arrays_passes_through_the_socket(pair: Pair) -> None:
    payload = {"words": [f"word {i}" for i in range(200_000)]}
    pair.send(payload)
    assert await pair.receive() == payload


async def test_the_end_of_a_peer_frees_its_leases_and_is_told_once(pair: Pair) -> None:
    pair.send({"a": np.ones(100_000)})
    payload = await pair.receive()
    before = len(os.listdir("/proc/self/fd"))
    pair.left.close()
    await settle()
    assert pair.closed == [""]
    assert payload["a"].sum() == 100_000, "what was received stays readable"
    del payload
    gc.collect()
    pair.right.send(Abort("x"))
    pair.right.close()
    assert pair.closed == [""]
    assert len(os.listdir("/proc/self/fd")) < before


async def test_garbage_closes_the_channel_with_a_reason() -> None:
    left, right = socket.socketpair()
    closed: list[str] = []
    Channel(right, lambda c, m: None, lambda c, reason: closed.append(reason))
    left.send((5).to_bytes(4, "little") + b"\xc1garb")
    await settle()
    assert len(closed) == 1 and "cannot be read" in closed[0]
    left.close()


async def test_an_absurd_length_closes_the_channel() -> None:
    left, right = socket.socketpair()
    closed: list[str] = []
    Channel(right, lambda c, m: None, lambda c, reason: closed.append(reason))
    left.send(b"\xff\xff\xff\xff")
    await settle()
    assert "4294967295 bytes" in closed[0]
    left.close()


async def test_segments_stay_within_what_the_process_may_take() -> None:
    """Free segments of other sizes make room; what still does not fit is refused, and fits once others are dropped."""
    allowance = Allowance(4 * 2**20)
    left, right = socket.socketpair()
    received: asyncio.Queue[Message] = asyncio.Queue()
    sender = Channel(left, lambda c, m: None, lambda c, r: None, allowance=allowance)
    receiver = Channel(right, lambda c, m: received.put_nowait(m), lambda c, r: None)

    async def take(count: int) -> Any:
        sender.send_payload(Submit(HEADER, "", "s", {"a": np.arange(count)}), "s")
        message = await asyncio.wait_for(received.get(), 5)
        assert isinstance(message, Submit)
        return message.payload

    for _ in range(3):
        small = await take(2**17)  # 1 MiB
        del small
        gc.collect()
        await settle()
    assert sender.mapped_bytes == allowance.taken == 2**20
    kept = await take(2**19)  # 4 MiB: all there is
    assert sender.mapped_bytes == allowance.taken == 4 * 2**20
    with pytest.raises(PayloadError, match=r"stage 's': no shared memory for 1048576 bytes .* 4194304 of 4194304"):
        await take(2**17)
    assert kept["a"][-1] == 2**19 - 1 and allowance.refused
    del kept
    gc.collect()
    await settle()
    assert (await take(2**17))["a"][-1] == 2**17 - 1
    sender.close()
    receiver.close()
    assert allowance.taken == 0


def test_the_pool_serves_the_smallest_class_and_reuses() -> None:
    pool = SegmentPool()
    first, _, fd = pool.take(70_000)
    assert fd is not None
    os.close(fd)
    assert pool.give_back(first)
    again, mapping, fd = pool.take(100_000)
    assert (again, len(mapping), fd) == (first, 131_072, None)
    pool.close()
