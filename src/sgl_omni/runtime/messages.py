"""Everything that processes say to each other, as msgspec structs.

One frame on a channel is a 4-byte little-endian length and one of these, encoded as a msgpack array whose
first element is the tag. The header of a request's message (`request_id`, `binding`, `cuts`) never changes
except that a routing stage adds to `cuts`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sgl_omni.topology.plan import Plan

Binding = dict[str, int]
"""Replicated Process name -> replica index, chosen at admission."""

Cuts = tuple[tuple[str, str], ...]
"""Edges (source, target) that this request will not take."""


class Message(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Base of every message."""


class Header(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What rides every message of a request."""

    request_id: str
    binding: Binding
    cuts: Cuts


class Submit(Message, tag=1, frozen=True):
    """A payload for one stage; `source` is "" from the coordinator."""

    header: Header
    source: str
    target: str
    payload: Any


class StreamChunk(Message, tag=2, frozen=True):
    """One chunk of a stream; `target` is "" towards the client."""

    header: Header
    source: str
    target: str
    payload: Any


class StreamEnd(Message, tag=3, frozen=True):
    """No further chunk comes from `source`."""

    header: Header
    source: str
    target: str


class StreamAck(Message, tag=4, frozen=True):
    """The receiver consumed `count` chunks, so the sender may send as many more."""

    request_id: str
    source: str
    target: str
    count: int


class Result(Message, tag=5, frozen=True):
    """A terminal stage's payload for the coordinator."""

    header: Header
    stage: str
    payload: Any


class Failure(Message, tag=6, frozen=True):
    """A request failed in a stage. `kind` is "invalid" (the caller's input) or "error"."""

    request_id: str
    stage: str
    instance: str
    kind: str
    message: str
    param: str | None = None


class Abort(Message, tag=7, frozen=True):
    """Free everything held for the request; idempotent."""

    request_id: str


class Segment(Message, tag=8, frozen=True):
    """Announces a shared-memory segment whose descriptor rides with this frame."""

    segment: int
    size: int


class Release(Message, tag=9, frozen=True):
    """The receiver has dropped these segments; they are the sender's again."""

    segments: list[int]


class Forget(Message, tag=16, frozen=True):
    """The sender has unmapped these segments for good."""

    segments: list[int]


class BlockOffer(Message, tag=18, frozen=True):
    """Announces a block of device memory whose descriptor rides with this frame."""

    block: int
    size: int


class BlockAnswer(Message, tag=19, frozen=True):
    """Whether the receiver could open a block: `refusal` is "" where it could."""

    block: int
    refusal: str


class BlocksRead(Message, tag=20, frozen=True):
    """The receiver has copied what these blocks held; they are the sender's again."""

    blocks: list[int]


class BlocksGone(Message, tag=21, frozen=True):
    """The sender has given these blocks up for good."""

    blocks: list[int]


class Hello(Message, tag=10, frozen=True):
    """First frame of a connection between two instances."""

    instance: str


class GroupLink(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How a rank reaches the others of its group, by descriptors that it inherits.

    `port`: the group's own, on 127.0.0.1, where rank 0 listens with `listener` (-1 in the others). `sockets`: in rank 0
    one to each other rank, in their order; in those the one to rank 0. `seed`: the same in all.
    """

    port: int
    listener: int
    sockets: list[int]
    seed: int

    @property
    def descriptors(self) -> list[int]:
        return [fd for fd in (self.listener, *self.sockets) if fd >= 0]


class Spawn(Message, tag=11, frozen=True):
    """First frame to a new worker: all that it needs to know. `group`: where it is a rank of several; `device`: its GPU
    as its process numbers it; `by_host`: the instances to which its tensors go through host memory, whatever the plan
    allows."""

    plan: Plan
    instance: str
    run_dir: str
    sys_path: list[str]
    group: GroupLink | None = None
    device: int | None = None
    by_host: list[str] = []


class Ready(Message, tag=12, frozen=True):
    """The worker has built its stages and listens."""

    instance: str
    facts: dict[str, Any]


class StartFailed(Message, tag=13, frozen=True):
    """A stage's factory raised; the worker exits after this. An error raised on purpose says all: no ``traceback``."""

    instance: str
    stage: str
    message: str
    traceback: str


class Stop(Message, tag=14, frozen=True):
    """Exit now; the coordinator has drained or given up."""


class StatsQuery(Message, tag=15, frozen=True):
    """Asks an instance for its gauges; answered by `Stats`. Nothing is sent unasked, so idle costs nothing."""


class Stats(Message, tag=17, frozen=True):
    """Gauges of one instance as they are now."""

    instance: str
    gauges: dict[str, float]


AnyMessage = (
    Submit
    | StreamChunk
    | StreamEnd
    | StreamAck
    | Result
    | Failure
    | Abort
    | Segment
    | Release
    | Forget
    | BlockOffer
    | BlockAnswer
    | BlocksRead
    | BlocksGone
    | Hello
    | Spawn
    | Ready
    | StartFailed
    | Stop
    | StatsQuery
    | Stats
)
