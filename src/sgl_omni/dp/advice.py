"""How many copies of a tuned replica a GPU has room for, by arithmetic from what one was measured to use.

Copies pay where one leaves the card idle: by the rule of thumb, where at most 60 % of its multiprocessor time is in use
at the plateau. What then bounds their number is whichever runs out first: idle multiprocessors, cores, or memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MOST_ACTIVE = 0.60
HEADROOM = 0.05
"""Share of the card's memory that nobody is promised: the driver, MPS, fragments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One replica at its plateau, under its latency target.

    ``sm_active``: share of multiprocessor time in use, 0 to 1. ``host_cores``: CPU seconds of all its processes in a
    second. ``other_bytes``: its memory on the card beside weights and KV pool: contexts, graphs, activations, other
    stages. ``tokens_needed``: KV tokens in use at the plateau, at most. ``tokens_useful``: more than these are never
    asked for. Pools are of whole pages of ``page_tokens``.
    """

    sm_active: float
    host_cores: float
    weights_bytes: int
    other_bytes: int
    bytes_per_token: int
    tokens_needed: int
    tokens_useful: int | None = None
    page_tokens: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.sm_active <= 1:
            raise ValueError(f"sm_active must be above 0 and at most 1, not {self.sm_active}")
        if not 0 < self.host_cores < math.inf:
            raise ValueError(f"host_cores must be above 0, not {self.host_cores}")
        for name in ("bytes_per_token", "tokens_needed", "page_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, not {getattr(self, name)}")
        if self.tokens_useful is not None and self.tokens_useful < self.tokens_needed:
            raise ValueError(f"tokens_useful {self.tokens_useful} is less than tokens_needed {self.tokens_needed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The card's memory in bytes, the physical cores, and whether the model's weights can be held once for all."""

    memory_bytes: int
    cores: int
    can_share: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A topology to try. ``max_total_tokens`` is each replica's; ``bound`` names what allows no further replica."""

    replicas: int
    cores_each: int
    max_total_tokens: int
    mps: bool
    weight_share: bool
    bound: str


def advise(measured: Measured, room: Room) -> Advice:
    """The largest number of replicas that all three resources allow; weights are shared only where that adds replicas.

    Raises:
        ValueError: not even one such replica fits; names what is missing.
    """
    if room.cores < 1:
        raise ValueError("there is no core")
    own = _advise(measured, room, shared=False)
    best = own
    if room.can_share and (own is None or own.bound == "memory"):
        shared = _advise(measured, room, shared=True)
        if shared is not None and shared.replicas > (own.replicas if own else 1):
            best = shared
    if best is None:
        missing = _fixed(measured, 1, shared=False) + _least_pool(measured) - _usable(room)
        raise ValueError(f"one replica of {measured.tokens_needed} tokens lacks {missing} bytes of GPU memory")
    return best


def tokens_for(measured: Measured, room: Room, replicas: int, *, shared: bool) -> int:
    """The pool of each of so many replicas, whether or not they pay. Raises ``ValueError`` where they do not fit."""
    tokens = _tokens(measured, room, replicas, shared=shared)
    if tokens < measured.page_tokens:
        missing = _fixed(measured, replicas, shared=shared) - _usable(room)
        raise ValueError(f"{replicas} replicas leave no room for KV pools; {max(0, missing)} bytes are lacking")
    return tokens


def _advise(measured: Measured, room: Room, *, shared: bool) -> Advice | None:
    limits = {
        "multiprocessors": _by_activity(measured),
        "cores": max(1, room.cores // math.ceil(measured.host_cores)),
        "memory": _by_memory(measured, room, shared=shared),
    }
    bound = min(limits, key=lambda name: limits[name])
    replicas = limits[bound]
    if replicas == 0:
        return None
    return Advice(
        replicas=replicas,
        cores_each=room.cores // replicas,
        max_total_tokens=_tokens(measured, room, replicas, shared=shared),
        mps=replicas > 1,
        weight_share=shared and replicas > 1,
        bound=bound,
    )


def _by_activity(measured: Measured) -> int:
    """As many as together would keep all multiprocessors busy; one where that one does already."""
    if measured.sm_active > MOST_ACTIVE:
        return 1
    return max(1, math.floor(1 / measured.sm_active))


def _by_memory(measured: Measured, room: Room, *, shared: bool) -> int:
    once, each = (measured.weights_bytes, 0) if shared else (0, measured.weights_bytes)
    return max(0, (_usable(room) - once) // (each + measured.other_bytes + _least_pool(measured)))


def _tokens(measured: Measured, room: Room, replicas: int, *, shared: bool) -> int:
    """What memory is left goes to the pools alike, in whole pages, up to what is of use."""
    tokens = (_usable(room) - _fixed(measured, replicas, shared=shared)) // replicas // measured.bytes_per_token
    if measured.tokens_useful is not None:
        tokens = min(tokens, _whole_pages(measured.tokens_useful, measured.page_tokens))
    return tokens // measured.page_tokens * measured.page_tokens


def _fixed(measured: Measured, replicas: int, *, shared: bool) -> int:
    """Bytes of so many replicas beside their KV pools."""
    return measured.weights_bytes * (1 if shared else replicas) + measured.other_bytes * replicas


def _least_pool(measured: Measured) -> int:
    return _whole_pages(measured.tokens_needed, measured.page_tokens) * measured.bytes_per_token


def _whole_pages(tokens: int, page: int) -> int:
    return -(-tokens // page) * page


def _usable(room: Room) -> int:
    return int(room.memory_bytes * (1 - HEADROOM))
