"""Launches steps on a device and reads them later: the host works on one step while the device is at the next."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sgl_omni.engine.device_rows import DeviceRows
from sgl_omni.engine.device_step import DeviceStep, Given, StepInputs, StepOutput, step_size
from sgl_omni.engine.graphs import StepGraphs, bucket_rows
from sgl_omni.engine.hidden import put_hidden
from sgl_omni.engine.inputs import added_rows
from sgl_omni.engine.kv_cache import KVCache
from sgl_omni.engine.model import StepModel
from sgl_omni.engine.request import Chunk, Request
from sgl_omni.engine.row_memory import to_device

_TILED_ROWS = 16
"""A prompt chunk of fewer rows is attended row by row."""
_ADDED_PLACES = 64
"""Arriving rows kept ready for each request: more than the steps that follow one another without a look at it."""
_BUFFERS = 3
"""One that is read, one that is written, and one to spare."""


@dataclass(slots=True)
class StepTimes:
    """Seconds that the host took to launch steps, and that it waited for them."""

    steps: int = 0
    launching: float = 0.0
    waiting: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class _Wanted:
    """Hidden states that requests of a pass ask for.

    ``spans``: request, its sequence then, first row of the sequence, and rows; ``at`` int64: these rows of the pass.
    """

    spans: Sequence[tuple[Request, int, int, int]]
    at: Tensor

    def further(self, rows: int) -> _Wanted:
        """What a repetition of the pass has, so many rows later."""
        return _Wanted([(request, turn, start + rows, count) for request, turn, start, count in self.spans], self.at)


@dataclass(frozen=True, slots=True, eq=False)
class Launched:
    """A step under way."""

    owners: Sequence[tuple[Request, int]]
    _rows: Tensor
    _event: torch.cuda.Event | None
    _times: StepTimes
    _model: StepModel
    _wanted: _Wanted | None
    _hidden: Tensor | None

    def rows(self) -> npt.NDArray[np.int64]:
        if self._event is not None:
            started = time.perf_counter()
            self._event.synchronize()
            self._times.waiting += time.perf_counter() - started
        rows: npt.NDArray[np.int64] = self._rows.numpy()
        return rows

    def read(self) -> list[tuple[Request, list[int]]]:
        rows: list[list[int]] = self.rows().tolist()
        if self._wanted is not None and self._hidden is not None:
            parts = self._hidden.split([count for *_, count in self._wanted.spans])
            for (request, sequence, start, _), part in zip(self._wanted.spans, parts, strict=True):
                if request.sequence == sequence and request.hidden is not None:
                    put_hidden(self._model, request.hidden, start, part)
        return [
            (request, row)
            for (request, sequence), row in zip(self.owners, rows, strict=True)
            if request.sequence == sequence
        ]


@dataclass(frozen=True, slots=True, eq=False)
class _Pass:
    """A pass as it was last launched, which is all that a repetition needs.

    ``from_state``: no row was told its position, so that the same inputs run each request one row further.
    """

    owners: Sequence[tuple[Request, int]]
    rows: Sequence[int]
    inputs: StepInputs
    outputs_only: bool
    from_state: bool
    wanted: _Wanted | None
    bucket: int | None


class DeviceRunner:
    """Runs chunks in fixed device rows: by a CUDA graph where one is large enough, else kernel by kernel."""

    def __init__(
        self,
        model: StepModel,
        cache: KVCache,
        *,
        max_rows: int,
        pages_per_row: int,
        graph_batch: int = 0,
        graph_rows: int = 0,
        takes_inputs: bool = False,
        hands_hidden: bool = False,
    ) -> None:
        """``cache`` has one page more than the pool, for padding. Graphs are captured here, for up to
        ``graph_batch`` decoding requests and up to ``graph_rows`` rows with prompts; 0 turns them off.
        ``takes_inputs`` and ``hands_hidden``: what requests may ask for; see ``Task``."""
        self._model = model
        self._columns = model.columns
        self._device = cache.device
        self._axes = model.axes
        self._max_rows = max_rows
        self._hands_hidden = hands_hidden
        self._rows = DeviceRows(
            max_rows,
            model.columns,
            pages_per_row,
            cache.num_pages - 1,
            cache.device,
            seen_vocabulary=model.seen_vocabulary,
            added_places=_ADDED_PLACES,
            inputs_like=_inputs_like(model) if takes_inputs else None,
        )
        self._step = DeviceStep(model, cache, self._rows)
        self._continues_at = [-1] * max_rows
        self._chosen = [self._output_buffer() for _ in range(_BUFFERS)]
        self._turn = 0
        self._last: _Pass | None = None
        self._repeated = 0
        self._times = StepTimes()
        self._graphs: StepGraphs | None = None
        self._output_graphs: StepGraphs | None = None
        if graph_batch and cache.device.type == "cuda":
            self._capture(bucket_rows(min(graph_batch, max_rows), graph_rows))

    @property
    def graphs(self) -> StepGraphs | None:
        return self._graphs

    @property
    def _all_graphs(self) -> list[StepGraphs]:
        return [graphs for graphs in (self._graphs, self._output_graphs) if graphs is not None]

    @torch.inference_mode()
    def launch(self, chunks: Sequence[Chunk]) -> Launched:
        started = time.perf_counter()
        self._settle()
        decodes: list[Chunk] = []
        prompts: list[Chunk] = []
        for chunk in chunks:
            self._enter(chunk.request)
            continues = chunk.length == 1 and self._continues_at[chunk.request.row] == chunk.start
            (decodes if continues else prompts).append(chunk)
        self._rows.flush()
        ordered = [*decodes, *prompts]
        through = [chunk for chunk in ordered if chunk.yields_output]
        for chunk in through:
            self._continues_at[chunk.request.row] = chunk.stop
        owners = [(chunk.request, chunk.request.sequence) for chunk in through]
        launched = self._run(owners, decodes, prompts)
        self._times.launching += time.perf_counter() - started
        return launched

    @torch.inference_mode()
    def repeat(self) -> Launched:
        """The last step again, each request one row further. It had decoding requests only."""
        started = time.perf_counter()
        last = self._last
        assert last is not None, "no step was launched before"
        if not last.from_state:  # an output that was run again after a retraction was the last row of its prompt
            next_rows = [Chunk(request, *self._next_row(request)) for request, _ in last.owners]
            launched = self._run(last.owners, next_rows, [])
        elif last.bucket is not None:
            output = self._replay(last.bucket, last.outputs_only)
            launched = self._hand_out(last.owners, output, last.wanted and last.wanted.further(self._repeated + 1))
        else:
            output = self._step(last.inputs, outputs_only=last.outputs_only)
            launched = self._hand_out(last.owners, output, last.wanted and last.wanted.further(self._repeated + 1))
        self._repeated += 1
        self._times.launching += time.perf_counter() - started
        return launched

    def stats(self) -> dict[str, float]:
        return {
            "steps": self._times.steps,
            "launch_seconds": self._times.launching,
            "wait_seconds": self._times.waiting,
            "graph_buckets": sum(len(graphs.buckets) for graphs in self._all_graphs),
            "graph_capture_seconds": sum(graphs.capture_seconds for graphs in self._all_graphs),
        }

    def _settle(self) -> None:
        """Notes how far the rows of the last pass have come by repetitions."""
        if self._last is not None and self._repeated:
            for row in self._last.rows:
                self._continues_at[row] += self._repeated
        self._repeated = 0

    def _next_row(self, request: Request) -> tuple[int, int]:
        start = self._continues_at[request.row]
        return start, start + 1

    def _enter(self, request: Request) -> None:
        if self._rows.follow(request):
            self._continues_at[request.row] = -1

    def _run(
        self, owners: Sequence[tuple[Request, int]], decodes: Sequence[Chunk], prompts: Sequence[Chunk]
    ) -> Launched:
        total = len(decodes) + sum(chunk.length for chunk in prompts)
        given = self._given(len(decodes), prompts)
        bucket = self._graphs.bucket_for(total) if self._graphs is not None and given is None else None
        n = bucket or total
        s = min(n, self._max_rows) if bucket else len(owners)
        flat = self._describe(decodes, prompts, n, s)
        rows = [request.row for request, _ in owners]
        outputs_only = self._model.embeds_outputs_apart and not prompts
        wanted = self._find_wanted([*decodes, *prompts])
        if bucket is not None:
            self._graph_inputs[: len(flat)].copy_(to_device(flat, self._device), non_blocking=True)
            inputs = StepInputs.of(self._graph_inputs, n, self._columns, s)
            self._last = _Pass(owners, rows, inputs, outputs_only, not prompts, wanted, bucket)
            return self._hand_out(owners, self._replay(bucket, outputs_only), wanted)
        inputs = StepInputs.of(to_device(flat, self._device), n, self._columns, s)
        self._last = _Pass(owners, rows, inputs, outputs_only, not prompts, wanted, None)
        output = self._step(inputs, _tiled(decodes, prompts), given, outputs_only=outputs_only)
        return self._hand_out(owners, output, wanted)

    def _replay(self, bucket: int, outputs_only: bool) -> StepOutput:
        graphs = self._output_graphs if outputs_only else self._graphs
        assert graphs is not None
        graphs.replay(bucket)
        return StepOutput(self._graph_chosen, self._graph_hidden)

    def _find_wanted(self, chunks: Sequence[Chunk]) -> _Wanted | None:
        """Whose hidden states are asked for; the chunks' rows follow one another in the pass."""
        if not self._hands_hidden or all(chunk.request.hidden is None for chunk in chunks):
            return None
        spans: list[tuple[Request, int, int, int]] = []
        places: list[int] = []
        row = 0
        for chunk in chunks:
            if chunk.request.hidden is not None:
                spans.append((chunk.request, chunk.request.sequence, chunk.start, chunk.length))
                places += range(row, row + chunk.length)
            row += chunk.length
        return _Wanted(spans, to_device(np.asarray(places), self._device))

    def _hand_out(self, owners: Sequence[tuple[Request, int]], output: StepOutput, wanted: _Wanted | None) -> Launched:
        self._times.steps += 1
        count = len(owners)
        hidden = None if wanted is None else output.hidden[wanted.at]
        if self._device.type != "cuda":
            return Launched(owners, output.ids[:count], None, self._times, self._model, wanted, hidden)
        self._turn = (self._turn + 1) % _BUFFERS
        rows = self._chosen[self._turn][:count]
        rows.copy_(output.ids[:count], non_blocking=True)
        if hidden is not None:
            # These go on to other stages as they are, so each step has pinned memory of its own.
            kept = torch.empty(hidden.shape, dtype=hidden.dtype, pin_memory=True)
            hidden = kept.copy_(hidden, non_blocking=True)
        event = torch.cuda.Event(blocking=True)
        event.record()
        return Launched(owners, rows, event, self._times, self._model, wanted, hidden)

    def _describe(
        self, decodes: Sequence[Chunk], prompts: Sequence[Chunk], n: int, s: int
    ) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The pass's inputs as one array, laid out as ``StepInputs.of`` reads it. Rows to spare are padding's."""
        columns, padding = self._columns, self._rows.padding
        flat = np.zeros(step_size(n, columns, s), dtype=np.int64)
        rows, given = flat[:n], flat[n : 2 * n]
        ids = flat[2 * n : (2 + columns) * n].reshape(n, columns)
        ends, targets = flat[-2 * s : -s] if s else flat[:0], flat[-s:] if s else flat[:0]
        rows.fill(padding)
        targets.fill(padding)
        count = len(decodes)
        rows[:count] = [chunk.request.row for chunk in decodes]
        given[:count] = -1
        ends[:count] = np.arange(count)
        targets[:count] = rows[:count]
        at, yielding = count, count
        for chunk in prompts:
            stop = at + chunk.length
            rows[at:stop] = chunk.request.row
            given[at:stop] = np.arange(chunk.start, chunk.stop)
            _fill_ids(ids[at:stop], chunk)
            if chunk.yields_output:
                ends[yielding], targets[yielding] = stop - 1, chunk.request.row
                yielding += 1
            at = stop
        return flat

    def _given(self, first: int, prompts: Sequence[Chunk]) -> Given | None:
        """What the prompts of the pass bring besides ids, if anything; their rows begin at ``first``."""
        if not any(_brings_more(chunk) for chunk in prompts):
            return None
        places: list[int] = []
        parts: list[Tensor] = []
        added_places: list[int] = []
        added: list[Tensor] = []
        total = first + sum(chunk.length for chunk in prompts)
        positions = torch.full((self._axes, total), -1, dtype=torch.int64)
        at = first
        for chunk in prompts:
            prompt, stop = chunk.request.prompt, min(chunk.stop, chunk.request.prompt_length)
            rows = max(0, stop - chunk.start)
            if rows and prompt.embeddings is not None:
                places += range(at, at + rows)
                parts.append(prompt.embeddings[chunk.start : stop])
            if rows:
                own = (
                    torch.arange(chunk.start, stop)
                    if prompt.positions is None
                    else prompt.positions[:, chunk.start : stop]
                )
                positions[:, at : at + rows] = own
            inputs, again = chunk.request.inputs, range(max(chunk.start, chunk.request.prompt_length), chunk.stop)
            if inputs is not None and again:
                added_places += range(at + again.start - chunk.start, at + chunk.length)
                count = torch.tensor(inputs.count, device=inputs.rows.device)
                steps = torch.tensor(again, device=inputs.rows.device) - chunk.request.prompt_length
                added.append(added_rows(inputs.rows, count, steps))
            at += chunk.length
        return Given(
            at=torch.tensor(places, device=self._device) if places else None,
            embeddings=torch.cat([part.to(self._device) for part in parts]) if parts else None,
            positions=positions.to(self._device),
            added_at=torch.tensor(added_places, device=self._device) if added else None,
            added=torch.cat([part.to(self._device) for part in added]) if added else None,
        )

    @torch.inference_mode()
    def _capture(self, buckets: Sequence[int]) -> None:
        largest = max(buckets)
        size = step_size(largest, self._columns, self._max_rows)
        self._graph_inputs = torch.zeros(size, dtype=torch.int64, device=self._device)
        self._graph_chosen = torch.zeros(self._max_rows, self._columns, dtype=torch.int64, device=self._device)
        self._graph_hidden = torch.empty(0, device=self._device)

        def step(n: int, *, outputs_only: bool = False) -> None:
            s = min(n, self._max_rows)
            inputs = StepInputs.of(self._graph_inputs, n, self._columns, s)
            output = self._step(inputs, outputs_only=outputs_only)
            self._graph_chosen[:s] = output.ids
            if self._hands_hidden:
                if not len(self._graph_hidden):  # the first is the largest, and not captured yet
                    self._graph_hidden = torch.empty_like(output.hidden)
                self._graph_hidden[:n] = output.hidden

        self._model.verify_weights()
        # Zeros are row 0 at position 0, which is nobody's yet; its page is the scratch page.
        self._graphs = StepGraphs(step, buckets)
        if self._model.embeds_outputs_apart:
            most = bisect_left(buckets, self._max_rows) + 1  # a step of outputs alone has one row a request
            self._output_graphs = StepGraphs(partial(step, outputs_only=True), buckets[:most])

    def _output_buffer(self) -> Tensor:
        buffer = torch.zeros(self._max_rows, self._columns, dtype=torch.int64)
        return buffer.pin_memory() if self._device.type == "cuda" else buffer


def _inputs_like(model: StepModel) -> Tensor:
    """What a row's input looks like: [1, hidden]."""
    return model.embed_ids(torch.zeros(1, model.columns, dtype=torch.int64, device=model.device))


def _brings_more(chunk: Chunk) -> bool:
    """Whether its rows are made of more than ids at the next positions."""
    request = chunk.request
    again = request.inputs is not None and chunk.stop > request.prompt_length
    return again or request.prompt.embeddings is not None or request.prompt.positions is not None


def _tiled(decodes: Sequence[Chunk], prompts: Sequence[Chunk]) -> list[tuple[int, int]]:
    """Runs of rows for the tiled kernel; all rows behind the first run must be in one."""
    spans, at = [], len(decodes)
    for chunk in prompts:
        if spans or chunk.length >= _TILED_ROWS:
            spans.append((at, chunk.length))
        at += chunk.length
    return spans


def _fill_ids(ids: np.ndarray[tuple[int, int], np.dtype[np.int64]], chunk: Chunk) -> None:
    """Prompt ids, then outputs that are run again. Rows of given embeddings stay as they are."""
    request, split = chunk.request, min(chunk.stop, chunk.request.prompt_length)
    count = max(0, split - chunk.start)
    if count and request.prompt.ids is not None:
        ids[:count] = request.prompt.ids[chunk.start : split].numpy()
    if chunk.stop > split:
        first = max(chunk.start, split) - request.prompt_length
        ids[count:] = request.outputs[first : chunk.stop - request.prompt_length]
