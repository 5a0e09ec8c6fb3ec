"""Tensors that pass through device memory: ownership, acknowledgement and ends, with memory files for a device."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import mmap
import os
import random
import socket
from collections.abc import AsyncIterator, Callable, Hashable
from typing import Any

import pytest
import torch

from sgl_omni.errors import PayloadError
from sgl_omni.gpu.cuda_blocks import CudaBlock, CudaMemory
from sgl_omni.gpu.device_memory import DeviceMemoryError, HostBlock, HostMemory
from sgl_omni.gpu.weights.cuda_driver import DriverError
from sgl_omni.runtime.blocks import SMALLEST_BLOCK, Device
from sgl_omni.runtime.channel import Channel
from sgl_omni.runtime.messages import BlocksRead, Header, Message, Submit

HEADER = Header("r", {}, ())
LIMIT = 4 * SMALLEST_BLOCK


class Pair:
    """Two channels over one connection, each with device memory of its own."""

    def __init__(self, sender: Device | None, receiver: Device | None) -> None:
        left, right = socket.socketpair()
        self.received: asyncio.Queue[Message] = asyncio.Queue()
        self.closed: list[str] = []
        self.left = Channel(left, lambda c, m: None, lambda c, r: None, name="b", device=sender)
        self.right = Channel(
            right, lambda c, m: self.received.put_nowait(m), lambda c, r: self.closed.append(r), device=receiver
        )

    def send(self, payload: dict[str, Any], *, by_device: bool = True, holder: Hashable = None) -> None:
        self.left.send_payload(Submit(HEADER, "", "s", payload), "s", by_device=by_device, holder=holder)

    async def receive(self) -> Any:
        message = await asyncio.wait_for(self.received.get(), 5)
        return message.payload if isinstance(message, Submit) else message

    async def pass_on(self, payload: dict[str, Any], **options: Any) -> Any:
        self.send(payload, **options)
        return await self.receive()

    def close(self) -> None:
        self.left.close()
        self.right.close()


def device(limit: int = LIMIT, memory: type[HostMemory] = HostMemory) -> Device:
    return Device(memory, limit)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = Pair(device(), device(0))
    yield pair
    pair.close()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0.005)


def ramp(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32)


async def test_the_first_tensor_goes_by_the_host_and_the_next_by_the_block_that_it_asked_for(pair: Pair) -> None:
    first = await pair.pass_on({"t": ramp(100_000)})
    assert torch.equal(first["t"], ramp(100_000))
    assert (pair.left.device_bytes, pair.left.blocks_out, pair.right.leased_in) == (SMALLEST_BLOCK, 0, 1)
    await settle()
    second = await pair.pass_on({"t": ramp(100_000) * 2, "n": [ramp(10)]})
    assert torch.equal(second["t"], ramp(100_000) * 2) and torch.equal(second["n"][0], ramp(10))
    assert pair.right.leased_in == 1, "no segment of host memory was used"
    await settle()
    assert pair.left.blocks_out == 0, "the receiver has a copy, so the block is free again at once"
    second["t"].zero_()
    third = await pair.pass_on({"t": ramp(100_000) + 1})
    assert torch.equal(third["t"], ramp(100_000) + 1) and not second["t"].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool, torch.float16, torch.uint8])
async def test_dtypes_shapes_and_strides(pair: Pair, dtype: torch.dtype) -> None:
    await pair.pass_on({"t": ramp(200_000)})
    await settle()
    tensor = (torch.rand(300, 400) * 5).to(dtype).T
    back = (await pair.pass_on({"t": tensor}))["t"]
    assert back.dtype == dtype and torch.equal(back, tensor) and back.shape == (400, 300)


async def test_many_in_flight_never_mix_and_the_rest_goes_by_the_host(pair: Pair) -> None:
    await pair.pass_on({"t": ramp(100_000)})
    await settle()
    for i in range(50):
        pair.send({"t": ramp(100_000) + i})
        assert pair.left.blocks_out <= 1, "one block is open so far"
    for i in range(50):
        assert torch.equal((await pair.receive())["t"], ramp(100_000) + i)
    await settle()
    assert pair.left.blocks_out == 0 and pair.left.device_bytes <= LIMIT


def woken(by: list[str], name: str) -> Callable[[], None]:
    return lambda: by.append(name)


async def test_who_can_wait_is_told_when_its_blocks_are_there(pair: Pair) -> None:
    told: list[str] = []
    chunk = {"t": ramp(100_000), "more": [ramp(100_000), ramp(3)]}
    for _ in range(2):
        assert not pair.left.has_room("a", chunk, woken(told, "a"))
    await settle()
    assert told == ["a"] and pair.left.has_room("a", chunk, woken(told, "again"))
    assert pair.left.blocks_out == 0
    pair.send(chunk, holder="a")
    pair.left.release("a")
    assert pair.left.blocks_out == 2 and pair.right.leased_in == 0
    assert not pair.left.has_room("b", chunk, woken(told, "b"))
    await pair.receive()
    await settle()
    assert told == ["a", "b"] and pair.left.has_room("b", chunk, woken(told, "again"))


async def test_first_come_first_served_and_who_gives_up_holds_up_nobody() -> None:
    pair, told = Pair(device(SMALLEST_BLOCK), device(0)), list[str]()
    chunk = {"t": ramp(400_000)}
    for name in "abcd":
        assert not pair.left.has_room(name, chunk, woken(told, name))
    await settle()
    assert told == ["a"]
    assert not pair.left.has_room("e", chunk, woken(told, "e"))
    pair.left.release("b")
    for name in "acde":
        await settle()
        assert told[-1] == name
        pair.send(chunk, holder=name)
        pair.left.release(name)
        assert (await pair.receive())["t"].equal(ramp(400_000))
    assert pair.right.leased_in == 0 and told == ["a", "c", "d", "e"]
    pair.close()


async def test_who_asks_nobody_takes_nothing_from_those_that_wait() -> None:
    pair, told = Pair(device(SMALLEST_BLOCK), device(0)), list[str]()
    chunk = {"t": ramp(400_000)}
    assert not pair.left.has_room("a", chunk, woken(told, "a"))
    await settle()
    await pair.pass_on(chunk)
    assert pair.left.blocks_out == 0, "it went by the host"
    pair.send(chunk, holder="a")
    assert pair.left.blocks_out == 1
    pair.close()


async def test_what_lies_ready_for_one_receiver_goes_to_another_that_needs_it() -> None:
    shared, told = device(SMALLEST_BLOCK), list[str]()
    pairs = [Pair(shared, device(0)) for _ in range(3)]
    for number in (0, 1, 2, 0, 2):
        one = pairs[number]
        assert not one.left.has_room("a", {"t": ramp(400_000)}, woken(told, str(number)))
        await settle()
        await one.pass_on({"t": ramp(400_000)}, holder="a")
        one.left.release("a")
        await settle()
        assert one.right.leased_in == 0 and shared.sent == len(told)
    assert told == ["0", "1", "2", "0", "2"] and shared.allowance.taken == SMALLEST_BLOCK
    for one in pairs:
        one.close()
    assert shared.allowance.taken == 0 and shared.pools == []


async def test_a_large_block_is_changed_into_small_ones_and_back(pair: Pair) -> None:
    large, small = {"t": ramp(1_500_000)}, {"t": [ramp(400_000)] * 2}
    for payload in (large, small, large, small):
        pair.left.has_room("a", payload, lambda: None)
        await settle()
        pair.send(payload, holder="a")
        pair.left.release("a")
        await pair.receive()
        await settle()
    assert pair.right.leased_in == 0, "nothing went by the host"


async def test_tensors_for_which_there_is_no_room_together_wait_for_what_there_is(pair: Pair) -> None:
    payload = {"t": [ramp(600_000) + i for i in range(3)], "u": [ramp(100_000), ramp(100_001)]}
    told: list[str] = []
    assert not pair.left.has_room("a", payload, woken(told, "a"))
    await settle()
    assert told == ["a"] and pair.left.device_bytes == LIMIT
    back = await pair.pass_on(payload, holder="a")
    pair.left.release("a")
    assert all(torch.equal(back["t"][i], ramp(600_000) + i) for i in range(3))
    assert torch.equal(back["u"][1], ramp(100_001))
    await settle()
    assert pair.left.device_bytes == LIMIT and pair.left.blocks_out == 0


async def test_nobody_waits_for_what_will_not_come(pair: Pair) -> None:
    told: list[str] = []
    await pair.pass_on({"t": ramp(100_000)})
    await settle()
    assert pair.left.has_room("a", {"t": ramp(LIMIT)}, woken(told, "a")), "larger than all blocks together"
    assert pair.left.device_bytes == SMALLEST_BLOCK, "so the one that is there stays"
    assert pair.left.has_room("b", {"t": ramp(10), "text": "x" * 200_000, "n": 1}, woken(told, "b"))
    assert pair.left.has_room("c", {"t": torch.eye(1000).to_sparse()}, woken(told, "c")), (
        "to be refused where it is sent"
    )
    pair.left.release("a")
    assert not pair.left.has_room("d", {"t": ramp(600_000)}, woken(told, "d"))
    pair.right.close()
    await settle()
    assert told == ["d"] and pair.left.has_room("d", {"t": ramp(600_000)}, woken(told, "again"))
    assert Pair(None, None).left.has_room("a", {"t": ramp(600_000)}, woken(told, "again"))


async def test_who_was_given_nothing_holds_up_nobody() -> None:
    """The first one's tensor is larger than all blocks together; it is sent, and the next one has its turn."""
    own, told = device(SMALLEST_BLOCK), list[str]()
    pair = Pair(own, device(0))
    assert pair.left.has_room("a", {"t": ramp(2_000_000)}, woken(told, "a"))
    assert not pair.left.has_room("b", {"t": ramp(400_000)}, woken(told, "b"))
    await pair.pass_on({"t": ramp(2_000_000)}, holder="a")
    pair.left.release("a")
    await settle()
    assert told == ["b"]
    await pair.pass_on({"t": ramp(400_000)}, holder="b")
    pair.left.release("b")
    assert own.sent == 1
    pair.close()


async def test_payloads_of_many_sizes_at_once_all_arrive() -> None:
    pair, generator = Pair(device(LIMIT), device(0)), random.Random(5)
    done: list[int] = []

    async def one(number: int) -> None:
        counts = [generator.choice((20_000, 400_000, 900_000, 3_000_000)) for _ in range(generator.randint(1, 6))]
        payload = {"n": number, "t": [ramp(count) + number for count in counts]}
        ready = asyncio.Event()
        while not pair.left.has_room(number, payload, ready.set):
            await ready.wait()
            ready.clear()
        if generator.random() < 0.2:
            pair.left.release(number)  # it was aborted
            done.append(number)
            return
        pair.send(payload, holder=number)
        pair.left.release(number)

    async def receive() -> None:
        while len(done) < 60:
            got = await pair.receive()
            assert all(torch.equal(t, ramp(len(t)) + got["n"]) for t in got["t"])
            done.append(got["n"])

    await asyncio.wait_for(asyncio.gather(*(one(n) for n in range(60)), receive()), 60)
    await settle()
    assert sorted(done) == [*range(60)] and pair.left.blocks_out == 0 and pair.left.device_bytes <= LIMIT
    pair.close()


async def test_a_tensor_may_take_all_that_there_is() -> None:
    pair = Pair(device(3 * SMALLEST_BLOCK), device(0))
    assert not pair.left.has_room("a", {"t": ramp(1_100_000)}, lambda: None)
    await settle()
    await pair.pass_on({"t": ramp(1_100_000)}, holder="a")
    assert pair.right.leased_in == 0
    pair.close()


async def test_pools_stay_within_the_allowance_of_the_process() -> None:
    shared = device()
    pairs = [Pair(shared, device(0)) for _ in range(3)]
    for _ in range(4):
        for one in pairs:
            for size in (100_000, 1_000_000):
                assert torch.equal((await one.pass_on({"t": ramp(size)}))["t"], ramp(size))
        await settle()
    held = sum(one.left.device_bytes for one in pairs)
    assert held == shared.allowance.taken <= LIMIT
    for one in pairs:
        one.close()
    assert shared.allowance.taken == 0


async def test_small_free_blocks_make_room_for_a_large_one(pair: Pair) -> None:
    for _ in range(2):
        await pair.pass_on({"t": ramp(100_000)})
        await settle()
    for _ in range(3):
        await pair.pass_on({"t": ramp(2_000_000)})
        await settle()
    assert pair.left.device_bytes == 4 * SMALLEST_BLOCK
    before = pair.right.leased_in
    kept = await pair.pass_on({"t": ramp(2_000_000)})
    assert pair.right.leased_in == before and torch.equal(kept["t"], ramp(2_000_000))


async def test_without_the_plans_word_tensors_go_by_the_host(pair: Pair) -> None:
    for _ in range(3):
        await pair.pass_on({"t": ramp(100_000)}, by_device=False)
        await settle()
    assert pair.left.device_bytes == 0


class Closed(HostMemory):
    """A container that lets nobody open what others made."""

    def open(self, fd: int, size: int) -> HostBlock:
        raise DeviceMemoryError("cuMemImportFromShareableHandle failed: CUDA_ERROR_NOT_PERMITTED (800)")


class Empty(HostMemory):
    """A GPU without room."""

    def create(self, size: int) -> HostBlock:
        raise DeviceMemoryError("cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY (2)")


@pytest.mark.parametrize(
    ("sender", "receiver", "reason"),
    [
        (HostMemory, Closed, "CUDA_ERROR_NOT_PERMITTED"),
        (Empty, HostMemory, "CUDA_ERROR_OUT_OF_MEMORY"),
        (HostMemory, None, "the receiver computes on no device"),
    ],
)
async def test_what_is_refused_is_said_once_and_goes_by_the_host(
    sender: type[HostMemory], receiver: type[HostMemory] | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    own = device(memory=sender)
    pair = Pair(own, None if receiver is None else device(0, receiver))
    with caplog.at_level(logging.WARNING):
        for i in range(5):
            assert torch.equal((await pair.pass_on({"t": ramp(100_000) + i}))["t"], ramp(100_000) + i)
            await settle()
    (line,) = caplog.messages
    assert line.startswith("tensors to 'b' go through host memory: ") and reason in line
    assert pair.left.device_bytes == own.allowance.taken == 0
    assert pair.closed == []
    pair.close()


async def test_a_payload_that_is_refused_gives_its_block_back(pair: Pair) -> None:
    await pair.pass_on({"t": ramp(100_000)})
    await settle()
    with pytest.raises(PayloadError, match=r"'x' holds a builtins\.object"):
        pair.send({"t": ramp(100_000), "x": object()})
    assert pair.left.blocks_out == 0
    assert torch.equal((await pair.pass_on({"t": ramp(100_000)}))["t"], ramp(100_000))


async def test_a_tensor_that_cannot_be_copied_leaves_its_block_free(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: HostBlock, tensor: torch.Tensor) -> None:
        raise RuntimeError("no such copy")

    assert not pair.left.has_room("a", {"t": ramp(100_000)}, lambda: None)
    await settle()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no such copy"):
        patch.setattr(HostBlock, "write", fail)
        pair.send({"t": ramp(100_000)}, holder="a")
    pair.left.release("a")
    assert pair.left.blocks_out == 0 and pair.left.has_room("b", {"t": ramp(100_000)}, lambda: None)


async def test_a_receiver_that_dies_with_a_block_frees_the_sender() -> None:
    own = device()
    pair = Pair(own, device(0))
    await pair.pass_on({"t": ramp(100_000)})
    await settle()
    before = len(os.listdir("/proc/self/fd"))
    pair.send({"t": ramp(100_000)})
    assert pair.left.blocks_out == 1
    pair.right.close()  # without having read
    await settle()
    assert pair.left.closed and own.allowance.taken == 0
    assert len(os.listdir("/proc/self/fd")) < before


async def test_a_sender_that_dies_leaves_what_was_received() -> None:
    pair = Pair(device(), device(0))
    await pair.pass_on({"t": ramp(100_000)})
    await settle()
    payload = await pair.pass_on({"t": ramp(100_000)})
    pair.left.close()
    await settle()
    gc.collect()
    assert pair.closed == [""]
    assert torch.equal(payload["t"], ramp(100_000))


async def test_an_answer_where_there_is_no_device_closes_the_channel() -> None:
    pair = Pair(None, None)
    pair.right.send(BlocksRead([0]))
    await settle()
    assert pair.left.closed
    pair.close()


class Driver:
    """The driver's calls that a CUDA block makes, over memory files; an address is that of a mapping."""

    def __init__(self) -> None:
        self.maps: dict[int, mmap.mmap] = {}
        self.handles: set[int] = set()
        self.fails = ""

    def rounded(self, size: int) -> int:
        return -(-size // SMALLEST_BLOCK) * SMALLEST_BLOCK

    def create(self, size: int) -> int:
        self._may("cuMemCreate")
        fd = os.memfd_create("driver")
        os.ftruncate(fd, size)
        self.handles.add(fd)
        return fd

    def map(self, handle: int, size: int, access: int) -> int:
        self._may("cuMemMap")
        mapped = mmap.mmap(handle, size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self.maps[address] = mapped
        return address

    def unmap(self, address: int, size: int) -> None:
        gc.collect()
        self.maps.pop(address)

    def release(self, handle: int) -> None:
        self.handles.remove(handle)
        os.close(handle)

    def export(self, handle: int) -> int:
        self._may("cuMemExportToShareableHandle")
        return os.dup(handle)

    def import_descriptor(self, fd: int) -> int:
        self._may("cuMemImportFromShareableHandle")
        self.handles.add(own := os.dup(fd))
        return own

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        ctypes.memmove(target, source, size)

    def _may(self, call: str) -> None:
        if self.fails == call:
            raise DriverError(f"{call} failed")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> tuple[CudaMemory, Driver]:
    """CUDA's blocks with everything but the driver and the stream."""
    memory, driver = object.__new__(CudaMemory), Driver()
    memory._device, memory._driver = torch.device("cpu"), driver  # type: ignore[assignment]
    monkeypatch.setattr(CudaBlock, "_copy", lambda self, target, source, size: driver.copy(target, source, size, 0))
    return memory, driver


def test_a_cuda_block_is_made_handed_on_read_and_freed(cuda: tuple[CudaMemory, Driver]) -> None:
    memory, driver = cuda
    tensor = (torch.rand(700, 900) * 100).to(torch.bfloat16).T
    block = memory.create(memory.rounded(tensor.nbytes))
    block.write(tensor)
    fd = block.export()
    opened = memory.open(fd, block.size)
    os.close(fd)
    block.close()
    back = opened.read(tensor.dtype, tuple(tensor.shape))
    opened.close()
    assert torch.equal(back, tensor)
    assert not driver.handles and not driver.maps


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemExportToShareableHandle"])
def test_what_the_driver_refuses_of_a_cuda_block_leaks_nothing(cuda: tuple[CudaMemory, Driver], call: str) -> None:
    memory, driver = cuda
    driver.fails = call
    with pytest.raises(DeviceMemoryError, match=call):
        memory.create(SMALLEST_BLOCK).export()
    if call != "cuMemExportToShareableHandle":
        assert not driver.handles and not driver.maps


@pytest.mark.parametrize("call", ["cuMemImportFromShareableHandle", "cuMemMap"])
def test_a_block_that_cannot_be_reached_leaks_nothing(cuda: tuple[CudaMemory, Driver], call: str) -> None:
    memory, driver = cuda
    fd = memory.create(SMALLEST_BLOCK).export()
    before = set(driver.handles)
    driver.fails = call
    with pytest.raises(DeviceMemoryError, match=f"cannot be reached: {call}"):
        memory.open(fd, SMALLEST_BLOCK)
    assert driver.handles == before
    os.close(fd)


async def test_cuda_blocks_go_through_a_channel(cuda: tuple[CudaMemory, Driver]) -> None:
    memory, driver = cuda
    pair = Pair(Device(lambda: memory, LIMIT), Device(lambda: memory, 0))
    for i in range(3):
        assert torch.equal((await pair.pass_on({"t": ramp(100_000) + i}))["t"], ramp(100_000) + i)
        await settle()
    assert pair.left.device_bytes == SMALLEST_BLOCK
    pair.close()
    assert not driver.handles and not driver.maps
