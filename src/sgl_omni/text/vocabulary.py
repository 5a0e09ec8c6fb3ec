"""The tokens of a checkpoint's tokenizer and their ids, as its files list them. Imports no transformers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_omni.errors import StartupError
from sgl_omni.json_files import read_object


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """``words`` are what texts are cut into, ``added`` what is found whole; ``file`` lists the words."""

    words: Mapping[str, int]
    added: Mapping[str, int]
    file: Path

    def id_of(self, token: str) -> int | None:
        found = self.added.get(token)
        return self.words.get(token) if found is None else found

    def highest_word(self) -> tuple[str, int] | None:
        """The word with the highest id; none where there are no words."""
        return max(self.words.items(), key=lambda item: item[1], default=None)


def read_vocabulary(folder: Path) -> Vocabulary:
    """Of ``tokenizer.json``, or ``vocab.json``, and the files beside it that add tokens.

    Raises ``StartupError`` that names the file which cannot be read, or lists something else than tokens and ids.
    """
    file = folder / "tokenizer.json"
    if file.is_file():
        found = read_object(file, StartupError)
        model = found.get("model")
        words = _words(model.get("vocab") if isinstance(model, dict) else None, file, "model.vocab")
        added = _listed(found.get("added_tokens") or [], file)
    else:
        file = folder / "vocab.json"
        words, added = _ids(read_object(file, StartupError).items(), file, "it"), {}
        if (beside := folder / "added_tokens.json").is_file():
            added |= _ids(read_object(beside, StartupError).items(), beside, "it")
    if (settings := folder / "tokenizer_config.json").is_file():
        more = read_object(settings, StartupError).get("added_tokens_decoder") or {}
        added = _decoder(more, settings) | added
    if not words:
        raise StartupError(f"{file} lists no tokens")
    return Vocabulary(words, added, file)


def read_merges(folder: Path) -> tuple[Path, frozenset[str]]:
    """The file that says which pairs of tokens become one, and what they become.

    Raises ``StartupError`` that names the file which cannot be read, or lists no pairs.
    """
    file = folder / "tokenizer.json"
    if file.is_file():
        model = read_object(file, StartupError).get("model")
        listed = model.get("merges") if isinstance(model, dict) else None
    else:
        file = folder / "merges.txt"
        try:
            listed = [line for line in file.read_text(encoding="utf-8").split("\n") if line[:8] != "#version"]
        except (OSError, ValueError) as error:
            raise StartupError(f"{file} cannot be read: {error}") from error
        listed = [line for line in listed if line.strip()]
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in listed or ()]
    if not pairs or any(not isinstance(pair, list) or [type(part) for part in pair] != [str, str] for pair in pairs):
        raise StartupError(f"{file} lists no pairs of tokens to merge")
    return file, frozenset(map("".join, pairs))


def _words(vocabulary: Any, file: Path, at: str) -> dict[str, int]:
    if isinstance(vocabulary, list):  # of Unigram: pairs of a piece and its chance, in the order of their ids
        return _ids(((_first(pair), i) for i, pair in enumerate(vocabulary)), file, at)
    if not isinstance(vocabulary, dict):
        raise StartupError(f"{file}: {at} is no vocabulary")
    return _ids(vocabulary.items(), file, at)


def _first(pair: Any) -> Any:
    return pair[0] if isinstance(pair, list) and pair else pair


def _listed(tokens: Any, file: Path) -> dict[str, int]:
    if not isinstance(tokens, list) or not all(isinstance(each, dict) for each in tokens):
        raise StartupError(f"{file}: added_tokens is no list of tokens")
    return _ids(((each.get("content"), each.get("id")) for each in tokens), file, "added_tokens")


def _decoder(tokens: Any, file: Path) -> dict[str, int]:
    at = "added_tokens_decoder"
    if not isinstance(tokens, dict) or not all(id.isdecimal() for id in tokens):
        raise StartupError(f"{file}: {at} is no object of tokens by id")
    names = ((each.get("content") if isinstance(each, dict) else each, int(id)) for id, each in tokens.items())
    return _ids(names, file, at)


def _ids(pairs: Iterable[tuple[Any, Any]], file: Path, at: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for token, id in pairs:
        if not isinstance(token, str) or isinstance(id, bool) or not isinstance(id, int) or id < 0:
            raise StartupError(f"{file}: {at} has {str(token)[:40]!r} with the id {id!r}, which are no token and id")
        found[token] = id
    return found
