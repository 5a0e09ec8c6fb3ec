"""The tokens that a family's prompts need, held against the tokenizer and the model's vocabulary. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from sgl_omni.errors import InvalidRequest, StartupError
from sgl_omni.models.folder import require
from sgl_omni.models.numbers import check_id
from sgl_omni.text.template import QUESTION, try_template
from sgl_omni.text.vocabulary import Vocabulary, read_merges, read_vocabulary


def check_tokens(
    folder: Path,
    config: Mapping[str, Any],
    size_field: str,
    needed: Collection[str] = (),
    ids: Mapping[str, str] | None = None,
) -> Vocabulary:
    """The folder's vocabulary, all of whose words lie below the number at ``size_field`` of ``config``.

    ``needed``: tokens by name, which must be there and lie below it too. ``ids``: dotted fields of the config and the
    tokens whose ids they are. Raises ``InvalidRequest`` that names file and token or field.
    """
    file, size = folder / "config.json", require(config, size_field, folder / "config.json")
    try:
        vocabulary = read_vocabulary(folder)
    except StartupError as error:
        raise InvalidRequest(str(error), param="model_path") from error
    named = ids or {}
    for token in (*needed, *named.values()):
        if vocabulary.id_of(token) is None:
            raise InvalidRequest(
                f"{vocabulary.file} lacks the token {token!r}, which this model's prompts need", param="model_path"
            )
    check_below(vocabulary, (*needed, *named.values()), size, size_field)
    for field, token in named.items():
        said, known = require(config, field, file), vocabulary.id_of(token)
        check_id(said, field, file, size)
        if said != known:
            raise InvalidRequest(
                f"{file}: {field} is {said}, and {vocabulary.file} has {token!r} as {known}", param="model_path"
            )
    highest = vocabulary.highest_word()
    if highest is not None:
        check_below(vocabulary, [highest[0]], size, size_field)
    return vocabulary


def check_merged(folder: Path, vocabulary: Vocabulary, word: str) -> None:
    """Raises ``InvalidRequest`` that names the file by which the tokenizer does not make ``word`` one token."""
    if word in vocabulary.added:
        return
    try:
        file, made = read_merges(folder)
    except StartupError as error:
        raise InvalidRequest(str(error), param="model_path") from error
    if word not in made:
        raise InvalidRequest(f"{file} makes no token {word!r} of its parts, as this model's prompts need", "model_path")


def check_chat(
    folder: Path,
    vocabulary: Vocabulary,
    size: int,
    size_field: str,
    messages: Sequence[Mapping[str, Any]] = QUESTION,
    *,
    is_needed: bool = False,
) -> None:
    """Raises ``InvalidRequest`` that names the file where the chat template is no Jinja, runs on without end,
    or writes a token that the model has no embedding for; and where there is none that ``is_needed``."""
    try:
        text = try_template(folder, messages, is_needed=is_needed)
    except StartupError as error:
        raise InvalidRequest(str(error), param="model_path") from error
    if text is not None:
        check_below(vocabulary, [token for token in vocabulary.added if token in text], size, size_field)


def check_below(vocabulary: Vocabulary, tokens: Collection[str], size: int, size_field: str) -> None:
    """Raises ``InvalidRequest`` for a token that the model has no embedding for."""
    for token in tokens:
        found = vocabulary.id_of(token)
        if found is not None and found >= size:
            raise InvalidRequest(
                f"{vocabulary.file}: {token!r} has the id {found}, and the model's {size_field} is {size}",
                param="model_path",
            )
