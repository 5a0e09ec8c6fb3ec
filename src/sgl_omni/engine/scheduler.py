"""Which rows run in the next step. Pure: it sees lengths and pages, never a tensor or a clock."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heappop, heappush

from sgl_omni.engine.kv_cache import PagePool
from sgl_omni.engine.request import LARGEST, Chunk, Request
from sgl_omni.errors import InvalidRequest, StartupError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one step and the whole engine may hold.

    ``prefill_tokens``: prompt rows a step, for all requests together; a longer prompt runs in chunks.
    ``fixed_chunks``: a chunk never depends on what else runs: it is the prompt's next ``prefill_tokens`` rows, run
    as soon as the step has any room left.
    ``max_positions``: the longest sequence that the model can attend over.
    ``step_rows``: rows of a step in all; prompts wait where they would exceed it.
    ``rows_ahead``: a running request has pages for so many more rows than it needs now, as long as nobody else wants
    them; with it ``repeat`` may be asked. ``free_rows_ahead``: or for up to so many, while half of the pages that hold
    nothing, not even a prompt that may come again, are enough for all.
    """

    max_running_requests: int = 64
    prefill_tokens: int = 2048
    fixed_chunks: bool = False
    max_positions: int | None = None
    reuse_prefixes: bool = True
    step_rows: int | None = None
    rows_ahead: int = 0
    free_rows_ahead: int = 0

    def __post_init__(self) -> None:
        if self.max_running_requests < 1 or self.prefill_tokens < 1:
            raise StartupError("max_running_requests and chunked_prefill_tokens must be 1 or more")


class Scheduler:
    """Continuous batching, first come first served.

    A request enters with pages for all rows that it has, so that its prompt is never stopped half way, and takes
    more as it grows. Where none is left the youngest running request gives up its pages and waits again; the
    oldest can always go on, because a request that would not fit alone is refused at once.

    A request that waits for input is passed over, and gives up its pages before all others.
    """

    def __init__(self, pool: PagePool, limits: Limits) -> None:
        self._pool = pool
        self._limits = limits
        # Both in order of arrival; every running request came before every waiting one that does not wait for input.
        self._running: list[Request] = []
        self._waiting: deque[Request] = deque()
        self._arrivals = 0
        self._free_rows = list(range(limits.max_running_requests))
        self._repeats_left = 0
        self._repeated = 0
        self._repeating: list[Request] = []
        self._pages_ahead = 0  # at the beginning of this step
        self.retractions = 0
        self.reused_tokens = 0
        self.most_pages_needed = 0
        """At once, so far."""

    @property
    def has_work(self) -> bool:
        return any(not r.is_blocked for r in self._running) or any(not r.is_blocked for r in self._waiting)

    @property
    def running(self) -> Sequence[Request]:
        return self._running

    @property
    def waiting(self) -> Sequence[Request]:
        return self._waiting

    @property
    def pages_needed(self) -> int:
        """Pages in use but for those that lie ahead of what is needed now."""
        rows = [min(request.length + self._repeated, request.final_length) for request in self._running]
        ahead = [len(r.pages) - self._pool.pages_for(n) for r, n in zip(self._running, rows, strict=True)]
        return self._pool.used - sum(pages for pages in ahead if pages > 0)

    def add(self, request: Request) -> None:
        """Queues a request. Raises ``InvalidRequest`` for one that can never be served."""
        self._check(request)
        self._settle()
        request.arrival = self._arrivals
        self._arrivals += 1
        self._find_keys(request)
        self._waiting.append(request)

    def find(self, request_id: str) -> Request | None:
        """The request of this id, if it is here."""
        return next((r for r in (*self._running, *self._waiting) if r.id == request_id), None)

    @contextmanager
    def changing(self, request: Request) -> Iterator[None]:
        """For taking input of a request that is here. Raises ``InvalidRequest`` if it cannot be served any more."""
        self._settle()
        was_open = request.inputs is not None and request.inputs.prompt_open
        yield
        if was_open:
            self._check(request)
            self._find_keys(request)

    def _check(self, request: Request) -> None:
        """Where the prompt alone is too long, no parameter of the request is: its text, or what stands for it, is."""
        limit, capacity = self._limits.max_positions, self._pool.capacity
        own = request.prompt.end_position
        for needed, room, what in ((own, limit, "the model has"), (request.prompt_length, capacity, "the KV pool has")):
            if room is not None and needed > room:
                raise InvalidRequest(f"what was given makes a prompt of {needed} positions; {what} {room}")
        for needed, room, what in (
            (request.longest, capacity, "the KV pool has"),
            (request.end_position, limit, "the model has"),
        ):
            if room is not None and needed > room:
                told = f"the prompt and its outputs need up to {needed} positions; {what} {room}"
                raise InvalidRequest(told, param="max_new_tokens")

    def abort(self, request_id: str) -> Sequence[Request]:
        """Frees all that requests of this id hold, and returns these. Unknown ids are ignored."""
        aborted = [r for r in (*self._running, *self._waiting) if r.id == request_id]
        for request in aborted:
            self.remove(request)
        return aborted

    def remove(self, request: Request) -> None:
        """Frees all that a request holds: it has finished, or is aborted."""
        self._settle()
        request.sequence += 1
        if request.pages:
            self._running.remove(request)
            self._release(request)
        else:
            self._waiting.remove(request)

    def follow(self, request: Request) -> None:
        """Begins the next sequence of a request, which keeps its turn."""
        self._settle()
        if not request.pages:  # retracted while its last output was on its way: it begins when it is admitted
            request.follow()
            self._find_keys(request)
            return
        self._release(request)
        request.follow()
        self._begin(request)
        self._find_keys(request)
        # One page at least is what it has just given back; the next step finds the rest, as for any row.
        request.pages = self._pool.allocate(min(self._pool.pages_for(request.length), self._pool.available))

    def schedule(self) -> list[Chunk]:
        """The rows of the next step: one for each decoding request, then prompts as far as the budget goes."""
        self._settle()
        self._make_room_for_outputs()
        budget = self._prompt_rows()
        chunks: list[Chunk] = []
        for request in self._running:
            if request.launched >= request.max_outputs or request.is_blocked:
                continue  # its last output is on its way, or its input is
            if request.is_decoding:
                chunks.append(Chunk(request, request.computed, request.length))
            elif budget > 0:
                budget -= self._take_chunk(request, budget, chunks)
        while budget > 0 and (admitted := self._admit_next(alone=not chunks)):
            budget -= self._take_chunk(admitted, budget, chunks)
        self.most_pages_needed = max(self.most_pages_needed, self._pool.used - self._pages_ahead)
        self._allocate_ahead()
        return chunks

    def repeat(self) -> bool:
        """Whether the last step can run again, each request one row further, without another look at any of them.

        If so, that step is taken as scheduled and complete.
        """
        if self._repeats_left == 0:
            return False
        self._repeats_left -= 1
        self._repeated += 1
        return True

    def complete(self, chunks: Sequence[Chunk]) -> None:
        """Notes that these rows are in the cache, or will be before any that are scheduled from now on.

        Requests that were aborted meanwhile are passed over.
        """
        size = self._pool.page_size
        # An output that is run again after a retraction, alone in its chunk, looks like one that is decoded.
        all_yield = all(chunk.yields_output for chunk in chunks)
        for chunk in chunks:
            chunk.request.launched += chunk.yields_output
            request = chunk.request
            if not request.pages:
                continue
            whole = range(chunk.start // size, min(chunk.stop // size, len(request.page_keys)))
            for page in whole:
                self._pool.remember(request.pages[page], request.page_keys[page])
            request.computed = chunk.stop
        if self._limits.rows_ahead and all_yield:
            self._count_repeats(chunks)

    def _count_repeats(self, chunks: Sequence[Chunk]) -> None:
        """How often the same can be done: as long as pages and outputs last, if all that run are decoding."""
        if not all(chunk.is_decode for chunk in chunks):
            return
        self._repeating = [chunk.request for chunk in chunks]
        if len(chunks) != len(self._running):
            others = set(self._running).difference(self._repeating)
            if not all(request.is_blocked for request in others):
                return
        if self._waiting and self._waiting[0].awaits_output:
            return  # it may be admitted as soon as that is known
        size = self._pool.page_size
        left = [
            min(len(r.pages) * size - r.length, r.max_outputs - r.launched - 1, self._inputs_left(r))
            for r in self._repeating
        ]
        self._repeats_left = max(0, min(left) + 1) if left else 0

    def _settle(self) -> None:
        """Writes down what ``repeat`` has let pass."""
        if self._repeated:
            self.most_pages_needed = max(self.most_pages_needed, self.pages_needed)
        for request in self._repeating if self._repeated else ():
            request.computed += self._repeated
            request.launched += self._repeated
        self._repeats_left = self._repeated = 0

    def _inputs_left(self, request: Request) -> int:
        """Outputs that could follow the next without another look at what has arrived for them."""
        if request.inputs is None:
            return LARGEST
        ahead = self._limits.rows_ahead
        return ahead if request.inputs.ended else min(ahead, request.inputs.count - request.launched)

    def _begin(self, request: Request) -> None:
        """Gives a running request a place for the state of a sequence."""
        request.row = heappop(self._free_rows)
        request.turn += 1

    def _allocate_ahead(self) -> None:
        """Pages for rows to come, so that steps can follow one another without a look at the pool."""
        starved = bool(self._waiting) and len(self._running) < self._limits.max_running_requests
        if not self._limits.rows_ahead or starved:
            return
        pool, size = self._pool, self._pool.page_size
        spare = pool.available - len(self._running)
        free = (pool.available - pool.cached) // 2 // max(1, len(self._running)) * size
        ahead = max(self._limits.rows_ahead, min(self._limits.free_rows_ahead, free))
        for request in self._running:
            target = min(request.length + ahead, request.final_length)
            missing = -(-target // size) - len(request.pages)
            if 0 < missing <= spare:
                request.pages += pool.allocate(missing)
                spare -= missing

    def _reclaim_ahead(self) -> None:
        self._pages_ahead = 0
        for request in self._running if self._limits.rows_ahead else ():
            needed = self._pool.pages_for(request.rows_needed)
            self._pool.release(request.pages[needed:])
            del request.pages[needed:]

    def _find_keys(self, request: Request) -> None:
        """None for a prompt that is not whole, or whose rows must all be run, or depend on more than the prompt."""
        still_open = request.inputs is not None and request.inputs.prompt_open
        alone = request.hidden is None and request.source is None
        if self._limits.reuse_prefixes and alone and not still_open:
            request.page_keys = request.prompt.page_keys(self._pool.page_size)

    def _prompt_rows(self) -> int:
        """Rows for prompts in the next step."""
        budget, most = self._limits.prefill_tokens, self._limits.step_rows
        if most is None:
            return budget
        return max(1, min(budget, most - sum(request.is_decoding for request in self._running)))

    def _take_chunk(self, request: Request, budget: int, chunks: list[Chunk]) -> int:
        most = self._limits.prefill_tokens if self._limits.fixed_chunks else budget
        chunk = Chunk(request, request.computed, request.computed + min(request.uncomputed, most))
        chunks.append(chunk)
        return chunk.length

    def _make_room_for_outputs(self) -> None:
        """A page for each request whose next row needs one, oldest first; the youngest pay for it."""
        self._pages_ahead = 0
        for request in list(self._running):
            missing = self._pool.pages_for(request.rows_needed) - len(request.pages)
            if missing < 0:
                self._pages_ahead -= missing
            if missing <= 0 or not request.pages or request.is_blocked:
                continue  # it has what it needs, was retracted by an older one, or is not to run
            if missing > self._pool.available:
                self._reclaim_ahead()
            while missing > self._pool.available and request.pages:
                self._retract(self._last_blocked() or self._running[-1])
            if request.pages:
                request.pages += self._pool.allocate(missing)

    def _retract(self, request: Request) -> None:
        self._running.remove(request)
        self._release(request)
        request.retractions += 1
        self.retractions += 1
        insort(self._waiting, request, key=_arrival)

    def _last_blocked(self) -> Request | None:
        return next((r for r in reversed(self._running) if r.is_blocked), None)

    def _release(self, request: Request) -> None:
        self._pool.release(request.pages)
        heappush(self._free_rows, request.row)
        request.pages = []
        request.row = -1
        request.computed = 0

    def _admit_next(self, *, alone: bool) -> Request | None:
        """Moves the request that has waited longest to the running ones, if there is room for it.

        ``alone``: nothing else runs in this step, so those that wait for input make room.
        """
        request = next((r for r in self._waiting if not r.is_blocked), None)
        if request is None or request.awaits_output:
            return None  # there is none, or it was retracted a moment ago
        while not self._admit(request):
            blocked = self._last_blocked() if alone else None
            if blocked is None:
                return None
            self._retract(blocked)
        return request

    def _admit(self, request: Request) -> bool:
        """Each running request that is still to grow keeps one page in reserve, or admissions would soon be undone."""
        if len(self._running) >= self._limits.max_running_requests:
            return False
        known = self._pool.take_known(self._usable_keys(request))
        needed = self._pool.pages_for(request.length) - len(known)
        if needed + self._growing() > self._pool.available:
            self._reclaim_ahead()
        if needed + self._growing() > self._pool.available:
            self._pool.release(known)
            return False
        self._waiting.remove(request)
        insort(self._running, request, key=_arrival)
        request.pages = known + self._pool.allocate(needed)
        self._begin(request)
        request.computed = len(known) * self._pool.page_size
        self.reused_tokens += request.computed
        return True

    def _usable_keys(self, request: Request) -> Sequence[bytes]:
        """Pages to look for. At least one row is always run, for the output it yields."""
        return request.page_keys[: (request.length - 1) // self._pool.page_size]

    def _growing(self) -> int:
        return sum(self._pool.pages_for(r.longest) > len(r.pages) for r in self._running)


def _arrival(request: Request) -> int:
    return request.arrival
