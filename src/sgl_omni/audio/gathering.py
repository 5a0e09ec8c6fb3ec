"""Calls of several threads, made as one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Generic, TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")


@dataclass(slots=True, eq=False)
class _Call(Generic[Item, Made]):
    item: Item
    made: list[Made]
    """Of one result, once it is there."""
    error: Exception | None = None


class Gathering(Generic[Item, Made]):
    """``make`` for many threads: what comes while it is busy waits, and goes with the next that has its turn.

    ``make`` takes up to ``most`` items and returns as many results in their order. Only items of the same ``kind`` go
    together, any if it is left out.
    """

    def __init__(
        self,
        make: Callable[[list[Item]], Sequence[Made]],
        most: int,
        kind: Callable[[Item], Hashable] = lambda item: None,
    ) -> None:
        self.turn = Lock()
        """Held while ``make`` is busy; for what must not happen meanwhile."""
        self._make = make
        self._most = most
        self._kind = kind
        self._waiting: list[_Call[Item, Made]] = []
        self._changing = Lock()

    def __call__(self, item: Item) -> Made:
        """What ``make`` made of the item; raises what it raised for the batch that the item was in."""
        call: _Call[Item, Made] = _Call(item, [])
        with self._changing:
            self._waiting.append(call)
        with self.turn:
            if not call.made and call.error is None:
                self._run(self._batch_of(call))
        if call.error is not None:
            raise call.error
        return call.made[0]

    def _batch_of(self, call: _Call[Item, Made]) -> list[_Call[Item, Made]]:
        """The call and, oldest first, the others that wait and may go with it."""
        kind = self._kind(call.item)
        with self._changing:
            others = [other for other in self._waiting if other is not call and self._kind(other.item) == kind]
            batch = [call, *others[: self._most - 1]]
            self._waiting = [other for other in self._waiting if other not in batch]
        return batch

    def _run(self, batch: list[_Call[Item, Made]]) -> None:
        try:
            made = self._make([call.item for call in batch])
        except Exception as error:  # noqa: BLE001 - it belongs to each of the calls, and is raised in their threads
            for call in batch:
                call.error = error
            return
        for call, result in zip(batch, made, strict=True):
            call.made.append(result)
