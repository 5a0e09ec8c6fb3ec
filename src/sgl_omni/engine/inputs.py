"""Inputs that arrive over time: the rest of a prompt, and rows that are added to the inputs of a request's outputs.

A talker is such a model: while it speaks, a thinker still writes. The input of its output s is the output's own
embedding plus added row s. Until that row is there the request does not run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sgl_omni.errors import InvalidRequest

if TYPE_CHECKING:
    from sgl_omni.engine.request import Chunk, Prompt, Request
    from sgl_omni.engine.task import InputSpec


class ArrivingInput:
    """What has arrived for one request. Once the input has ended, ``fallback`` is added to all further outputs.

    ``rows`` [places, hidden]: the first ``count`` have arrived, and the one after them is the fallback. While the
    prompt is open, the parts that came after its beginning are kept in ``prompt_parts``, and the request waits.
    """

    def __init__(self, fallback: Tensor, *, prompt_open: bool = False) -> None:
        """``fallback`` [hidden], on the device and of the kind that the rows shall be.

        The host's is best for rows that come one at a time: the engine sends those of all requests together.
        """
        self.rows = fallback[None].clone()
        self.count = 0
        self.ended = False
        self.prompt_open = prompt_open
        self.prompt_parts: list[Prompt] = []

    def is_ready(self, outputs: int) -> bool:
        """Whether a request of so many outputs can go on to the next."""
        return not self.prompt_open and (self.ended or outputs <= self.count)

    def append(self, rows: Tensor) -> None:
        """Rows [n, hidden] for the outputs that follow. Raises ``InvalidRequest`` before the end of the prompt."""
        if self.prompt_open:
            raise InvalidRequest("rows for outputs arrived before the end of the prompt", param="added_embeddings")
        count, fallback = self.count + len(rows), self.rows[self.count].clone()
        if count >= len(self.rows):
            grown = self.rows.new_empty(2 * count + 1, self.rows.shape[1])
            grown[: self.count] = self.rows[: self.count]
            self.rows = grown
        self.rows[self.count : count] = rows.to(self.rows)
        self.rows[count] = fallback
        self.count = count


def begin_input(payload: dict[str, Any], fallback: Tensor, spec: InputSpec) -> ArrivingInput:
    """Reads ``input_open`` (rows for outputs may come later), ``prompt_open`` (so may more of the prompt), and rows.

    Raises ``InvalidRequest`` for rows of another shape.
    """
    is_open, prompt_open = _flag(payload, "input_open"), _flag(payload, "prompt_open")
    inputs = ArrivingInput(fallback, prompt_open=prompt_open)
    _take_added(inputs, payload, spec)
    inputs.ended = not is_open and not prompt_open
    return inputs


def extend_input(request: Request, payload: dict[str, Any], spec: InputSpec) -> None:
    """Takes more of the prompt (``prompt_open: false`` with its last part) and ``added_embeddings`` [n, hidden].

    Raises ``InvalidRequest`` for what does not fit, or comes too late.
    """
    inputs = request.inputs
    if inputs is None or inputs.ended:
        raise InvalidRequest("the request's input has ended; nothing can be added to it", param="input_open")
    if payload.get("prompt_ids") is not None or payload.get("prompt_embeddings") is not None:
        if not inputs.prompt_open:
            raise InvalidRequest("more of the prompt arrived after its end", param="prompt_open")
        request.extend_prompt(spec.prompt(payload))
    if payload.get("prompt_open") is False and inputs.prompt_open:
        request.close_prompt()
    _take_added(inputs, payload, spec)


def end_input(request: Request) -> None:
    """Nothing more will come. Raises ``InvalidRequest`` where it was never open."""
    if request.inputs is None:
        raise InvalidRequest("the request's input was complete from the start", param="input_open")
    if request.inputs.prompt_open:
        request.close_prompt()
    request.inputs.ended = True


def _take_added(inputs: ArrivingInput, payload: dict[str, Any], spec: InputSpec) -> None:
    added = payload.get("added_embeddings")
    if added is not None:
        inputs.append(spec.finite_embeddings(added, "added_embeddings"))


def added_rows(rows: Tensor, count: int, steps: Tensor) -> Tensor:
    """What is added to the inputs of outputs ``steps`` int64 [n]: rows [n, hidden] of ``ArrivingInput.rows``."""
    return rows[steps.clamp(max=count)]


def add_arrived(x: Tensor, chunks: Sequence[Chunk]) -> Tensor:
    """Adds what has arrived to the outputs among the chunks' input rows x [n, hidden]."""
    row = 0
    for chunk in chunks:
        request = chunk.request
        first = max(chunk.start, request.prompt_length)
        if request.inputs is not None and first < chunk.stop:
            steps = torch.arange(first, chunk.stop, device=request.inputs.rows.device) - request.prompt_length
            place = row + first - chunk.start
            x[place : row + chunk.length] += added_rows(request.inputs.rows, request.inputs.count, steps).to(x)
        row += chunk.length
    return x


def _flag(payload: dict[str, Any], key: str) -> bool:
    value = payload.get(key)
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(f"{key} must be true or false, not {value!r}", param=key)
    return bool(value)
