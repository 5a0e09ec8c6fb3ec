"""The prompt of one window: the caller's context, places for the audio, and the language where it is given."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sgl_omni.text.tokenizer import TextTokenizer

MARK = "<asr_text>"
"""Ends what an answer says about its language, and begins its text."""

SPECIALS = ("<|im_start|>", "<|im_end|>", "<|audio_start|>", "<|audio_end|>", MARK)


@dataclass(frozen=True, slots=True)
class WindowPrompt:
    """``ids`` int64 [length]; the audio's places begin at ``audio_from``."""

    ids: NDArray[np.int64]
    audio_from: int


class PromptWriter:
    """Writes what the model was trained on: the context as the system's turn, the audio as the user's."""

    def __init__(self, tokenizer: TextTokenizer, audio_id: int) -> None:
        """Raises ``StartupError`` where the vocabulary lacks one of the marks."""
        for special in SPECIALS:
            tokenizer.id_of(special)
        self._tokenizer = tokenizer
        self._audio_id = audio_id
        self._before_context = tokenizer.encode("<|im_start|>system\n")
        self._after_context = tokenizer.encode("<|im_end|>\n<|im_start|>user\n<|audio_start|>")
        self._after_audio = tokenizer.encode("<|audio_end|><|im_end|>\n<|im_start|>assistant\n")

    def context(self, text: str) -> list[int]:
        """The caller's text, in which special tokens are ordinary text."""
        return self._tokenizer.encode_plain(text.strip()) if text.strip() else []

    def write(self, context: list[int], rows: int, language: str | None) -> WindowPrompt:
        """``rows``: embeddings of the audio. ``language``: the model's name of it; found by the model if None."""
        before = [*self._before_context, *context, *self._after_context]
        said = [] if language is None else self._tokenizer.encode(f"language {language}{MARK}")
        ids = [*before, *[self._audio_id] * rows, *self._after_audio, *said]
        return WindowPrompt(np.asarray(ids, dtype=np.int64), len(before))
