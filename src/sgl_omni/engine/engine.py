"""The engine: requests in, one scheduled and batched step at a time, outputs out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sgl_omni.engine.cross_attention import SourcePool
from sgl_omni.engine.device_runner import DeviceRunner
from sgl_omni.engine.interface import EngineOutput, Payload
from sgl_omni.engine.kv_budget import WORKING_BYTES, kv_bytes
from sgl_omni.engine.kv_cache import KVCache, KVShape, PagePool, count_pages
from sgl_omni.engine.model import StepModel
from sgl_omni.engine.quiet import QuietRows
from sgl_omni.engine.request import LOST, Request
from sgl_omni.engine.runner import AheadRunner, LaunchedStep, ModelRunner, Runner
from sgl_omni.engine.scheduler import Limits, Scheduler
from sgl_omni.engine.task import Task
from sgl_omni.errors import InvalidRequest, NotFinite, StartupError

_ROWS_AHEAD = 48
_FREE_ROWS_AHEAD = 256
_MIXED_GRAPH_ROWS = 1024
"""Room for the prompts of as many requests as end, where some hundreds decode. Matrix products of fewer rows leave a
large GPU idle; steps of more would keep those who decode waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The ``engine`` section of a stage, as far as it is about scheduling and the KV pool.

    ``group_rows`` makes the engine batch-invariant: see ``ModelRunner``; prefixes are then not reused, as that
    would change how a prompt is cut into chunks. Only a request that was retracted may still differ in rounding.
    ``mem_fraction_static`` and ``budget_bytes`` (the stage's whole budget) size the pool where nothing pins it; see
    ``kv_budget``. ``cuda_graph_max_bs``: requests up to which a decode step on a GPU is one CUDA graph; 0 for none.
    """

    max_total_tokens: int | None = None
    kv_cache_bytes: int | None = None
    mem_fraction_static: float | None = None
    budget_bytes: int | None = None
    page_size: int = 16
    max_running_requests: int = 64
    chunked_prefill_tokens: int = 2048
    cuda_graph_max_bs: int = 64
    reuse_prefixes: bool = True
    group_rows: int | None = None

    def __post_init__(self) -> None:
        """Raises ``StartupError`` for numbers that mean nothing."""
        least = {"group_rows": 1, "cuda_graph_max_bs": 0, "max_running_requests": 1, "chunked_prefill_tokens": 1}
        for key, low in {**least, "max_total_tokens": 1, "kv_cache_bytes": 1, "page_size": 1}.items():
            value = getattr(self, key)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
                raise StartupError(f"engine.{key} must be a whole number of {low} or more, not {value!r}")

    @classmethod
    def parse(cls, settings: Mapping[str, Any], **defaults: Any) -> EngineSettings:
        """Takes the keys that it knows; those that are absent or null keep their defaults."""
        given = {key: value for key, value in settings.items() if key in cls.__slots__ and value is not None}
        return cls(**{**defaults, **given})

    def pages(self, shape: KVShape, device: torch.device) -> int:
        """Pages of the pool; the weights must be on the device by now. Raises ``StartupError`` for none."""
        tokens, size = self.max_total_tokens, self.kv_cache_bytes
        if tokens is None and size is None:
            on_gpu = device.type == "cuda"
            static = self.mem_fraction_static
            if static is not None and not on_gpu:
                raise StartupError(
                    "engine.mem_fraction_static is a share of a GPU's memory; on a CPU give engine.max_total_tokens"
                )
            total = torch.cuda.get_device_properties(device).total_memory if on_gpu else 0
            size = kv_bytes(
                torch.cuda.memory_allocated(device) if on_gpu else 0,
                static_bytes=None if static is None else int(static * total),
                budget_bytes=self.budget_bytes,
                working_bytes=WORKING_BYTES if on_gpu else min(WORKING_BYTES, (self.budget_bytes or 0) // 2),
            )
        return count_pages(shape, self.page_size, max_total_tokens=tokens, kv_cache_bytes=size)

    def limits(self, max_positions: int | None, *, ahead: bool = False, step_rows: int | None = None) -> Limits:
        """``ahead``: for a runner that launches a step before it has read the last."""
        invariant = self.group_rows is not None
        return Limits(
            max_running_requests=self.max_running_requests,
            prefill_tokens=self.chunked_prefill_tokens,
            fixed_chunks=invariant,
            max_positions=max_positions,
            reuse_prefixes=self.reuse_prefixes and not invariant,
            step_rows=step_rows,
            rows_ahead=_ROWS_AHEAD if ahead else 0,
            free_rows_ahead=_FREE_ROWS_AHEAD if ahead else 0,
        )


class AutoregressiveEngine:
    """Implements ``sgl_omni.engine.interface.FedEngine`` for any model that has a task and a runner."""

    def __init__(
        self,
        task: Task,
        runner: Runner | AheadRunner,
        pool: PagePool,
        limits: Limits,
        sources: SourcePool | None = None,
    ) -> None:
        """``sources``: the runner's, if it has any."""
        self._sources = sources
        self._task = task
        self._runner = runner
        self._pool = pool
        self._scheduler = Scheduler(pool, limits)
        self._ahead = runner if isinstance(runner, AheadRunner) else None
        self._launched: LaunchedStep | None = None
        self._quiet = QuietRows(task)
        self._generated = 0

    @classmethod
    def build(
        cls,
        model: StepModel,
        task: Task,
        settings: EngineSettings,
        *,
        max_positions: int | None = None,
        device_rows: bool | None = None,
    ) -> AutoregressiveEngine:
        """Allocates the KV pool on the model's device and captures its graphs.

        ``device_rows``: run steps in fixed device rows, each launched before the last is read; by default on a GPU.
        Raises ``StartupError`` for a pool that holds nothing.
        """
        pages = settings.pages(model.kv_shape, model.device)
        pool = PagePool(pages, settings.page_size, model.kv_shape.bytes_per_token)
        if device_rows is None:
            device_rows = model.device.type == "cuda" and settings.group_rows is None and not model.asks_host
        if device_rows and model.asks_host:
            raise StartupError(
                f"rules of {type(model).__name__} look at requests; give it rule_rows and finish_rows, or build the "
                "engine with device_rows=False"
            )
        shape, places = model.source_shape, settings.max_running_requests
        sources = None if shape is None else SourcePool(shape, places, model.device)
        if not device_rows:
            cache = KVCache(model.kv_shape, pages, settings.page_size, model.device)
            runner = ModelRunner(model, cache, group_rows=settings.group_rows, sources=sources)
            return cls(task, runner, pool, settings.limits(max_positions), sources)
        if task.pattern != model.pattern:
            raise StartupError("the task's delay pattern must be the model's too, whose steps fill it in on the device")
        longest = min(pool.capacity, max_positions or pool.capacity)
        batch = min(settings.cuda_graph_max_bs, settings.max_running_requests)
        ahead = DeviceRunner(
            model,
            KVCache(model.kv_shape, pages + 1, settings.page_size, model.device),
            max_rows=settings.max_running_requests,
            pages_per_row=pool.pages_for(longest),
            graph_batch=batch,
            graph_rows=min(_MIXED_GRAPH_ROWS, settings.chunked_prefill_tokens + batch),
            takes_inputs=task.takes_inputs,
            embeds_prompts=task.embeds_prompts or task.takes_inputs,
            hands_hidden=task.hands_hidden,
            sources=sources,
        )
        # A prompt that is cut into pieces which fit a graph is sooner through than one that is launched by kernels.
        largest = ahead.graphs[-1].buckets[-1] if ahead.graphs else None
        step_rows = max(largest, settings.max_running_requests + 64) if largest else None
        return cls(task, ahead, pool, settings.limits(max_positions, ahead=True, step_rows=step_rows), sources)

    @property
    def runner(self) -> Runner | AheadRunner:
        return self._runner

    @property
    def running(self) -> Sequence[Request]:
        return self._scheduler.running

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or self._is_awaited

    @property
    def _is_awaited(self) -> bool:
        """Whether something will come of the step that was launched, though there may be no next one."""
        launched = self._launched
        return launched is not None and any(request.sequence == sequence for request, sequence in launched.owners)

    def add(self, request_id: str, payload: Payload) -> None:
        if self._scheduler.find(request_id) is not None:
            raise InvalidRequest(f"request {request_id!r} is here already")
        request = self._task.parse(request_id, payload)
        task = self._task
        asks = (
            request.hidden is not None and not task.hands_hidden,
            request.inputs is not None and not task.takes_inputs,
        )
        if self._ahead is not None and any(asks):
            raise InvalidRequest(
                f"device rows keep neither hidden states nor arriving input unless {type(task).__name__} says "
                "hands_hidden or takes_inputs"
            )
        self._scheduler.add(request)

    def extend(self, request_id: str, payload: Payload) -> None:
        self._feed(request_id, lambda request: self._task.extend(request, payload))

    def finish_input(self, request_id: str) -> None:
        self._feed(request_id, self._task.finish_input)

    def abort(self, request_id: str) -> None:
        for request in self._scheduler.abort(request_id):
            self._leave_source(request)

    def step(self) -> Sequence[EngineOutput]:
        rows, due = self._step(self._runner) if self._ahead is None else self._step_ahead(self._ahead)
        self._task.running = len(self._scheduler.running)
        outputs = self._take(rows) if rows else []
        handed = [self._output(request, ended=False) for request in due]
        return outputs + [output for output in handed if output is not None]

    def _take(self, rows: Sequence[tuple[Request, list[int]]]) -> list[EngineOutput]:
        failed = [self._fail(request, NotFinite("the logits are")) for request, row in rows if row[0] == LOST]
        rows = [each for each in rows if each[1][0] != LOST] if failed else rows
        self._generated += len(rows)
        outputs = [self._output(request, ended) for request, ended in self._task.take_all(rows)]
        return failed + [output for output in outputs if output is not None]

    def _step(self, runner: Runner) -> tuple[Sequence[tuple[Request, list[int]]], Sequence[Request]]:
        chunks = self._scheduler.schedule()
        rows = runner.run(chunks)
        self._scheduler.complete(chunks)
        return [(chunk.request, row) for chunk, row in zip(chunks, rows, strict=True) if row is not None], ()

    def _step_ahead(self, runner: AheadRunner) -> tuple[Sequence[tuple[Request, list[int]]], Sequence[Request]]:
        """Launches the next step, then reads the one before, while the device goes on.

        Returns rows to take, and requests of whose rows there is something to hand on.
        """
        before, self._launched = self._launched, None
        if self._scheduler.repeat():
            self._launched = runner.repeat()
            return ((), ()) if before is None else self._quiet.take(before)
        self._quiet.hand_out()
        if chunks := self._scheduler.schedule():
            self._launched = runner.launch(chunks)
            self._scheduler.complete(chunks)
        return () if before is None else before.read(), ()

    def stats(self) -> dict[str, float]:
        return {
            "running": len(self._scheduler.running),
            "queued": len(self._scheduler.waiting),
            "kv_capacity_tokens": self._pool.capacity,
            "kv_used_tokens": self._scheduler.pages_needed * self._pool.page_size,
            "kv_peak_tokens": self._scheduler.most_pages_needed * self._pool.page_size,
            "kv_page_tokens": self._pool.page_size,
            "kv_bytes_per_token": self._pool.bytes_per_token,
            "kv_reusable_tokens": self._pool.cached * self._pool.page_size,
            "retractions": self._scheduler.retractions,
            "reused_tokens": self._scheduler.reused_tokens,
            "generated_rows": self._generated + self._quiet.handed_out,
            **({} if self._ahead is None else self._ahead.stats()),
            **({} if self._sources is None else {"source_places_used": self._sources.used}),
        }

    def _feed(self, request_id: str, take: Callable[[Request], None]) -> None:
        request = self._scheduler.find(request_id)
        if request is None:
            return
        try:
            with self._scheduler.changing(request):
                take(request)
        except (InvalidRequest, NotFinite):
            self._remove(request)
            raise

    def _fail(self, request: Request, error: NotFinite) -> EngineOutput:
        self._remove(request)
        return EngineOutput(request.id, error=error)

    def _remove(self, request: Request) -> None:
        self._scheduler.remove(request)
        self._leave_source(request)

    def _leave_source(self, request: Request) -> None:
        if self._sources is not None:
            self._sources.leave(request)

    def _output(self, request: Request, ended: bool) -> EngineOutput | None:
        try:
            chunk = self._task.chunk(request)
        except NotFinite as error:
            return self._fail(request, error)
        chunks = [] if chunk is None else [chunk]
        if ended and not request.followers:
            self._remove(request)
            return EngineOutput(request.id, chunks=chunks, result=self._task.result(request))
        if ended:
            if request.followers[0].source is not None:
                self._leave_source(request)
            self._scheduler.follow(request)
        return EngineOutput(request.id, chunks=chunks) if chunks else None
