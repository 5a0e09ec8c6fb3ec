"""The ranks of a tensor-parallel stage: what they are told, in which order, and how they add up tensors.

Rank 0 receives the stage's messages and tells the others all that its engine is told, before it is, over a socket to
each; every rank's engine then takes the same decisions. Tensors are summed by torch.distributed.
"""

from __future__ import annotations

import random
import socket
import struct
import time
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import numpy as np

from sgl_omni.errors import PayloadError
from sgl_omni.runtime import payload as wire
from sgl_omni.runtime.messages import GroupLink
from sgl_omni.runtime.segments import Bytes
from sgl_omni.runtime.stage import Payload

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from sgl_omni.engine.shard import Shard

PEER_SECONDS = 2.0
"""How long a rank that lost another waits to be ended with it, so that the one that failed first is the one named."""

_HEAD = struct.Struct("<II")
"""Bytes of the command, and how many buffers come before it."""


class Add(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """See `Engine.add`."""

    request_id: str
    payload: Any


class Extend(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """See `FedEngine.extend`."""

    request_id: str
    payload: Any


class FinishInput(msgspec.Struct, array_like=True, frozen=True, tag=3):
    """See `FedEngine.finish_input`."""

    request_id: str


class Drop(msgspec.Struct, array_like=True, frozen=True, tag=4):
    """See `Engine.abort`."""

    request_id: str


class Step(msgspec.Struct, array_like=True, frozen=True, tag=5):
    """One step. `digest`: of all that came of rank 0's engine before it, which is the same in every rank."""

    digest: int


Command = Add | Extend | FinishInput | Drop | Step


class PeerLost(ConnectionError):
    """Another rank does not answer any more. It, or whoever ended it, is the one to be named."""


class GroupBroken(BaseException):
    """The ranks can no longer act as one, so this process ends. No `Exception`: it is not one request's failure."""


class Ranks:
    """This process's place in a group of ranks."""

    def __init__(self, rank: int, size: int, link: GroupLink, device: int | None) -> None:
        """`device`: the CUDA device that this rank computes on; None for the CPU."""
        self.rank = rank
        self.size = size
        self.port = link.port
        self._link = link
        self._device = device
        self._sockets = [socket.socket(fileno=fd) for fd in link.sockets]
        self._encoder = msgspec.msgpack.Encoder()
        self._group: ProcessGroup | None = None

    def join(self) -> None:
        """Meets the other ranks; returns when all are there. Draws of this process's generators are theirs too.

        Raises:
            PeerLost: one of them went away meanwhile.
        """
        import torch
        import torch.distributed as dist

        self.bind_thread()
        random.seed(self._link.seed)
        np.random.seed(self._link.seed)
        torch.manual_seed(self._link.seed)
        device = None if self._device is None else torch.device("cuda", self._device)
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                "127.0.0.1",
                self.port,
                self.size,
                self.rank == 0,
                wait_for_workers=False,
                master_listen_fd=self._link.listener if self.rank == 0 else None,
            )
            dist.init_process_group(
                "gloo" if device is None else "nccl",
                store=store,
                rank=self.rank,
                world_size=self.size,
                device_id=device,
            )
        except RuntimeError as error:
            raise PeerLost(f"rank {self.rank} could not meet the others: {error}") from error
        self._group = dist.group.WORLD

    def bind_thread(self) -> None:
        """Makes this rank's device the thread's current one, for what is launched and recorded there."""
        if self._device is not None:
            import torch

            torch.cuda.set_device(self._device)

    def shard(self) -> Shard:
        from sgl_omni.engine.shard import Shard

        return Shard(self.rank, self.size, self.sum)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Adds up `x` over all ranks, in place, and returns it. On CUDA this is enqueued on the current stream and may
        be captured into a graph; all ranks get the same bits."""
        import torch.distributed as dist

        try:
            dist.all_reduce(x, group=self._group)
        except RuntimeError as error:
            raise PeerLost(f"rank {self.rank} could not sum a tensor of {tuple(x.shape)}: {error}") from error
        return x

    # The channel from rank 0 --------------------------------------------------------------------------------------

    def tell(self, command: Command, stage: str) -> None:
        """Rank 0: the others will do the same, in the order of these calls.

        Raises:
            PayloadError: a value cannot travel; nobody was told.
            GroupBroken: another rank is gone.
        """
        buffers: list[bytearray] = []

        def store(size: int) -> tuple[int, Any]:
            buffers.append(bytearray(size))
            return len(buffers) - 1, buffers[-1]

        if isinstance(command, Add | Extend):
            command = msgspec.structs.replace(command, payload=wire.pack(command.payload, stage, store))
        try:
            body = self._encoder.encode(command)
        except OverflowError as error:
            raise PayloadError(f"stage '{stage}': payload holds an integer of more than 64 bits") from error
        sizes = b"".join(len(buffer).to_bytes(8, "little") for buffer in buffers)
        head = _HEAD.pack(len(body), len(buffers)) + sizes
        parts: list[bytes | bytearray] = [head, *buffers, body] if buffers else [head + body]
        try:
            for sock in self._sockets:
                for part in parts:
                    sock.sendall(part)
        except OSError as error:
            lost(f"rank 0 cannot tell the other ranks: {error}", error)

    def next_command(self) -> Command:
        """Other ranks: waits for what rank 0 tells next. Raises `GroupBroken` where it is gone."""
        length, count = _HEAD.unpack(self._receive(_HEAD.size))
        sizes = self._receive(8 * count)
        buffers = [self._receive(int.from_bytes(sizes[8 * i : 8 * i + 8], "little")) for i in range(count)]

        def load(index: int, size: int) -> Bytes:
            return np.frombuffer(buffers[index], dtype=np.uint8)

        def unpack(code: int, data: memoryview) -> Any:
            return wire.unpack(code, data, load)

        command: Command = msgspec.msgpack.decode(self._receive(length), type=Command, ext_hook=unpack)
        return command

    def _receive(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            try:
                count = self._sockets[0].recv_into(view)
            except OSError as error:
                lost(f"the connection to rank 0 broke: {error}", error)
            if not count:
                lost("rank 0 is gone")
            view = view[count:]
        return data


def lost(reason: str, cause: BaseException | None = None) -> NoReturn:
    """Waits to be ended with the rank that failed; raises `GroupBroken` where nobody does so."""
    time.sleep(PEER_SECONDS)
    raise GroupBroken(reason) from cause


def seeded(payload: Payload, draw: int) -> Payload:
    """The payload as every rank gets it: one that leaves its seed to chance has one now."""
    return payload if payload.get("seed") is not None else {**payload, "seed": draw}
