"""What the author of a stage writes against: four kinds of stage and the request they see.

A factory (``stages.<s>.factory_path``) returns one of these. It is called once, in the stage's own
process, with the keyword arguments of ``stages.<s>.factory`` plus those of the following that its
signature declares: ``model_path``, ``gpu_id`` (int or None), ``device`` ("cpu", or "cuda:0", as a process
numbers its own GPU first), ``engine`` (the stage's engine settings as a dict), ``weights`` (where replicas
share weights, the `sgl_omni.engine.weights.WeightStore` that gives the model its tensors; else None),
``budget_bytes`` (what the stage may hold of its GPU's memory, if it says so; else None).

A stage with ``tp_size`` above 1 must be an engine; its factory is also offered ``shard`` (the
`sgl_omni.engine.shard.Shard` of this rank), ``tp_rank``, ``tp_size`` and ``nccl_port`` (of the group's
torch.distributed store on 127.0.0.1).

A payload is a ``dict`` with string keys whose values are None, bool, int, float, str, bytes, numpy
arrays, torch tensors, or lists and dicts of these. Between processes, bytes of more than 64 KiB arrive
as a writable ``memoryview``, arrays and tensors as views of a buffer that is the receiver's alone until
it drops them; a tensor on a GPU arrives in host memory. Within one process the object itself is handed
over, uncopied.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from sgl_omni.engine.interface import Engine

Payload = dict[str, Any]
State = TypeVar("State")


@runtime_checkable
class Request(Protocol):
    """One request as a stage sees it."""

    @property
    def id(self) -> str: ...

    @property
    def aborted(self) -> bool:
        """True once the request was aborted; long synchronous work may look at it and stop early."""
        ...

    async def emit(self, chunk: Payload) -> None:
        """Streams one chunk to the stage's ``stream_to`` targets, or to the client from a terminal stage.

        Waits while a receiver is more than a window of chunks behind.
        """
        ...


StageFunction = Callable[[Payload, Request], Payload | Awaitable[Payload]]
BatchFunction = Callable[[list[Payload]], Sequence[Payload | Exception] | Awaitable[Sequence[Payload | Exception]]]

Rehearsal = Callable[[], object]
"""Runs a stage's network on made-up input by the code that requests take, and leaves nothing of it behind.

On the CUDA platform it is called once, when all stages of the process are built and before the process is ready, in a
thread that will serve requests, whatever the stage itself runs on. What it raises ends the start.
"""


@dataclass(frozen=True)
class FunctionStage:
    """One call a request: ``fn(payload, request) -> payload``.

    A coroutine function runs on the process's event loop; a plain function runs in a thread.
    ``concurrency`` bounds the calls in progress.
    """

    fn: StageFunction
    concurrency: int = 1
    rehearsal: Rehearsal | None = None


@dataclass(frozen=True)
class BatchStage:
    """Collects up to ``max_size`` payloads, waiting ``max_wait_ms`` at most after the first, and calls once.

    ``fn`` returns one payload, or one exception, per input and in its order.
    """

    fn: BatchFunction
    max_size: int = 8
    max_wait_ms: float = 2.0
    rehearsal: Rehearsal | None = None


class StreamStage(ABC, Generic[State]):
    """Fed by stream chunks; keeps state per request. Its methods run in ``concurrency`` threads,
    those of one request in order and never two at a time."""

    concurrency: int = 1
    rehearsal: Rehearsal | None = None

    @abstractmethod
    def open(self, request: Request) -> State:
        """Called before the request's first chunk."""

    @abstractmethod
    def feed(self, state: State, chunk: Payload) -> Iterable[Payload]:
        """Takes one chunk; yields chunks to stream on (each is sent as soon as it is yielded).

        A list of them, of whatever length, spares a change of threads."""

    @abstractmethod
    def flush(self, state: State) -> Iterable[Payload]:
        """Called when every incoming stream has ended; yields what is left."""

    @abstractmethod
    def result(self, state: State, payload: Payload) -> Payload:
        """Called last with the payload of the ``next`` edge ({} where none leads here); returns this
        stage's own payload."""

    def close(self, state: State) -> None:
        """Frees the state, also after an abort or an error."""


@dataclass(frozen=True)
class EngineStage:
    """An autoregressive engine, driven by a thread of its own."""

    engine: Engine


Stage = FunctionStage | BatchStage | StreamStage[Any] | EngineStage
