"""JSON as others wrote it: what is wrong with it is one kind of error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Raises ``ValueError`` for what is no JSON, or nested without end."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from error


def read_object(file: Path, wrong: Callable[[str], Exception]) -> dict[str, Any]:
    """A file's JSON object. Raises what ``wrong`` makes of a message that names the file, where it cannot be read or
    holds something else."""
    try:
        found = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise wrong(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise wrong(f"{file} is not a JSON object")
    return found
