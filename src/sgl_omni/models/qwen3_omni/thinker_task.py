"""The host side of the thinker: text with the encoders' rows in, tokens out, and hidden states for the talker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sgl_omni.engine.hidden import HiddenRows
from sgl_omni.engine.interface import Payload
from sgl_omni.engine.request import Request
from sgl_omni.engine.task import InputSpec
from sgl_omni.models.text_llm.task import Answer, TextTask
from sgl_omni.text.tokenizer import TextTokenizer


@dataclass(slots=True)
class RowsForTalker(HiddenRows):
    """Hidden states on their way to the talker, and what it is told with the first of them."""

    speech: Payload | None = None


class ThinkerTask(TextTask):
    """``TextTask`` whose prompts may have rows inserted, and that tells the talker what it is to speak.

    With ``speech`` in the payload, chunks have ``hidden_states`` [rows, 2, hidden] of the rows run since the chunk
    before, the inputs of layer 0 and of the talker's ``accept_layer``; the first has ``speech`` itself too. Rows of
    tokens that may belong to a stop text wait until it is known, and are never handed on where they do.
    """

    hands_hidden = True

    def __init__(
        self,
        inputs: InputSpec,
        tokenizer: TextTokenizer,
        *,
        kept_layers: Sequence[int],
        accept_layer: int,
        **options: Any,
    ) -> None:
        """``kept_layers``: those of the model. ``options``: those of ``TextTask``."""
        super().__init__(inputs, tokenizer, **options)
        self._kept_layers = tuple(kept_layers)
        self._layers = (0, accept_layer)

    def parse(self, request_id: str, payload: Payload) -> Request:
        request = super().parse(request_id, payload)
        if payload.get("speech") is not None:
            HiddenRows.parse(self._layers, self._kept_layers)
            request.hidden = RowsForTalker(self._layers, speech=payload["speech"])
        return request

    def chunk(self, request: Request) -> Payload | None:
        made = super().chunk(request)
        hidden = request.hidden
        rows = None if hidden is None else hidden.take(_rows_before_stops(request))
        if rows is None or not isinstance(hidden, RowsForTalker):
            return made
        made = {"token_ids": [], **(made or {}), "hidden_states": rows}
        if hidden.speech is not None:
            made["speech"], hidden.speech = hidden.speech, None
        return made


def _rows_before_stops(request: Request) -> int | None:
    """Rows of the prompt and of the tokens that surely come before a stop text; none where there are no such texts."""
    answer: Answer = request.task
    if answer.stops is None:
        return None
    if request.finish_reason is not None:
        answer.end()
    return request.prompt_length + answer.clear_tokens
