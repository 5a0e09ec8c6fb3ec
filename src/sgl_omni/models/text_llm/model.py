"""The device side: a decoder with one head, and the repetition penalty over all that a request has in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from sgl_omni.engine.decoder_config import DecoderConfig
from sgl_omni.engine.model import CausalModel
from sgl_omni.engine.repetition import penalise_requests
from sgl_omni.engine.request import Request
from sgl_omni.engine.row_state import RowState


class TextModel(CausalModel):
    """A ``CausalModel`` whose repetition penalty counts the prompt too, as language models are used to."""

    seen_prompt = True

    def __init__(self, config: DecoderConfig, **options: Any) -> None:
        """``options``: those of ``CausalModel``."""
        super().__init__(config, **options)
        self.seen_vocabulary = config.vocab_size

    def rule(self, logits: Tensor, requests: Sequence[Request]) -> Tensor:
        return penalise_requests(logits, requests, prompts=True)

    def rule_rows(self, logits: Tensor, state: RowState) -> Tensor:
        return state.penalised(logits)
