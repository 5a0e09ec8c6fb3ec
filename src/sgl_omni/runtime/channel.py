"""One connection between two processes: framed messages, with bulk values in shared memory beside it.

Sends are buffered and leave together at the end of the event loop's turn, so a busy process pays one system call
for many messages; an idle one pays nothing. All methods belong to the event loop's thread.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

import msgspec

from sgl_omni.errors import PayloadError
from sgl_omni.runtime import payload as wire
from sgl_omni.runtime.blocks import BlockPool, Device, OpenedBlocks
from sgl_omni.runtime.messages import (
    AnyMessage,
    BlockAnswer,
    BlockOffer,
    BlocksGone,
    BlocksRead,
    Forget,
    Message,
    Release,
    Result,
    Segment,
    StreamChunk,
    Submit,
)
from sgl_omni.runtime.segments import Allowance, Bytes, SegmentPool, SegmentViews

LENGTH_BYTES = 4
MAX_FRAME = 256 * 1024 * 1024
READ_BUFFER = 256 * 1024
READ_AT_LEAST = 64 * 1024
MAX_DESCRIPTORS = 64
_ANCILLARY = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)

OnMessage = Callable[["Channel", Message], None]
OnClose = Callable[["Channel", str], None]


class Channel:
    """A framed, bidirectional message stream over a connected unix stream socket.

    `on_close(channel, reason)` is called once, with reason "" when the peer closed or died. `device`: this process's
    device memory, where tensors may come and go by it. `allowance`: what shared memory all its channels may take.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_message: OnMessage,
        on_close: OnClose,
        *,
        name: str = "",
        device: Device | None = None,
        allowance: Allowance | None = None,
    ) -> None:
        sock.setblocking(False)
        self.name = name
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._on_message = on_message
        self._on_close = on_close
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(AnyMessage, ext_hook=self._unpack_value)
        self._out: deque[tuple[bytearray, int | None]] = deque()
        self._flush_scheduled = False
        self._writing = False
        self._in = bytearray(READ_BUFFER)
        self._start = self._end = 0
        self._descriptors: deque[int] = deque()
        self._pool = SegmentPool(allowance)
        self._views = SegmentViews(self._dropped)
        self._released: list[int] = []
        self._blocks = None if device is None else BlockPool(device, self._offer, self._forget_block, lambda: self.name)
        self._opened = OpenedBlocks(device)
        self._blocks_read: list[int] = []
        self.closed = False
        self._loop.add_reader(sock.fileno(), self._readable)

    @property
    def leased_out(self) -> int:
        """Segments that the peer holds."""
        return self._pool.leased

    @property
    def leased_in(self) -> int:
        """The peer's segments that this process still refers to."""
        return self._views.leased

    @property
    def mapped_bytes(self) -> int:
        """Shared memory that this process keeps for sending."""
        return self._pool.mapped_bytes

    @property
    def blocks_out(self) -> int:
        """Blocks of device memory that the peer has yet to read."""
        return self._blocks.leased if self._blocks is not None else 0

    @property
    def device_bytes(self) -> int:
        """Device memory that this process keeps for sending."""
        return self._blocks.held_bytes if self._blocks is not None else 0

    def send(self, message: Message) -> None:
        """Queues one message that holds no payload. Dropped when the channel is closed: whoever supervises the
        peer knows that it is gone."""
        if not self.closed:
            self._append(message)

    def send_payload(
        self,
        message: Submit | StreamChunk | Result,
        stage: str,
        *,
        by_device: bool = False,
        holder: Hashable = None,
    ) -> None:
        """Queues one message with a payload given by `stage`; with `by_device` its tensors may go by device memory,
        in what is reserved for `holder`.

        Raises:
            PayloadError: a value cannot travel; nothing was queued.
        """
        if self.closed:
            return
        taken: list[int] = []
        filled: list[int] = []

        def fill(tensor: Any) -> int | None:
            block = self._blocks.fill(tensor, holder) if self._blocks is not None else None
            if block is not None:
                filled.append(block)
            return block

        def store(size: int) -> tuple[int, Any]:
            segment, buffer, fd = self._take(size, stage)
            taken.append(segment)
            if fd is not None:
                self._append(Segment(segment, len(buffer)), fd)
            return segment, buffer

        try:
            packed = wire.pack(message.payload, stage, store, fill if by_device else None)
            self._append(msgspec.structs.replace(message, payload=packed))
        except BaseException as error:
            for block in filled:
                assert self._blocks is not None
                self._blocks.give_back(block)
            for segment in taken:
                self._take_back(segment)
            if isinstance(error, OverflowError):
                raise PayloadError(f"stage '{stage}': payload holds an integer of more than 64 bits") from error
            raise

    def has_room(self, holder: Hashable, payload: dict[str, Any], wake: Callable[[], None], times: int = 1) -> bool:
        """Whether its tensors, sent so many times, can go by device memory now, or waiting would not help.

        Then blocks are reserved for `holder` until `release`; else `wake` is called, once and from the event loop, when
        they are.
        """
        if self.closed or self._blocks is None:
            return True
        tensors = [*wire.tensors(payload)] * times

        def wake_soon() -> None:
            self._loop.call_soon(wake)

        return self._blocks.room(holder, tensors, wake_soon)

    def release(self, holder: Hashable) -> None:
        """Gives up what is reserved for a holder, or its wait; harmless where there is neither."""
        if self._blocks is not None and not self.closed:
            self._blocks.release(holder)

    def _take(self, size: int, stage: str) -> tuple[int, Any, int | None]:
        """A segment, for which free ones of other sizes are given up where it needs their memory."""
        try:
            return self._pool.take(size)
        except MemoryError:
            dropped = self._pool.shrink()
        if dropped:
            self._append(Forget(dropped))
        try:
            return self._pool.take(size)
        except MemoryError as error:
            raise PayloadError(
                f"stage '{stage}': no shared memory for {size} bytes of its payload: {error}; receivers hold them"
            ) from error

    def close(self, reason: str = "") -> None:
        """Closes at once; unsent messages are lost, segments freed."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._sock.fileno())
        if self._writing:
            self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        for _, fd in self._out:
            if fd is not None:
                os.close(fd)
        for fd in self._descriptors:
            os.close(fd)
        self._out.clear()
        self._descriptors.clear()
        self._pool.close()
        self._views.close()
        if self._blocks is not None:
            self._blocks.close()
        self._opened.close()
        self._on_close(self, reason)

    def flush(self) -> None:
        """Writes what the socket takes now; the rest follows when it is writable."""
        self._flush_scheduled = False
        if self.closed:
            return
        if self._released:
            released, self._released = self._released, []
            self._append(Release(released))
        if self._blocks_read:
            read, self._blocks_read = self._blocks_read, []
            self._append(BlocksRead(read))
        try:
            while self._out:
                data, fd = self._out[0]
                sent = self._sock.send(data) if fd is None else self._send_with(data, fd)
                if sent < len(data):
                    del data[:sent]
                    self._out[0] = (data, None)
                    continue
                self._out.popleft()
        except BlockingIOError:
            if not self._writing:
                self._writing = True
                self._loop.add_writer(self._sock.fileno(), self.flush)
            return
        except OSError as error:
            self.close("" if isinstance(error, (BrokenPipeError, ConnectionResetError)) else str(error))
            return
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._sock.fileno())

    def _send_with(self, data: bytearray, fd: int) -> int:
        sent = self._sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
        os.close(fd)
        return sent

    def _append(self, message: Message, fd: int | None = None) -> None:
        if fd is not None or not self._out or self._out[-1][1] is not None:
            self._out.append((bytearray(), fd))
        data = self._out[-1][0]
        start = len(data)
        data += b"\0\0\0\0"
        try:
            self._encoder.encode_into(message, data, start + LENGTH_BYTES)
            if len(data) - start - LENGTH_BYTES > MAX_FRAME:
                size = len(data) - start - LENGTH_BYTES
                raise PayloadError(f"a message of {size} bytes beside its arrays; {MAX_FRAME} is the limit")
        except BaseException:
            del data[start:]
            raise
        data[start : start + LENGTH_BYTES] = (len(data) - start - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little")
        self._schedule_flush()

    def _schedule_flush(self) -> None:
        if not self._flush_scheduled and not self._writing:
            self._flush_scheduled = True
            self._loop.call_soon(self.flush)

    def _readable(self) -> None:
        try:
            count, ancillary, _, _ = self._sock.recvmsg_into(
                [memoryview(self._in)[self._end :]], _ANCILLARY, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError as error:
            self.close("" if isinstance(error, ConnectionResetError) else str(error))
            return
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors = array.array("i")
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
                self._descriptors.extend(descriptors)
        if count == 0:
            self.close()
            return
        self._end += count
        self._parse()

    def _parse(self) -> None:
        view = memoryview(self._in)
        while not self.closed and self._end - self._start >= LENGTH_BYTES:
            body = self._start + LENGTH_BYTES
            length = int.from_bytes(view[self._start : body], "little")
            if length > MAX_FRAME:
                self.close(f"a frame of {length} bytes")
                return
            if self._end < body + length:
                view.release()
                self._make_room(LENGTH_BYTES + length)
                return
            self._start = body + length
            try:
                message = self._decoder.decode(view[body : body + length])
            except (msgspec.MsgspecError, PayloadError, KeyError, ValueError) as error:
                self.close(f"a frame that cannot be read: {error}")
                return
            self._handle(message)
        view.release()
        if self._start == self._end:
            self._start = self._end = 0
        else:
            self._make_room(READ_AT_LEAST)

    def _handle(self, message: Message) -> None:
        if isinstance(message, Segment):
            self._views.map(message.segment, message.size, self._descriptors.popleft())
        elif isinstance(message, Release):
            for segment in message.segments:
                self._take_back(segment)
        elif isinstance(message, Forget):
            for segment in message.segments:
                self._views.forget(segment)
        elif isinstance(message, BlockOffer):
            refusal = self._opened.open(message.block, message.size, self._descriptors.popleft())
            self._append(BlockAnswer(message.block, refusal))
        elif isinstance(message, BlocksGone):
            for block in message.blocks:
                self._opened.forget(block)
        elif isinstance(message, BlockAnswer | BlocksRead):
            self._take_blocks_back(message)
        else:
            self._on_message(self, message)

    def _make_room(self, needed: int) -> None:
        """Moves the unread bytes to the front, and grows the buffer if a frame is larger than it."""
        if len(self._in) - self._start >= needed and len(self._in) - self._end >= READ_AT_LEAST:
            return
        unread = self._in[self._start : self._end]
        size = max(READ_BUFFER, needed + READ_AT_LEAST)
        if size != len(self._in):
            self._in = bytearray(size)
        self._in[: len(unread)] = unread
        self._start, self._end = 0, len(unread)

    def _take_back(self, segment: int) -> None:
        if not self._pool.give_back(segment):
            self._append(Forget([segment]))

    def _offer(self, block: int, size: int, fd: int) -> None:
        self._append(BlockOffer(block, size), fd)

    def _forget_block(self, block: int) -> None:
        self._append(BlocksGone([block]))

    def _take_blocks_back(self, message: BlockAnswer | BlocksRead) -> None:
        if self._blocks is None:
            self.close("an answer about device memory where there is none")
        elif isinstance(message, BlockAnswer):
            self._blocks.answered(message.block, message.refusal)
        else:
            for block in message.blocks:
                self._blocks.give_back(block)

    def _unpack_value(self, code: int, data: memoryview) -> Any:
        return wire.unpack(code, data, self._load, self._read_block)

    def _read_block(self, block: int, dtype: Any, shape: tuple[int, ...]) -> Any:
        """A copy of this process's own, so the block is the sender's again at once."""
        tensor = self._opened.read(block, dtype, shape)
        self._blocks_read.append(block)
        self._schedule_flush()
        return tensor

    def _load(self, segment: int, size: int) -> Bytes:
        return self._views.view(segment, size)

    def _dropped(self, segment: int) -> None:
        """Called from whichever thread drops the last view."""
        if threading.get_ident() == self._thread:
            self._note_dropped(segment)
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._note_dropped, segment)

    def _note_dropped(self, segment: int) -> None:
        if not self.closed:
            self._released.append(segment)
            self._schedule_flush()
