"""CSM's prompt as rows of ids: turns of a conversation, the last of which is to be spoken. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgl_omni.models.csm.files import TEXT_END
from sgl_omni.text.tokenizer import TextTokenizer

Codes = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSpec:
    """A row is a text id and ``num_codebooks`` codes, which count where the id says that the row is a frame:
    ``audio_id``, or ``audio_end_id``, whose codes are all ``end_code``."""

    num_codebooks: int
    end_code: int
    text_id: int
    audio_id: int
    audio_end_id: int

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> PromptSpec:
        """Reads a config that was checked."""
        return cls(
            num_codebooks=config["num_codebooks"],
            end_code=config["codebook_eos_token_id"],
            text_id=config["bos_token_id"],
            audio_id=config["audio_token_id"],
            audio_end_id=config["audio_eos_token_id"],
        )


class PromptWriter:
    """Writes turns ``[speaker]text``, each but the last followed by the audio in which it was spoken."""

    def __init__(self, spec: PromptSpec, tokenizer: TextTokenizer) -> None:
        """Raises ``StartupError`` where the tokenizer lacks the mark that ends a text."""
        self._spec = spec
        self._tokenizer = tokenizer
        self._end_id = tokenizer.id_of(TEXT_END)

    def rows(self, speaker: str, text: str, heard: Sequence[tuple[str, Codes]] = ()) -> Codes:
        """int64 [length, 1 + codebooks]; ``heard``: what was said before, as words and codes [frames, codebooks]."""
        parts = [part for words, codes in heard for part in (self._said(speaker, words), self._audio(codes))]
        return np.concatenate([*parts, self._said(speaker, text)])

    def _said(self, speaker: str, text: str) -> Codes:
        spec = self._spec
        ids = [spec.text_id, *self._tokenizer.encode_plain(f"[{speaker}]{text}"), self._end_id]
        rows = np.zeros((len(ids), 1 + spec.num_codebooks), dtype=np.int64)
        rows[:, 0] = ids
        return rows

    def _audio(self, codes: Codes) -> Codes:
        spec = self._spec
        rows = np.full((len(codes) + 1, 1 + spec.num_codebooks), spec.end_code, dtype=np.int64)
        rows[:-1, 0], rows[-1, 0] = spec.audio_id, spec.audio_end_id
        rows[:-1, 1:] = codes
        return rows
