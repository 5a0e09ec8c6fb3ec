"""Calls of several threads, made as one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Condition, Lock
from typing import Generic, TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")


@dataclass(slots=True, eq=False)
class _Call(Generic[Item, Made]):
    item: Item
    kind: Hashable
    done: bool = False
    made: list[Made] = field(default_factory=list)
    """Of one result, unless there is an error."""
    error: Exception | None = None


PATIENCE_SECONDS = 0.002
"""Callers whose items went together come back one by one, for they take turns in this process."""


class Gathering(Generic[Item, Made]):
    """``make`` for many threads: what comes while it is busy waits, and goes with the next that has its turn.

    ``make`` takes up to ``most`` items and returns as many results in their order. Only items of the same ``kind`` go
    together, any if it is left out. A batch that some who have joined are not in waits for them, as long as no
    ``PATIENCE_SECONDS`` pass in which none comes; so a caller alone never waits.

    Batches are made in one thread of their own: a GPU's libraries keep handles, workspaces and plans for each thread
    that calls them, and setting these up takes longer than most batches do.
    """

    def __init__(
        self,
        make: Callable[[list[Item]], Sequence[Made]],
        most: int,
        kind: Callable[[Item], Hashable] = lambda item: None,
    ) -> None:
        self.make = make
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="gathered") if most > 1 else None
        self._most = most
        self._kind = kind
        self._waiting: list[_Call[Item, Made]] = []
        self._callers = 0
        self._busy = False
        lock = Lock()
        self._arrived, self._ended = Condition(lock), Condition(lock)

    def join(self) -> None:
        """Someone who calls one time after another is there; ``leave`` when they are not any more."""
        with self._arrived:
            self._callers += 1

    def leave(self) -> None:
        with self._arrived:
            self._callers -= 1

    def __call__(self, item: Item) -> Made:
        """What ``make`` made of the item; raises what it raised for the batch that the item was in."""
        call: _Call[Item, Made] = _Call(item, self._kind(item))
        with self._arrived:
            self._waiting.append(call)
            self._arrived.notify()
            while self._busy and not call.done:
                self._ended.wait()
            self._busy = self._busy or not call.done
            batch = [] if call.done else self._batch_of(call)
        if batch:
            self._run(batch)
        if call.error is not None:
            raise call.error
        return call.made[0]

    def _batch_of(self, call: _Call[Item, Made]) -> list[_Call[Item, Made]]:
        """The call and, oldest first, the others that wait and may go with it."""
        while (there := len(self._waiting)) < min(self._most, self._callers):
            self._arrived.wait(PATIENCE_SECONDS)
            if len(self._waiting) == there:
                break
        others = [other for other in self._waiting if other is not call and other.kind == call.kind]
        batch = [call, *others[: self._most - 1]]
        self._waiting = [other for other in self._waiting if other not in batch]
        return batch

    def _made(self, items: list[Item]) -> Sequence[Made]:
        return self.make(items) if self._maker is None else self._maker.submit(self.make, items).result()

    def _run(self, batch: list[_Call[Item, Made]]) -> None:
        error: Exception | None = None
        try:
            for call, made in zip(batch, self._made([call.item for call in batch]), strict=True):
                call.made.append(made)
        except Exception as raised:  # noqa: BLE001 - it belongs to each of the calls, and is raised in their threads
            error = raised
        with self._ended:
            for call in batch:
                call.done, call.error = True, error
            self._busy = False
            self._ended.notify_all()
