"""The prompt of MOSS-TTS-Local as rows of ids. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgl_omni.text.tokenizer import TextTokenizer

Codes = NDArray[np.int64]

_UNUSED = ("Quality", "Sound Event", "Ambient Sound")
"""Fields of the format that speech leaves open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSpec:
    """Ids of the prompt's marks, by the names that the config has for them."""

    num_codebooks: int
    pad_code: int
    turn_id: int
    turn_end_id: int
    audio_id: int
    audio_end_id: int
    heard_slot_id: int

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> PromptSpec:
        """Reads a config that was checked."""
        sizes = config.get("audio_codebook_sizes") or [config["audio_vocab_size"]]
        return cls(
            num_codebooks=config["n_vq"],
            pad_code=int(sizes[0]),
            turn_id=config["im_start_token_id"],
            turn_end_id=config["im_end_token_id"],
            audio_id=config["audio_start_token_id"],
            audio_end_id=config["audio_end_token_id"],
            heard_slot_id=config["audio_user_slot_token_id"],
        )


class PromptWriter:
    """Writes the user's turn, with the voice to be spoken in, and begins the answer, which is audio."""

    def __init__(self, spec: PromptSpec, tokenizer: TextTokenizer) -> None:
        self._spec = spec
        self._tokenizer = tokenizer
        self._unheard = self._text(tokenizer.encode("None"))
        self._opening = [
            spec.turn_id,
            *tokenizer.encode("user\n"),
            *tokenizer.encode(_line("<user_inst>", "Reference(s)")),
        ]
        self._closing = [
            *tokenizer.encode("\n</user_inst>"),
            spec.turn_end_id,
            *tokenizer.encode("\n"),
            spec.turn_id,
            *tokenizer.encode("assistant\n"),
            spec.audio_id,
        ]

    def rows(
        self,
        text: str,
        *,
        references: Sequence[Codes] = (),
        instructions: str | None = None,
        language: str | None = None,
    ) -> Codes:
        """int64 [length, 1 + codebooks]; ``references`` are codes [frames, codebooks]."""
        heard = [self._heard(codes) for codes in references] or [self._unheard]
        asked = self._tokenizer.encode_plain(_fields(instructions, language))
        said = self._tokenizer.encode_plain(text)
        return np.concatenate([self._text(self._opening), *heard, self._text([*asked, *said, *self._closing])])

    def _text(self, ids: Sequence[int]) -> Codes:
        rows = np.full((len(ids), 1 + self._spec.num_codebooks), self._spec.pad_code, dtype=np.int64)
        rows[:, 0] = ids
        return rows

    def _heard(self, codes: Codes) -> Codes:
        spec = self._spec
        rows = self._text([spec.audio_id, *[spec.heard_slot_id] * len(codes), spec.audio_end_id])
        rows[1:-1, 1:] = codes
        return rows


def _line(before: str, name: str) -> str:
    return f"{before}\n- {name}:\n"


def _fields(instructions: str | None, language: str | None) -> str:
    values = {"Instruction": instructions, "Tokens": None, **dict.fromkeys(_UNUSED), "Language": language}
    written = "".join(_line("", name) + ((value or "").strip() or "None") for name, value in values.items())
    return written + _line("", "Text")
