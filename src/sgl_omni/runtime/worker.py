"""One OS process of a pipeline: builds its stages, then moves messages between channels and runners.

Started by the supervisor as ``python -m sgl_omni.runtime.worker --fd N --name INSTANCE``; everything else comes in the
first message on that descriptor. The process ends when the channel does, or by signal when its parent dies.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import logging
import os
import socket
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sgl_omni.errors import InvalidRequest, OmniError, PayloadError
from sgl_omni.gpu.device_memory import DeviceMemory, HostMemory
from sgl_omni.parent import die_with_parent
from sgl_omni.runtime.blocks import Device
from sgl_omni.runtime.build import build_runner, enforce_budgets
from sgl_omni.runtime.channel import Channel
from sgl_omni.runtime.engine_runner import EngineRunner
from sgl_omni.runtime.messages import (
    Abort,
    Failure,
    GroupLink,
    Header,
    Hello,
    Message,
    Ready,
    Result,
    Spawn,
    StartFailed,
    Stats,
    StatsQuery,
    Stop,
    StreamAck,
    StreamChunk,
    StreamEnd,
    Submit,
)
from sgl_omni.runtime.requests import StageRequest
from sgl_omni.runtime.runners import Runner
from sgl_omni.runtime.segments import Allowance, machine_share
from sgl_omni.runtime.stage import Payload
from sgl_omni.runtime.tp import PEER_SECONDS, PeerLost, Ranks
from sgl_omni.runtime.tp_engine import FollowingRunner
from sgl_omni.runtime.wiring import Wiring, cut_others, load_object
from sgl_omni.topology.plan import StagePlan

if TYPE_CHECKING:
    from sgl_omni.gpu.weights.share import SharedWeights

log = logging.getLogger("sgl_omni.worker")

TOMBSTONE_SECONDS = 5.0
"""How long an aborted request's id is remembered, so that a message already on its way to us is dropped."""

START_THRESHOLD = 50_000
"""New objects between two collections until the stages are built. What is imported stays, and to look it through every
700 objects takes a tenth of the processor time of importing torch."""


class Worker:
    """The state of this process. It is the `Host` of every request in it."""

    def __init__(self, control: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._allowance = Allowance(machine_share())
        self._control = Channel(
            control, self._on_control, self._on_control_closed, name="coordinator", allowance=self._allowance
        )
        self._spawn: asyncio.Future[Spawn] = self._loop.create_future()
        self._stop: asyncio.Future[int] = self._loop.create_future()
        self._peers: dict[str, Channel] = {}
        self._incoming: set[Channel] = set()
        self._runners: dict[str, Runner] = {}
        self._routes: dict[str, Any] = {}
        self._merges: dict[str, Any] = {}
        self._shared: dict[str, dict[str, Any]] = {}
        self._active: dict[str, dict[str, StageRequest]] = {}
        self._tombstones: dict[str, float] = {}
        self._late = 0

    # Life of the process ------------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Builds the stages, reports ready, serves until told to stop; returns the exit status."""
        usual = gc.get_threshold()
        gc.set_threshold(START_THRESHOLD)
        spawn = await self._spawn
        self._plan = spawn.plan
        self._instance = spawn.plan.instance(spawn.instance)
        self._run_dir = Path(spawn.run_dir)
        self._wiring = Wiring(spawn.plan)
        self._by_host = frozenset(spawn.by_host)
        self._own_device = spawn.device
        self._device = self._make_device()
        sys.path.extend(path for path in spawn.sys_path if path not in sys.path)
        if self._instance.cpu_cores:
            os.sched_setaffinity(0, self._instance.cpu_cores)
        if self._instance.device is not None and spawn.plan.platform == "cuda":
            from sgl_omni.gpu.torch_setup import set_up_torch  # here, as torch's seconds are not a factory's

            set_up_torch(self._local_device() if self._instance.mps else None)
        started = time.monotonic()
        enforce_budgets(spawn.plan, self._instance, self._local_device())
        stage = ""
        try:
            for stage in self._instance.stages:
                self._build(self._wiring.stages[stage], spawn.group)
            built = time.monotonic()
            if spawn.plan.platform == "cuda":
                for stage in self._instance.stages:  # not before all are built: an engine counts what is held by then
                    self._runners[stage].rehearse()
            rehearsed = time.monotonic() - built
        except Exception as error:  # noqa: BLE001 - reported to the supervisor
            if isinstance(error, PeerLost):
                await asyncio.sleep(PEER_SECONDS)  # the rank that failed first is to be reported first
            on_purpose = isinstance(error, OmniError)
            message, trace = (str(error), "") if on_purpose else (repr(error), traceback.format_exc())
            self._control.send(StartFailed(self._instance.name, stage, message, trace))
            self._control.flush()
            return 1
        # What was built stays: without it, a full collection stops an engine's thread for 100 ms and more.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*usual)
        listener = self._listen() if self._instance.rank == 0 else None
        self._control.send(Ready(self._instance.name, self._facts(time.monotonic() - started, rehearsed)))
        status = await self._stop
        if listener is not None:
            self._loop.remove_reader(listener.fileno())
            listener.close()
        for runner in self._runners.values():
            runner.close()
        return status

    def _build(self, stage: StagePlan, link: GroupLink | None) -> None:
        device = self._local_device() if stage.gpu else None
        weights = self._shared_weights(stage) if stage.gpu and self._instance.weight_role != "own" else None
        ranks = None if link is None else self._join(link)
        self._runners[stage.name] = build_runner(stage, self._plan, device, weights, ranks)
        if weights is not None and (stage.engine is not None or weights.facts is not None):
            self._shared[stage.name] = weights.describe()
            if self._instance.weight_role == "leader":  # the group's weights count once, against its leader's budget
                held = sum(int(model["bytes"]) for model in self._shared.values())
                enforce_budgets(self._plan, self._instance, device, held)
        if stage.route_fn:
            self._routes[stage.name] = load_object(stage.route_fn)
        if stage.merge_fn:
            self._merges[stage.name] = load_object(stage.merge_fn)

    def _join(self, link: GroupLink) -> Ranks:
        size = self._plan.process(self._instance.process).tp_size
        device = self._local_device() if self._plan.platform == "cuda" else None
        ranks = Ranks(self._instance.rank, size, link, device)
        ranks.join()
        return ranks

    def _shared_weights(self, stage: StagePlan) -> SharedWeights:
        from sgl_omni.gpu.weights.exchange import Exchange
        from sgl_omni.gpu.weights.share import SharedWeights  # with torch, which not every stage needs

        role = self._instance.weight_role
        return SharedWeights(
            stage.name,
            Exchange(self._run_dir),
            may_load=role == "leader",
            borrows=role == "borrower",
            lends=self._plan.lends_weights,
        )

    def _make_device(self) -> Device | None:
        """Device memory for tensors on their way, where the plan lets edges of this instance use it."""
        stages = self._instance.stages
        if self._instance.device is None or not any(s in stages for edge in self._wiring.by_device for s in edge):
            return None
        limit = sum(self._wiring.stages[name].transport_bytes for name in stages)
        return Device(HostMemory if self._plan.platform == "cpu" else self._gpu_memory, limit)

    def _gpu_memory(self) -> DeviceMemory:
        from sgl_omni.gpu.cuda_blocks import device_memory  # with torch

        ordinal = self._local_device()
        assert ordinal is not None
        return device_memory(ordinal)

    def _local_device(self) -> int | None:
        """This instance's GPU as its process numbers it."""
        return self._own_device

    def _facts(self, seconds: float, rehearsed: float) -> dict[str, Any]:
        engines = {n: r.gauges() for n, r in self._runners.items() if isinstance(r, EngineRunner | FollowingRunner)}
        weights = {"role": self._instance.weight_role, "models": self._shared}
        return {
            "pid": os.getpid(),
            "build_seconds": round(seconds, 3),
            "rehearsal_seconds": round(rehearsed, 3),
            "engines": engines,
            "weights": weights,
        }

    def _listen(self) -> socket.socket:
        path = socket_path(self._run_dir, self._plan.instances.index(self._instance))
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        listener.bind(str(path))
        listener.listen(128)
        self._loop.add_reader(listener.fileno(), self._accept, listener)
        return listener

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        self._incoming.add(
            Channel(sock, self._on_peer, self._on_peer_closed, device=self._device, allowance=self._allowance)
        )

    def _exit(self, status: int) -> None:
        if not self._stop.done():
            self._stop.set_result(status)

    # Messages in --------------------------------------------------------------------------------------------------

    def _on_control(self, channel: Channel, message: Message) -> None:
        if isinstance(message, Abort):
            self._abort(message.request_id)
        elif isinstance(message, Spawn):
            self._spawn.set_result(message)
        elif isinstance(message, StatsQuery):
            channel.send(Stats(self._instance.name, self._gauges()))
        elif isinstance(message, Stop):
            self._exit(0)
        else:
            self._on_peer(channel, message)

    def _on_control_closed(self, channel: Channel, reason: str) -> None:
        if reason:
            log.error("the connection to the server broke: %s", reason)
        self._exit(1)
        self._spawn.cancel()

    def _on_peer(self, channel: Channel, message: Message) -> None:
        if isinstance(message, Submit):
            self._take_payload(message.header, message.source, message.target, message.payload)
        elif isinstance(message, StreamChunk):
            self._take_chunk(message.header, message.source, message.target, message.payload, channel)
        elif isinstance(message, StreamEnd):
            self._take_end(message.header, message.source, message.target)
        elif isinstance(message, StreamAck):
            self._take_ack(message.request_id, message.source, message.target, message.count)
        elif isinstance(message, Hello):
            channel.name = message.instance

    def _on_peer_closed(self, channel: Channel, reason: str) -> None:
        """A peer's end is the supervisor's affair; a stream that cannot be read is a fault of our own."""
        self._incoming.discard(channel)
        if self._peers.get(channel.name) is channel:
            del self._peers[channel.name]
        if reason:
            log.error("the connection to '%s' broke: %s", channel.name or "?", reason)
            self._exit(1)

    def _request(self, header: Header, stage: str) -> StageRequest | None:
        """The request in `stage`, made at its first message; None if it was aborted."""
        if header.request_id in self._tombstones:
            self._late += 1
            return None
        stages = self._active.setdefault(header.request_id, {})
        request = stages.get(stage)
        if request is None:
            request = stages[stage] = StageRequest(self, header, stage)
        elif header.cuts != request.header.cuts:
            cuts = tuple(dict.fromkeys((*request.header.cuts, *header.cuts)))
            request.header = msgspec.structs.replace(request.header, cuts=cuts)
        return request

    def _take_payload(self, header: Header, source: str, target: str, payload: Payload) -> None:
        request = self._request(header, target)
        if request is None:
            return
        stage = self._wiring.stages[target]
        if stage.wait_for:
            request.inputs[source] = payload
            if not self._wiring.inputs_of(stage, request.header.cuts) <= request.inputs.keys():
                return
            inputs, request.inputs = request.inputs, {}
            try:
                payload = self._merges[target](inputs) if target in self._merges else next(iter(inputs.values()))
            except Exception as error:  # noqa: BLE001 - the author's code failed for this request alone
                self.fail(request, error)
                return
        self._runners[target].submit(request, payload)

    def _take_chunk(self, header: Header, source: str, target: str, chunk: Payload, channel: Channel | None) -> None:
        request = self._request(header, target)
        if request is None:
            return
        if channel is not None:
            request.channels[source] = channel
        self._runners[target].chunk(request, source, chunk)

    def _take_end(self, header: Header, source: str, target: str) -> None:
        request = self._request(header, target)
        if request is None:
            return
        request.ended_streams.add(source)
        if not self.open_streams(request):
            self._runners[target].end(request)

    def _take_ack(self, request_id: str, source: str, target: str, count: int) -> None:
        request = self._active.get(request_id, {}).get(source)
        if request is not None:
            request.acknowledged(target, count)

    def _refuse_from_now(self, request_id: str) -> None:
        """Messages of this request that are already on their way are dropped when they arrive."""
        if not self._tombstones:
            self._loop.call_later(TOMBSTONE_SECONDS, self._bury)
        self._tombstones.setdefault(request_id, self._loop.time() + TOMBSTONE_SECONDS)

    def _abort(self, request_id: str) -> None:
        self._refuse_from_now(request_id)
        for request in list(self._active.get(request_id, {}).values()):
            if not request.aborted:
                request.mark_aborted()
                self._runners[request.stage].abort(request)

    def _bury(self) -> None:
        """Forgets ids whose time is up, oldest first."""
        now = self._loop.time()
        for request_id, expiry in list(self._tombstones.items()):
            if expiry > now:
                self._loop.call_at(expiry, self._bury)
                break
            del self._tombstones[request_id]

    # The host of requests -----------------------------------------------------------------------------------------

    def stream_targets(self, request: StageRequest) -> list[str]:
        stage = self._wiring.stages[request.stage]
        if not stage.stream_to and not stage.terminal:
            raise PayloadError(f"stage '{stage.name}' streams a chunk but has no `stream_to` and is not terminal")
        return self._wiring.stream_targets(stage, request.header.cuts) + ([""] if stage.terminal else [])

    def has_room(self, request: StageRequest, chunk: Payload, wake: Callable[[], None]) -> bool:
        """Whether the chunk's tensors need not wait for device memory."""
        if self._device is None:
            return True
        stage = self._wiring.stages[request.stage]
        targets = self._wiring.stream_targets(stage, request.header.cuts)
        return self._has_room(request, request.header, targets, chunk, wake)

    def release_room(self, request: StageRequest) -> None:
        for channel in self._peers.values() if self._device is not None else ():
            channel.release(request)

    def send_chunk(self, request: StageRequest, target: str, chunk: Payload) -> None:
        instance = self._wiring.instance_of(target, request.header.binding) if target else ""
        if instance == self._instance.name:
            self._take_chunk(request.header, request.stage, target, chunk, None)
            return
        message = StreamChunk(request.header, request.stage, target, chunk)
        by_device = self._by_device(request.stage, target, instance)
        self._channel(instance).send_payload(message, request.stage, by_device=by_device, holder=request)

    def send_ack(self, request: StageRequest, source: str, count: int) -> None:
        channel = request.channels.get(source)
        if channel is None:
            self._take_ack(request.id, source, request.stage, count)
        else:
            channel.send(StreamAck(request.id, source, request.stage, count))

    def open_streams(self, request: StageRequest) -> set[str]:
        return self._wiring.streams_into(request.stage, request.header.cuts) - request.ended_streams

    def expects_payload(self, request: StageRequest) -> bool:
        return self._wiring.has_payload_input(request.stage, request.header.cuts)

    def finish(self, request: StageRequest, payload: Payload) -> None:
        if request.aborted:
            self.discard(request)
            return
        try:
            header = self._routed(self._wiring.stages[request.stage], request, payload)
        except Exception as error:  # noqa: BLE001 - the author's route_fn
            self.fail(request, error)
            return
        self._hand_on(request, header, payload)

    def _hand_on(self, request: StageRequest, header: Header, payload: Payload) -> None:
        """Ends the request here, now or when there is room for the payload's tensors."""
        if request.aborted:
            self.discard(request)
            return
        stage = self._wiring.stages[request.stage]
        targets = self._wiring.targets(stage, header.cuts)
        again = functools.partial(self._hand_on, request, header, payload)
        if not self._has_room(request, header, targets, payload, again):
            return
        try:
            for target in self._wiring.stream_targets(stage, header.cuts):
                self._send_end(header, stage.name, target)
            for target in targets:
                self._send_payload(request, header, target, payload)
            if stage.terminal:
                self._control.send_payload(Result(header, stage.name, payload), stage.name)
        except Exception as error:  # noqa: BLE001 - a payload that cannot travel, or a receiver that is gone
            self.fail(request, error)
            return
        self.discard(request)

    def fail(self, request: StageRequest, error: Exception) -> None:
        if not request.aborted:
            invalid = isinstance(error, InvalidRequest)
            if not invalid:
                trace = None if isinstance(error, OmniError) else error  # what is raised on purpose says all
                log.error("stage '%s' failed for request %s: %s", request.stage, request.id, error, exc_info=trace)
            text = describe(error)
            kind, param = ("invalid", error.param) if isinstance(error, InvalidRequest) else ("error", None)
            param = None if param is None else str(param)
            self._control.send(Failure(request.id, request.stage, self._instance.name, kind, text, param))
            self._refuse_from_now(request.id)
        _forget_frames(error)
        self.discard(request)

    def discard(self, request: StageRequest) -> None:
        self.release_room(request)
        stages = self._active.get(request.id)
        if stages is not None and stages.get(request.stage) is request:
            del stages[request.stage]
            if not stages:
                del self._active[request.id]

    def _routed(self, stage: StagePlan, request: StageRequest, payload: Payload) -> Header:
        """The header that goes on: where the stage routes, the edges not taken are cut."""
        if stage.name not in self._routes:
            return request.header
        chosen = self._routes[stage.name](request.id, payload)
        names = [chosen] if isinstance(chosen, str) else list(chosen)
        unknown = [name for name in names if name not in stage.next]
        if unknown or not names:
            raise ValueError(f"route_fn chose {unknown or 'nothing'}; stage '{stage.name}' leads to {list(stage.next)}")
        return msgspec.structs.replace(request.header, cuts=cut_others(stage, names, request.header.cuts))

    def _send_payload(self, request: StageRequest, header: Header, target: str, payload: Payload) -> None:
        instance, source = self._wiring.instance_of(target, header.binding), request.stage
        if instance == self._instance.name:
            self._take_payload(header, source, target, payload)
        else:
            by_device = self._by_device(source, target, instance)
            message = Submit(header, source, target, payload)
            self._channel(instance).send_payload(message, source, by_device=by_device, holder=request)

    def _send_end(self, header: Header, source: str, target: str) -> None:
        instance = self._wiring.instance_of(target, header.binding)
        if instance == self._instance.name:
            self._take_end(header, source, target)
        else:
            self._channel(instance).send(StreamEnd(header, source, target))

    def _has_room(
        self,
        request: StageRequest,
        header: Header,
        targets: Iterable[str],
        payload: Payload,
        wake: Callable[[], None],
    ) -> bool:
        """Of each receiver in the order of their names, so that no two requests wait for what the other has."""
        if self._device is None:
            return True
        instances = [(target, self._wiring.instance_of(target, header.binding)) for target in targets]
        times = Counter(
            instance
            for target, instance in instances
            if instance != self._instance.name and self._by_device(request.stage, target, instance)
        )
        try:
            return all(
                self._channel(instance).has_room(request, payload, wake, count)
                for instance, count in sorted(times.items())
            )
        except Exception:  # noqa: BLE001 - a receiver that is gone, or what cannot travel: to be told where it is sent
            return True

    def _by_device(self, source: str, target: str, instance: str) -> bool:
        return (source, target) in self._wiring.by_device and instance not in self._by_host

    def _channel(self, instance: str) -> Channel:
        """The channel to an instance ("" is the coordinator), connected at its first use."""
        if not instance:
            return self._control
        channel = self._peers.get(instance)
        if channel is None:
            index = next(i for i, p in enumerate(self._plan.instances) if p.name == instance)
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.connect(str(socket_path(self._run_dir, index)))
            except OSError as error:
                sock.close()
                raise ConnectionError(f"cannot reach instance '{instance}': {error}") from error
            channel = self._peers[instance] = Channel(
                sock,
                self._on_peer,
                self._on_peer_closed,
                name=instance,
                device=self._device,
                allowance=self._allowance,
            )
            channel.send(Hello(self._instance.name))
        return channel

    # Statistics ---------------------------------------------------------------------------------------------------

    def _gauges(self) -> dict[str, float]:
        channels = [self._control, *self._peers.values(), *self._incoming]
        gauges: dict[str, float] = {
            "requests": len(self._active),
            "aborted_ids": len(self._tombstones),
            "late_messages": self._late,
            "shm_segments_out": sum(c.leased_out for c in channels),
            "shm_segments_in": sum(c.leased_in for c in channels),
            "shm_bytes": sum(c.mapped_bytes for c in channels),
            "shm_limit_bytes": self._allowance.limit,
            "shm_refused_total": self._allowance.refused,
            "device_blocks_out": sum(c.blocks_out for c in channels),
            "device_bytes": sum(c.device_bytes for c in channels),
            "device_sent_total": self._device.sent if self._device is not None else 0,
            "device_sent_bytes_total": self._device.sent_bytes if self._device is not None else 0,
            "device_limit_bytes": self._device.allowance.limit if self._device is not None else 0,
        }
        for stage, runner in self._runners.items():
            gauges |= {f"{stage}.{key}": value for key, value in runner.gauges().items()}
        return gauges


def describe(error: Exception) -> str:
    """What the caller is told: the message, with its type where that is not our own; whatever the author put in it."""
    try:
        text = str(error)
    except Exception as failure:  # noqa: BLE001 - an author's __str__
        text = f"(its text cannot be had: {type(failure).__name__})"
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if isinstance(error, (InvalidRequest, PayloadError)) else f"{type(error).__name__}: {text}"


def _forget_frames(error: BaseException | None) -> None:
    """An error that a frame holds and whose traceback holds the frame is a cycle: without this, the buffers in the
    frame's variables would stay with us until the garbage collector happens to run."""
    while error is not None:
        error.__traceback__ = None
        error = error.__context__


def socket_path(run_dir: Path, index: int) -> Path:
    """Numbered, not named: an instance's name may be longer than a socket address."""
    return run_dir / f"{index}.sock"


def main() -> None:
    parser = argparse.ArgumentParser(prog="sgl-omni worker")
    parser.add_argument("--fd", type=int, required=True, help="connected unix socket to the server")
    parser.add_argument("--parent", type=int, required=True, help="pid of the server")
    parser.add_argument("--name", required=True, help="instance name, shown by ps")
    options = parser.parse_args()
    die_with_parent(options.parent)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)

    async def serve() -> int:
        return await Worker(socket.socket(fileno=options.fd)).run()

    import uvloop

    status = uvloop.run(serve())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads of stages that are still at work must not delay the end


if __name__ == "__main__":
    main()
