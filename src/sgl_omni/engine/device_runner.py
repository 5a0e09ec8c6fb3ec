"""Launches steps on a device and reads them later: the host works on one step while the device is at the next."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from sgl_omni.engine.cross_attention import SourcePool
from sgl_omni.engine.device_rows import DeviceRows
from sgl_omni.engine.device_step import DeviceStep, StepInputs, step_size
from sgl_omni.engine.given_rows import GivenRows
from sgl_omni.engine.graphs import StepGraphs, can_capture, decode_buckets, prompt_buckets
from sgl_omni.engine.kv_cache import KVCache
from sgl_omni.engine.launched import Launched, OutputRing, StepTimes, WantedHidden
from sgl_omni.engine.model import StepModel
from sgl_omni.engine.pass_inputs import describe, gather_given, makes_tiles, tiles_last
from sgl_omni.engine.request import Chunk, Request
from sgl_omni.engine.row_memory import to_device

log = logging.getLogger("sgl_omni.engine")

_ADDED_PLACES = 64
"""Arriving rows kept ready for each request: more than the steps that follow one another without a look at it."""


@dataclass(frozen=True, slots=True, eq=False)
class _Pass:
    """A pass as it was last launched, which is all that a repetition needs.

    ``from_state``: no row was told its position, so that the same inputs run each request one row further.
    ``graph``: the one that it was.
    """

    owners: Sequence[tuple[Request, int]]
    rows: Sequence[int]
    inputs: StepInputs
    outputs_only: bool
    from_state: bool
    wanted: WantedHidden | None
    graph: _Graph | None = None


class _Graph(NamedTuple):
    """One of the captured steps."""

    graphs: StepGraphs
    bucket: int

    def replay(self) -> None:
        self.graphs.replay(self.bucket)


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
        embeds_prompts: bool = False,
        hands_hidden: bool = False,
        sources: SourcePool | None = None,
    ) -> None:
        """``cache`` has one page more than the pool, for padding. Graphs are captured here, for up to
        ``graph_batch`` decoding requests and up to ``graph_rows`` rows with prompts; 0 turns them off.
        ``takes_inputs``, ``embeds_prompts`` and ``hands_hidden``: what requests bring and may ask for; see ``Task``.
        ``sources``: where a model attends over encoders' outputs, the places of these."""
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
            seen_prompt=model.seen_prompt,
            added_places=_ADDED_PLACES,
            inputs_like=_inputs_like(model) if takes_inputs else None,
            kept_shape=model.kept_shape,
            begin_kept=model.begin_kept,
        )
        self._sources = sources
        self._step = DeviceStep(model, cache, self._rows, sources)
        self._continues_at = [-1] * max_rows
        self._outputs = OutputRing(max_rows, model.columns, cache.device)
        self._stream: torch.cuda.Stream | None = None
        self._last: _Pass | None = None
        self._repeated = 0
        self._times = StepTimes()
        self._graph_given: GivenRows | None = None
        self._prompt_graphs: StepGraphs | None = None
        self._decode_graphs: StepGraphs | None = None
        if graph_batch and can_capture(cache.device):
            batch = min(graph_batch, max_rows)
            self._capture(decode_buckets(batch), prompt_buckets(max(batch, graph_rows)), embeds_prompts)

    @property
    def graphs(self) -> Sequence[StepGraphs]:
        """Those of steps without prompts, and with them; none on a device that has no graphs."""
        return [graphs for graphs in (self._decode_graphs, self._prompt_graphs) if graphs is not None]

    @torch.inference_mode()
    def launch(self, chunks: Sequence[Chunk]) -> Launched:
        started = time.perf_counter()
        self._settle()
        if self._device.type == "cuda":
            self._stream = torch.cuda.current_stream(self._device)
        decodes: list[Chunk] = []
        prompts: list[Chunk] = []
        for chunk in chunks:
            self._enter(chunk.request)
            continues = chunk.length == 1 and self._continues_at[chunk.request.row] == chunk.start
            (decodes if continues else prompts).append(chunk)
        self._rows.flush()
        prompts = tiles_last(prompts)
        ordered = [*decodes, *prompts]
        through = [chunk for chunk in ordered if chunk.yields_output]
        for chunk in through:
            self._continues_at[chunk.request.row] = chunk.stop
        owners = [(chunk.request, chunk.request.sequence) for chunk in through]
        launched = self._run(owners, decodes, prompts)
        self._times.launching += time.perf_counter() - started
        return launched

    def repeat(self) -> Launched:
        """The last step again, each request one row further. It had decoding requests only."""
        last = self._last
        assert last is not None, "no step was launched before"
        # A graph alone makes no tensor; to enter inference mode for it would take as long as all the rest.
        is_graph_alone = last.graph is not None and last.from_state and last.wanted is None
        with nullcontext() if is_graph_alone else torch.inference_mode():
            return self._repeat(last)

    def _repeat(self, last: _Pass) -> Launched:
        started = time.perf_counter()
        if last.from_state:
            self._repeated += 1
            wanted = None if last.wanted is None else last.wanted.further(self._repeated)
            launched = self._hand_out(last.owners, self._run_again(last), wanted)
        else:  # an output that was run again after a retraction was the last row of its prompt
            next_rows = [Chunk(request, *self._next_row(request)) for request, _ in last.owners]
            launched = self._run(last.owners, next_rows, [])
            for row in last.rows:
                self._continues_at[row] += 1
        self._times.launching += time.perf_counter() - started
        return launched

    def stats(self) -> dict[str, float]:
        return {
            "steps": self._times.steps,
            "launch_seconds": self._times.launching,
            "wait_seconds": self._times.waiting,
            "graph_buckets": sum(len(graphs.buckets) for graphs in self.graphs),
            "graph_capture_seconds": sum(graphs.capture_seconds for graphs in self.graphs),
            "graph_bytes": sum(graphs.bytes for graphs in self.graphs),
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
        if self._sources is not None:
            self._sources.admit(request, self._model)
        if self._rows.follow(request):
            self._continues_at[request.row] = -1

    def _run(
        self, owners: Sequence[tuple[Request, int]], decodes: Sequence[Chunk], prompts: Sequence[Chunk]
    ) -> Launched:
        total = len(decodes) + sum(chunk.length for chunk in prompts)
        more = gather_given(len(decodes), prompts, self._axes, self._device)
        captured = more is None or (self._graph_given is not None and more.between is None)
        has_tiles = any(makes_tiles(chunk) for chunk in prompts)
        outputs_only = self._model.embeds_outputs_apart and not prompts
        graph = self._graph_for(total, bool(prompts), has_tiles) if captured else None
        n = graph.bucket if graph else total
        s = min(n, self._max_rows) if graph else len(owners)
        flat = describe(decodes, prompts, n, s, columns=self._columns, padding=self._rows.padding)
        rows = [request.row for request, _ in owners]
        wanted = WantedHidden.of([*decodes, *prompts], self._device) if self._hands_hidden else None
        if graph is not None:
            self._graph_inputs[: len(flat)].copy_(to_device(flat, self._device), non_blocking=True)
            if self._graph_given is not None:
                self._graph_given.put(more)
            inputs = StepInputs.of(self._graph_inputs, n, self._columns, s)
            self._last = _Pass(owners, rows, inputs, outputs_only, not prompts, wanted, graph)
            graph.replay()
            return self._hand_out(owners, self._graph_hidden, wanted)
        inputs = StepInputs.of(to_device(flat, self._device), n, self._columns, s)
        self._last = _Pass(owners, rows, inputs, outputs_only, not prompts, wanted)
        output = self._step(inputs, more, outputs_only=outputs_only, has_tiles=has_tiles)
        self._outputs.write(output.ids)
        return self._hand_out(owners, output.hidden, wanted)

    def _graph_for(self, rows: int, has_prompts: bool, has_tiles: bool) -> _Graph | None:
        """The smallest captured step that does for so many rows. Short prompts may be among those that decode, unless
        outputs alone are embedded there."""
        with_tiles = has_tiles or (has_prompts and self._model.embeds_outputs_apart)
        for graphs in (None if with_tiles else self._decode_graphs, self._prompt_graphs):
            if graphs is not None and (bucket := graphs.bucket_for(rows)) is not None:
                return _Graph(graphs, bucket)
        return None

    def _run_again(self, last: _Pass) -> Tensor:
        if last.graph is not None:
            last.graph.replay()
            return self._graph_hidden
        output = self._step(last.inputs, outputs_only=last.outputs_only)
        self._outputs.write(output.ids)
        return output.hidden

    def _hand_out(
        self, owners: Sequence[tuple[Request, int]], hidden_states: Tensor, wanted: WantedHidden | None
    ) -> Launched:
        """Of the step that was launched last; its first outputs are those of the owners."""
        self._times.steps += 1
        hidden = None if wanted is None else hidden_states[wanted.at]
        if hidden is not None and self._stream is not None:
            # These go on to other stages as they are, so each step has pinned memory of its own.
            kept = torch.empty(hidden.shape, dtype=hidden.dtype, pin_memory=True)
            hidden = kept.copy_(hidden, non_blocking=True)
        rows, event = self._outputs.follow(len(owners), self._stream)
        return Launched(owners, rows, event, self._times, self._model, wanted, hidden)

    @torch.inference_mode()
    def _capture(self, decodes: Sequence[int], prompts: Sequence[int], embeds_prompts: bool) -> None:
        largest = max(prompts)
        size = step_size(largest, self._columns, self._max_rows)
        self._graph_inputs = torch.zeros(size, dtype=torch.int64, device=self._device)
        self._graph_hidden = torch.empty(0, device=self._device)
        if embeds_prompts:
            self._graph_given = GivenRows(largest, self._axes, _inputs_like(self._model))
        given = self._graph_given

        def step(n: int, *, outputs_only: bool = False, has_tiles: bool = False) -> None:
            s = min(n, self._max_rows)
            inputs = StepInputs.of(self._graph_inputs, n, self._columns, s)
            brought = None if given is None or outputs_only else given.of(n)
            output = self._step(inputs, brought, outputs_only=outputs_only, has_tiles=has_tiles)
            self._outputs.write(output.ids)
            if self._hands_hidden:
                if not len(self._graph_hidden):  # the first is the largest, and not captured yet
                    self._graph_hidden = torch.empty_like(output.hidden)
                self._graph_hidden[:n] = output.hidden

        self._model.verify_weights()
        # Zeros are row 0 at position 0, which is nobody's yet; its page is the scratch page.
        self._prompt_graphs = StepGraphs(partial(step, has_tiles=True), prompts)
        one_row_each = partial(step, outputs_only=self._model.embeds_outputs_apart)
        self._decode_graphs = StepGraphs(one_row_each, decodes, self._prompt_graphs)
        self._outputs.restart()
        log.info(
            "captured CUDA graphs for steps of %s rows, and with prompts of %s, in %.1f s",
            *(", ".join(map(str, graphs.buckets)) for graphs in self.graphs),
            sum(graphs.capture_seconds for graphs in self.graphs),
        )


def _inputs_like(model: StepModel) -> Tensor:
    """What a row's input looks like: [1, hidden]."""
    return model.embed_ids(torch.zeros(1, model.columns, dtype=torch.int64, device=model.device))
