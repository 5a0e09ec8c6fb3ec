"""How the Higgs models are asked to speak: pieces of ids, between which the rows of recordings go. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, Protocol

from sgl_omni.errors import InvalidRequest, StartupError
from sgl_omni.text.tokenizer import TextTokenizer

SYSTEM = "Generate audio following instruction."
SCENE = "Audio is recorded from a quiet room."

_OPEN, _CLOSE = "\ue000", "\ue001"
_PLACE = re.compile(f"{_OPEN}(\\d+){_CLOSE}")

Pieces = list[list[int]]

SHORTEST = tuple({"role": role, "content": [{"type": "text", "text": "?"}]} for role in ("system", "scene", "user"))
"""A conversation such as `ChatPrompts` makes."""


class PromptWriter(Protocol):
    def pieces(self, text: str, transcripts: Sequence[str | None], instructions: str | None) -> Pieces:
        """One piece more than there are ``transcripts`` of recordings; a recording's rows go between two pieces.

        Raises ``InvalidRequest`` for a combination that the model has no prompt for.
        """
        ...


class ChatPrompts:
    """Higgs Audio v2: a conversation in the words of the checkpoint's own chat template.

    Recordings with transcripts are earlier turns, those without are introduced in the scene. What callers wrote
    takes the place of marks after the template has been filled in, so it cannot bring special tokens along.
    """

    def __init__(self, tokenizer: TextTokenizer, audio_id: int) -> None:
        """``audio_id``: the token that stands for a recording in the template's output."""
        self._tokenizer = tokenizer
        self._audio_id = audio_id

    def pieces(self, text: str, transcripts: Sequence[str | None], instructions: str | None) -> Pieces:
        texts: list[str] = []

        def say(what: str) -> dict[str, Any]:
            texts.append(what.strip())
            return {"type": "text", "text": f"{_OPEN}{len(texts) - 1}{_CLOSE}"}

        given = [transcript for transcript in transcripts if transcript]
        if given and len(given) != len(transcripts):
            raise InvalidRequest("give the text of every reference, or of none", "references")
        scene = [say(instructions or SCENE)]
        turns: list[dict[str, Any]] = []
        recording = {"type": "audio"}
        for transcript in given:
            turns += [_turn("user", say(transcript)), _turn("assistant", recording)]
        if transcripts and not given:
            for index in range(len(transcripts)):
                scene += [say(f"SPEAKER{index}:"), recording]
            text = text if len(transcripts) > 1 else f"[SPEAKER0] {text}"
        messages = [_turn("system", say(SYSTEM)), {"role": "scene", "content": scene}, *turns, _turn("user", say(text))]
        ids = self._encode(self._tokenizer.chat(messages), texts)
        found = _split(ids, self._audio_id)
        if len(found) != len(transcripts) + 1:
            raise StartupError(
                f"the chat template makes {len(found) - 1} places of {len(transcripts)} recordings; it is not one of "
                "Higgs Audio v2"
            )
        return found

    def _encode(self, rendered: str, texts: Sequence[str]) -> list[int]:
        """The template's parts with special tokens, the texts without. White space around a text is part of it, as a
        tokenizer may join the two."""
        parts = _PLACE.split(rendered)
        ids: list[int] = []
        plain = ""
        for fixed, place in zip_longest(parts[::2], parts[1::2]):
            core = fixed.strip()
            if core:
                start = fixed.index(core)
                ids += self._plain(plain + fixed[:start]) + self._tokenizer.encode(core)
                plain = fixed[start + len(core) :]
            else:
                plain += fixed
            plain += "" if place is None else texts[int(place)]
        return ids + self._plain(plain)

    def _plain(self, text: str) -> list[int]:
        return self._tokenizer.encode_plain(text) if text else []


class TaggedPrompts:
    """Higgs TTS 3: ``<|tts|>``, ``<|ref_text|>`` and ``<|ref_audio|>`` of a recording, ``<|text|>``, ``<|audio|>``.

    A text may hold the model's control tokens, but none of those that give a prompt its parts.
    """

    PARTS = ("<|tts|>", "<|ref_audio|>", "<|text|>", "<|audio|>")
    _RESERVED = (
        *PARTS,
        "<|ref_text|>",
        "<|text_end|>",
        "<|audio_end|>",
        "<|eoc|>",
        "<|asr|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
    )

    def __init__(self, tokenizer: TextTokenizer) -> None:
        """Raises ``StartupError`` where the vocabulary lacks a token that every prompt has."""
        self._tokenizer = tokenizer
        self._tts, self._ref_audio, self._text, self._audio = (tokenizer.id_of(token) for token in self.PARTS)
        reserved = {token: _id_of(tokenizer, token) for token in self._RESERVED}
        self._reserved = {id: token for token, id in reserved.items() if id is not None}
        self._ref_text = reserved["<|ref_text|>"]

    def pieces(self, text: str, transcripts: Sequence[str | None], instructions: str | None) -> Pieces:
        if len(transcripts) > 1:
            raise InvalidRequest("this model takes one reference", "references")
        target = [self._text, *self._encode(text, "input"), self._audio]
        if not transcripts:
            return [[self._tts, *target]]
        start = [self._tts]
        if transcripts[0] and self._ref_text is not None:
            start += [self._ref_text, *self._encode(transcripts[0], "references")]
        return [[*start, self._ref_audio], target]

    def _encode(self, text: str, param: str) -> list[int]:
        ids = self._tokenizer.encode(text.strip())
        found = next((self._reserved[id] for id in ids if id in self._reserved), None)
        if found is not None:
            raise InvalidRequest(f"the text holds {found}, which only the prompt itself may have", param)
        return ids


def _turn(role: str, part: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "content": [part]}


def _split(ids: Sequence[int], at: int) -> Pieces:
    pieces: Pieces = [[]]
    for each in ids:
        if each == at:
            pieces.append([])
        else:
            pieces[-1].append(each)
    return pieces


def _id_of(tokenizer: TextTokenizer, token: str) -> int | None:
    try:
        return tokenizer.id_of(token)
    except StartupError:
        return None
