"""From the chunks that the scheduler chose to the tensors of a pass in device rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sgl_omni.engine.device_step import step_size
from sgl_omni.engine.given_rows import Given
from sgl_omni.engine.inputs import added_rows
from sgl_omni.engine.inserted import layer_rows
from sgl_omni.engine.request import Chunk
from sgl_omni.engine.row_memory import send, to_device
from sgl_omni.engine.tiles import LEAST_ROWS, cut


def describe(
    decodes: Sequence[Chunk], prompts: Sequence[Chunk], n: int, s: int, *, columns: int, padding: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The inputs of a pass of n rows of which s yield, as one array, laid out as ``StepInputs.of`` reads it.

    Rows to spare are those of state row ``padding``. Prompts that make tiles come last: see ``tiles_last``.
    """
    flat = np.zeros(step_size(n, columns, s), dtype=np.int64)
    rows, given = flat[:n], flat[n : 2 * n]
    ids = flat[2 * n : (2 + columns) * n].reshape(n, columns)
    ends, targets, tiled, tiles = np.split(flat[(2 + columns) * n :], [s, 2 * s, 2 * s + 2])
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
    if lengths := [chunk.length for chunk in prompts if makes_tiles(chunk)]:
        tiled[:] = at - sum(lengths), at
        cut(at - sum(lengths), lengths, tiles.reshape(-1, 2))
    return flat


def makes_tiles(chunk: Chunk) -> bool:
    return chunk.length >= LEAST_ROWS


def tiles_last(prompts: Sequence[Chunk]) -> list[Chunk]:
    """Those attended row by row before those that make tiles, else as they are."""
    return sorted(prompts, key=makes_tiles)


def gather_given(first: int, prompts: Sequence[Chunk], axes: int, device: torch.device) -> Given | None:
    """What the prompts of the pass bring besides ids, if anything; their rows begin at ``first``."""
    if not any(_brings_more(chunk) for chunk in prompts):
        return None
    places: list[int] = []
    parts: list[Tensor] = []
    added_places: list[int] = []
    added: list[Tensor] = []
    total = first + sum(chunk.length for chunk in prompts)
    positions = torch.full((axes, total), -1, dtype=torch.int64)
    at = first
    for chunk in prompts:
        prompt, stop = chunk.request.prompt, min(chunk.stop, chunk.request.prompt_length)
        rows = max(0, stop - chunk.start)
        if rows and prompt.embeddings is not None:
            places += range(at, at + rows)
            parts.append(prompt.embeddings[chunk.start : stop])
        if rows and prompt.inserted is not None:
            own_places, own_rows = prompt.inserted.rows_between(chunk.start, stop)
            places += (own_places + at).tolist()
            parts.append(own_rows)
        if rows:
            own = (
                torch.arange(chunk.start, stop) if prompt.positions is None else prompt.positions[:, chunk.start : stop]
            )
            positions[:, at : at + rows] = own
        inputs, again = chunk.request.inputs, range(max(chunk.start, chunk.request.prompt_length), chunk.stop)
        if inputs is not None and again:
            added_places += range(at + again.start - chunk.start, at + chunk.length)
            steps = to_device(np.asarray(again) - chunk.request.prompt_length, inputs.rows.device)
            added.append(added_rows(inputs.rows, inputs.count, steps))
        at += chunk.length
    return Given(
        at=to_device(np.asarray(places), device) if places else None,
        embeddings=torch.cat([send(part, device) for part in parts]) if parts else None,
        positions=send(positions, device),
        added_at=to_device(np.asarray(added_places), device) if added else None,
        added=torch.cat([send(part, device) for part in added]) if added else None,
        between=layer_rows(prompts, device, first),
    )


def _brings_more(chunk: Chunk) -> bool:
    """Whether its rows are made of more than ids at the next positions."""
    request = chunk.request
    again = request.inputs is not None and chunk.stop > request.prompt_length
    prompt = request.prompt
    return again or any(part is not None for part in (prompt.embeddings, prompt.positions, prompt.inserted))


def _fill_ids(ids: np.ndarray[tuple[int, int], np.dtype[np.int64]], chunk: Chunk) -> None:
    """Prompt ids, then outputs that are run again. Rows of given embeddings stay as they are."""
    request, split = chunk.request, min(chunk.stop, chunk.request.prompt_length)
    count = max(0, split - chunk.start)
    if count and request.prompt.ids is not None:
        ids[:count] = request.prompt.ids[chunk.start : split].numpy()
    if chunk.stop > split:
        first = max(chunk.start, split) - request.prompt_length
        ids[count:] = request.outputs.array(first, chunk.stop - request.prompt_length)
