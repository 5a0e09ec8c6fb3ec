"""The entry stage: a conversation or a text to the engine's prompt and options. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sgl_omni.errors import InvalidRequest
from sgl_omni.models.text_llm.generation import GenerationDefaults
from sgl_omni.runtime.stage import Payload, Request
from sgl_omni.text.tokenizer import TextTokenizer

_PASSED_ON = ("seed", "max_new_tokens", "ignore_eos", "stop", "stream")


class TextPreprocessor:
    """``(payload, request) -> payload``: a chat task's payload to what ``TextTask`` takes."""

    def __init__(self, tokenizer: TextTokenizer, defaults: GenerationDefaults) -> None:
        self._tokenizer = tokenizer
        self._defaults = defaults

    def __call__(self, payload: Payload, request: Request) -> Payload:
        """Raises ``InvalidRequest`` for what cannot be a prompt of this model."""
        field = "prompt" if "prompt" in payload else "messages"
        ids = self._document(payload["prompt"]) if field == "prompt" else self._conversation(payload)
        if not ids:
            raise InvalidRequest("the prompt is empty", field)
        return {
            "prompt_ids": np.asarray(ids, dtype=np.int64),
            "prompt_field": field,
            **self._defaults.fill(payload),
            **{name: payload[name] for name in _PASSED_ON if payload.get(name) is not None},
        }

    def _document(self, prompt: str | Sequence[int]) -> Sequence[int]:
        return self._tokenizer.encode_document(prompt) if isinstance(prompt, str) else prompt

    def _conversation(self, payload: Payload) -> list[int]:
        turns = [{"role": turn["role"], "content": joined(turn["content"])} for turn in payload["messages"]]
        return self._tokenizer.encode(self._tokenizer.chat(turns, **(payload.get("template") or {})))


def joined(parts: Sequence[dict[str, Any]]) -> str:
    """The texts of a turn, a line each. Raises ``InvalidRequest`` for a part that is no text."""
    kinds = {part["type"] for part in parts} - {"text"}
    if kinds:
        raise InvalidRequest(f"this model reads text, not {', '.join(sorted(kinds))}", "messages")
    return "\n".join(part["text"] for part in parts)
