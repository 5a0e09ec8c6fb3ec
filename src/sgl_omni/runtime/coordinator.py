"""Admits requests, binds them to replicas, and brings their results back. Lives in the API process."""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import re
from collections import Counter, deque
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field

from sgl_omni.errors import (
    DeadlineExceeded,
    InvalidRequest,
    OmniError,
    Overloaded,
    PipelineError,
    ProcessExited,
    RequestAborted,
    StageFailed,
)
from sgl_omni.runtime.channel import Channel
from sgl_omni.runtime.messages import (
    Abort,
    Binding,
    Cuts,
    Failure,
    Header,
    Message,
    Result,
    StreamAck,
    StreamChunk,
    Submit,
)
from sgl_omni.runtime.requests import ACK_EVERY
from sgl_omni.runtime.stage import Payload
from sgl_omni.runtime.wiring import Wiring
from sgl_omni.topology.plan import Plan, ProcessPlan

log = logging.getLogger("sgl_omni.coordinator")

DEFAULT_MAX_IN_FLIGHT = 256
DEFAULT_TIMEOUT = 600.0
_SAFE_ID = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk that a terminal stage streamed."""

    stage: str
    payload: Payload


class RequestHandle:
    """A request in flight: iterate over it for its chunks, await `result()` for its end.

    Chunks are buffered up to the stream window of each edge; a reader that stops reading stops the
    pipeline for this request and no other.
    """

    def __init__(self, coordinator: Coordinator, request: _InFlight) -> None:
        self._coordinator = coordinator
        self._request = request

    @property
    def id(self) -> str:
        return self._request.header.request_id

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self._chunks()

    async def _chunks(self) -> AsyncIterator[Chunk]:
        request = self._request
        request.streaming = True
        while True:
            while request.chunks:
                yield self._next_chunk()
            if request.error is not None:
                raise copy.copy(request.error)  # raised itself, it would hold the frames and buffers of its catchers
            if request.done:
                return
            await request.changed()

    async def result(self) -> dict[str, Payload]:
        """The payload of each terminal stage that the request reached. Chunks that nobody iterates over are dropped.

        Raises:
            InvalidRequest, StageFailed, ProcessExited, DeadlineExceeded, RequestAborted: why there is none.
        """
        request = self._request
        while not request.done:
            if not request.streaming:
                self._drop_chunks()
            await request.changed()
        if request.error is not None:
            raise copy.copy(request.error)
        return request.results

    def _next_chunk(self) -> Chunk:
        chunk, channel = self._request.chunks.popleft()
        self._coordinator.acknowledge(self._request, chunk.stage, channel)
        return chunk

    def _drop_chunks(self) -> None:
        while self._request.chunks:
            self._next_chunk()

    def abort(self, reason: str = "aborted by the caller") -> None:
        """Frees the request everywhere, at once; harmless after its end."""
        self._coordinator.abort(self._request, RequestAborted(f"request {self.id}: {reason}"), "aborted")


@dataclass(slots=True, eq=False)
class _InFlight:
    header: Header
    instances: tuple[str, ...]
    expected: set[str]
    cuts: Cuts
    chunks: deque[tuple[Chunk, Channel]] = field(default_factory=deque[tuple[Chunk, Channel]])
    results: dict[str, Payload] = field(default_factory=dict[str, Payload])
    consumed: dict[str, int] = field(default_factory=dict[str, int])
    error: OmniError | None = None
    done: bool = False
    streaming: bool = False
    timer: asyncio.TimerHandle | None = None
    waiters: list[asyncio.Future[None]] = field(default_factory=list[asyncio.Future[None]])

    async def changed(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self.waiters.append(waiter)
        await waiter

    def notify(self) -> None:
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class ReplicaPicker:
    """Chooses a replica of one Process among those that are up."""

    def __init__(self, process: ProcessPlan) -> None:
        self._process = process
        self._turn = 0

    def pick(self, up: list[int], in_flight: dict[int, int]) -> int:
        """Round robin over the replicas that are up, or the one with the fewest requests (ties in turn)."""
        turn = self._turn
        self._turn += 1
        ordered = sorted(up, key=lambda r: (r - turn) % self._process.num_replicas)
        if self._process.policy == "least_inflight":
            return min(ordered, key=lambda r: in_flight[r])
        return ordered[0]


class Coordinator:
    """The one owner of what is in flight. All methods belong to the event loop's thread."""

    def __init__(
        self, plan: Plan, *, max_in_flight: int = DEFAULT_MAX_IN_FLIGHT, timeout: float | None = DEFAULT_TIMEOUT
    ) -> None:
        self.wiring = Wiring(plan)
        self._plan = plan
        self._max_in_flight = max_in_flight
        self._timeout = timeout
        self._ids = itertools.count(1)
        self._requests: dict[str, _InFlight] = {}
        self._channels: dict[str, Channel] = {}
        self._pickers = {p.name: ReplicaPicker(p) for p in plan.processes if p.num_replicas > 1}
        self._replicas = {p.name: [i for i in plan.instances_of(p.name) if i.rank == 0] for p in plan.processes}
        self._refusing: str | None = "the server is starting"
        self._idle: asyncio.Event = asyncio.Event()
        self._idle.set()
        self.in_flight: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.late_messages = 0

    @property
    def pending(self) -> int:
        """Requests admitted and not finished."""
        return len(self._requests)

    # Admission ----------------------------------------------------------------------------------------------------

    def admit(self, refusal: str | None) -> None:
        """Opens the door (None), or closes it with the reason that callers are told."""
        self._refusing = refusal

    def submit(
        self,
        payload: Payload,
        *,
        outputs: Collection[str] | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
    ) -> RequestHandle:
        """Sends one request into the pipeline.

        Args:
            payload: for the entry stage.
            outputs: the terminal stages wanted; stages that lead to none of them are neither visited nor waited for.
            request_id: what the caller calls it; made unique by a suffix.
            timeout: seconds until it is aborted everywhere; the server's limit if None.

        Raises:
            Overloaded: the server is full, starting or stopping, or a Process it needs is down.
            InvalidRequest: unknown output.
            PayloadError: a value of the payload cannot travel.
        """
        if self._refusing is not None:
            raise self._overloaded(self._refusing)
        if len(self._requests) >= self._max_in_flight:
            raise self._overloaded(f"the server is full: {self._max_in_flight} requests are in flight")
        cuts = self._cuts(outputs)
        processes = self.wiring.processes_in(cuts)
        binding = self._bind(processes)
        instances = tuple(self._replicas[p][binding.get(p, 0)].name for p in processes)
        name = f"{_SAFE_ID.sub('_', request_id)[:128]}." if request_id else ""
        header = Header(f"{name}{next(self._ids)}", binding, cuts)
        request = _InFlight(header, instances, set(self.wiring.outputs_in(cuts)), cuts)
        entry = self.wiring.instance_of(self._plan.entry, binding)
        self._channels[entry].send_payload(Submit(header, "", self._plan.entry, payload), "client")
        self._requests[header.request_id] = request
        self._idle.clear()
        self.in_flight.update(instances)
        limit = self._timeout if timeout is None else timeout
        if limit is not None:
            request.timer = asyncio.get_running_loop().call_later(limit, self._expire, request, limit)
        return RequestHandle(self, request)

    def _overloaded(self, reason: str) -> Overloaded:
        self.outcomes["rejected"] += 1
        return Overloaded(reason)

    def _cuts(self, outputs: Collection[str] | None) -> Cuts:
        if outputs is None:
            return ()
        unknown = [o for o in outputs if o not in self.wiring.terminals]
        if unknown or not outputs:
            raise InvalidRequest(f"unknown output {unknown}; this pipeline gives {list(self.wiring.terminals)}")
        return self.wiring.cuts_for(frozenset(outputs))

    def _bind(self, processes: list[str]) -> Binding:
        """One replica for each replicated Process. Turns advance only when every Process has one that is up."""
        up = {p: [i.replica for i in self._replicas[p] if i.name in self._channels] for p in processes}
        down = next((p for p in processes if not up[p]), None)
        if down is not None:
            raise self._overloaded(f"process '{down}' is down and being restarted")
        return {
            p: self._pickers[p].pick(up[p], {i.replica: self.in_flight[i.name] for i in self._replicas[p]})
            for p in processes
            if p in self._pickers
        }

    # Endings ------------------------------------------------------------------------------------------------------

    def abort(self, request: _InFlight, error: OmniError, outcome: str) -> None:
        """Ends a request with an error and frees it in every instance that may hold state for it."""
        if request.done:
            return
        self._forget_everywhere(request)
        request.error = error
        request.chunks.clear()
        self._close(request, outcome)

    def _forget_everywhere(self, request: _InFlight) -> None:
        for name in request.instances:
            channel = self._channels.get(name)
            if channel is not None:
                channel.send(Abort(request.header.request_id))

    def abort_all(self, reason: str) -> None:
        for request in list(self._requests.values()):
            self.abort(request, RequestAborted(f"request {request.header.request_id}: {reason}"), "aborted")

    async def drained(self) -> None:
        """Returns when nothing is in flight."""
        await self._idle.wait()

    def _expire(self, request: _InFlight, limit: float) -> None:
        message = f"request {request.header.request_id} did not finish within {limit:g} s"
        self.abort(request, DeadlineExceeded(message), "error")

    def _close(self, request: _InFlight, outcome: str) -> None:
        request.done = True
        if request.timer is not None:
            request.timer.cancel()
        del self._requests[request.header.request_id]
        self.in_flight.subtract(request.instances)
        self.outcomes[outcome] += 1
        if not self._requests:
            self._idle.set()
        request.notify()

    # Instances ----------------------------------------------------------------------------------------------------

    def attach(self, instance: str, channel: Channel) -> None:
        """An instance is ready: it may be chosen from now on."""
        self._channels[instance] = channel

    def detach(self, instance: str, reason: str) -> None:
        """An instance is gone: the requests bound to it fail, and it is chosen no more."""
        self._channels.pop(instance, None)
        for request in [r for r in self._requests.values() if instance in r.instances]:
            stages = ", ".join(f"'{s}'" for s in self._plan.instance(instance).stages)
            error = ProcessExited(
                f"request {request.header.request_id} failed: instance '{instance}' (stage {stages}) {reason}",
                stage=self._plan.instance(instance).stages[0],
                instance=instance,
            )
            self.abort(request, error, "error")

    # Messages from instances --------------------------------------------------------------------------------------

    def receive(self, channel: Channel, message: Message) -> None:
        """Takes a Result, StreamChunk or Failure; what belongs to no request in flight is dropped and counted."""
        if isinstance(message, Failure):
            request = self._find(message.request_id)
            if request is not None:
                error = _error_of(message)
                self.abort(request, error, "invalid" if isinstance(error, InvalidRequest) else "error")
        elif isinstance(message, StreamChunk):
            request = self._find(message.header.request_id)
            if request is not None:
                request.chunks.append((Chunk(message.source, message.payload), channel))
                request.notify()
        elif isinstance(message, Result):
            request = self._find(message.header.request_id)
            if request is not None:
                self._take_result(request, message)

    def _find(self, request_id: str) -> _InFlight | None:
        request = self._requests.get(request_id)
        if request is None:
            self.late_messages += 1
        return request

    def _take_result(self, request: _InFlight, message: Result) -> None:
        request.results[message.stage] = message.payload
        if message.header.cuts != request.cuts:
            request.cuts = tuple(dict.fromkeys((*request.cuts, *message.header.cuts)))
            request.expected &= set(self.wiring.outputs_in(request.cuts))
        if request.expected <= request.results.keys():
            if request.cuts != request.header.cuts:
                self._forget_everywhere(request)  # a branch not taken may hold a stream that was begun
            self._close(request, "ok")

    def acknowledge(self, request: _InFlight, stage: str, channel: Channel) -> None:
        """The caller took one chunk of a terminal stage."""
        count = request.consumed.get(stage, 0) + 1
        if count == ACK_EVERY:
            channel.send(StreamAck(request.header.request_id, stage, "", count))
            count = 0
        request.consumed[stage] = count


def _error_of(failure: Failure) -> OmniError:
    if failure.kind == "invalid":
        return InvalidRequest(failure.message, failure.param)
    message = f"stage '{failure.stage}' ({failure.instance}) failed: {failure.message}"
    error: PipelineError = StageFailed(message, stage=failure.stage, instance=failure.instance)
    return error
