"""A checkpoint's tokenizer, its chat template, and text out of tokens as they come."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sgl_omni.errors import InvalidRequest, StartupError

_REPLACEMENT = "\ufffd"


class TextTokenizer:
    """What the stages need of a tokenizer; transformers' own does the work."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, folder: Path) -> TextTokenizer:
        """Raises ``StartupError`` that names the folder where it holds no tokenizer."""
        from transformers import AutoTokenizer

        if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json", "tokenizer_config.json")):
            raise StartupError(
                f"{folder} holds no tokenizer: none of tokenizer.json, vocab.json, tokenizer_config.json"
            )
        try:
            return cls(AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False))
        except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
            raise StartupError(f"the tokenizer in {folder} cannot be read: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Special tokens that the text spells are taken as such; none are added."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """The text of somebody who must not be able to write special tokens: they become ordinary text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Without special tokens."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def id_of(self, token: str) -> int:
        """Raises ``StartupError`` where the vocabulary has no such token."""
        found = self._tokenizer.convert_tokens_to_ids(token)
        if found is None or found == self._tokenizer.unk_token_id:
            raise StartupError(f"the tokenizer has no token {token!r}")
        return int(found)

    @property
    def eos_id(self) -> int | None:
        found = self._tokenizer.eos_token_id
        return None if found is None else int(found)

    def chat(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        """The conversation as the checkpoint's template writes it, with the header of the answer.

        Raises ``InvalidRequest`` for a conversation that the template refuses, ``StartupError`` where there is none.
        """
        from jinja2 import TemplateError

        if not self._tokenizer.chat_template:
            raise StartupError("this checkpoint's tokenizer has no chat template; use /v1/completions")
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **options
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error}", "messages") from error
        return text


class Detokenizer:
    """Tokens of one answer to text, as they come. A character whose bytes are not all there yet waits."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # text before this token is known; some of what follows is decoded again, for its spaces
        self._known = 0

    def feed(self, ids: Sequence[int]) -> str:
        """The text that is certain now and was not."""
        self._ids.extend(ids)
        before = self._tokenizer.decode(self._ids[self._start : self._known])
        text = self._tokenizer.decode(self._ids[self._start :])
        if len(text) <= len(before) or text.endswith(_REPLACEMENT):
            return ""
        self._start, self._known = self._known, len(self._ids)
        return text[len(before) :]

    def end(self) -> str:
        """What is left: an answer that broke off within a character ends with a replacement character."""
        before = self._tokenizer.decode(self._ids[self._start : self._known])
        text = self._tokenizer.decode(self._ids[self._start :])
        self._start = self._known = len(self._ids)
        return text[len(before) :]
