"""A checkpoint's tokenizer, its chat template, and text out of tokens as they come."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from sgl_omni.errors import InvalidRequest, StartupError
from sgl_omni.text.template import TemplateFailed, find_template

_REPLACEMENT = "\ufffd"
_LONGEST_WAIT = 64
"""Tokens that a character may take to become whole. A real one takes four; noise would wait for ever."""


@contextmanager
def _quiet_about_other_models() -> Iterator[None]:
    """transformers looks into the config of a model that it need not know to find its tokenizer, and warns of that."""
    log = logging.getLogger("transformers.configuration_utils")

    def is_news(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("You are using a model of type")

    log.addFilter(is_news)
    try:
        yield
    finally:
        log.removeFilter(is_news)


class TextTokenizer:
    """What the stages need of a tokenizer; transformers' own does the work."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Whether special tokens count is a state of transformers' tokenizer that each call sets, for all threads.
        self._lock = Lock()

    @classmethod
    def load(cls, folder: Path) -> TextTokenizer:
        """Raises ``StartupError`` that names the folder where it holds no tokenizer."""
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoTokenizer

        if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json", "tokenizer_config.json")):
            raise StartupError(
                f"{folder} holds no tokenizer: none of tokenizer.json, vocab.json, tokenizer_config.json"
            )
        try:
            with _quiet_about_other_models():
                tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # tokenizers raises bare ones for a damaged file
            told = " ".join(str(error).split())
            if isinstance(error, StrictDataclassError):  # transformers' config of the model, by which it is chosen
                raise StartupError(f"{folder / 'config.json'} cannot be read: {told}") from error
            raise StartupError(f"the tokenizer in {folder} cannot be read: {told}") from error
        if not tokenizer.chat_template and (template := find_template(folder)) is not None:
            tokenizer.chat_template = template.text
        return cls(tokenizer)

    @classmethod
    def of_file(cls, folder: Path) -> TextTokenizer:
        """Reads ``tokenizer.json`` alone, for checkpoints whose tokenizer is said to be code of their own.

        Raises ``StartupError`` that names the file.
        """
        from transformers import PreTrainedTokenizerFast

        file = folder / "tokenizer.json"
        try:
            return cls(PreTrainedTokenizerFast(tokenizer_file=str(file)))
        except Exception as error:  # tokenizers raises bare ones for a damaged file
            raise StartupError(f"{file} cannot be read: {' '.join(str(error).split())}") from error

    def encode(self, text: str) -> list[int]:
        """Special tokens that the text spells are taken as such; none are added."""
        return self._encode(text)

    def encode_document(self, text: str) -> list[int]:
        """As ``encode``, with what the tokenizer puts before a text of its own: Llama's mark of the beginning, say."""
        return self._encode(text, add=True)

    def encode_plain(self, text: str) -> list[int]:
        """The text of somebody who must not be able to write special tokens: they become ordinary text."""
        return self._encode(text, split=True)

    def _encode(self, text: str, *, add: bool = False, split: bool = False) -> list[int]:
        with self._lock:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add, split_special_tokens=split)
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

    def chat(self, messages: Sequence[dict[str, Any]], /, **options: Any) -> str:
        """The conversation as the checkpoint's template writes it, with the header of the answer.

        ``options`` are variables of the template. Raises ``InvalidRequest`` for a conversation that the template itself
        refuses, for options that cannot be, and where there is no template; ``TemplateFailed`` where it is at fault.
        """
        if not self._tokenizer.chat_template:
            raise InvalidRequest("this model has no chat template; use /v1/completions", "messages")
        known = inspect.signature(self._tokenizer.apply_chat_template).parameters.keys()
        taken = sorted(options.keys() & {*known, "messages", "self"})
        if taken:
            raise InvalidRequest(f"the chat template's options may not set {', '.join(taken)}", "chat_template_kwargs")
        try:
            return self._rendered(messages, **options)
        except TemplateFailed as error:
            if options and self._renders(messages):
                told = f"the chat template cannot take these options: {error.__cause__}"
                raise InvalidRequest(told, "chat_template_kwargs") from error
            raise

    def check_chat(self) -> None:
        """Raises ``StartupError`` where the template, if there is one, fails at the shortest of conversations."""
        if not self._tokenizer.chat_template:
            return
        try:
            self._rendered([{"role": "user", "content": "?"}])
        except TemplateFailed as error:
            raise StartupError(f"{self._tokenizer.name_or_path}: {error}") from error
        except InvalidRequest:
            return  # it wants another conversation, and says so

    def _renders(self, messages: Sequence[dict[str, Any]]) -> bool:
        try:
            self._rendered(messages)
        except (TemplateFailed, InvalidRequest):
            return False
        return True

    def _rendered(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        from jinja2 import TemplateError

        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **options
            )
        except Exception as error:
            if type(error) is TemplateError:  # what its `raise_exception` raises, and no failure of it
                raise InvalidRequest(f"the chat template refuses these messages: {error}", "messages") from error
            raise TemplateFailed(f"the checkpoint's chat template failed: {type(error).__name__}: {error}") from error
        return text


class Detokenizer:
    """Tokens of one answer to text, as they come. A character whose bytes are not all there yet waits.

    All that ``feed`` and ``end`` return is, put together, what the tokenizer makes of all tokens at once.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # some tokens whose text is known are decoded again, for the spaces of those that follow
        self._known = 0
        self._before = ""

    def feed(self, ids: Sequence[int]) -> str:
        """The text that is certain now and was not."""
        self._ids.extend(ids)
        text = self._tokenizer.decode(self._ids[self._start :])
        waiting = text.endswith(_REPLACEMENT) and len(self._ids) - self._known < _LONGEST_WAIT
        if len(text) <= len(self._before) or waiting:
            return ""
        return self._advance(text)

    def end(self) -> str:
        """What is left: an answer that broke off within a character ends with a replacement character."""
        return self._advance(self._tokenizer.decode(self._ids[self._start :]))

    def _advance(self, text: str) -> str:
        new = text[len(self._before) :]
        self._start, self._known = self._known, len(self._ids)
        self._before = self._tokenizer.decode(self._ids[self._start : self._known])
        return new
