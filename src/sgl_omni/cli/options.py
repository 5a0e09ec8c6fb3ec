"""What several commands take, and refuse before anything starts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click


class FiniteRange(click.FloatRange):
    """A range that NaN is not in, although no comparison says so."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


SECONDS = FiniteRange(0, 1e6, min_open=True)
SECONDS_OR_NONE = FiniteRange(0, 1e6)
"""0 seconds are allowed too."""


def writable_file(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """Refuses a file that could not be written at the end. What is in it stays; one that was not there is not left."""
    if value is not None and (problem := why_not_writable(value)):
        raise click.BadParameter(problem, ctx, param)
    return value


def writable_folder(folder: Path, names: Sequence[str], what: str) -> None:
    """Makes a folder where there is none. Raises ``click.UsageError`` where that, or a file in it, cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.UsageError(f"{what}: the folder {folder} cannot be made: {error.strerror}") from error
    for name in names:
        if problem := why_not_writable(folder / name):
            raise click.UsageError(f"{what}: {problem}")


def why_not_writable(path: Path) -> str | None:
    """Found by opening it, because permissions do not tell of file systems that are read-only or full."""
    if not path.absolute().parent.is_dir():
        return f"there is no folder {path.absolute().parent}"
    try:
        there = path.exists()
        if there and not path.is_file() and not path.is_dir():
            return None  # a terminal or a pipe, which opening would disturb
        with path.open("ab"):
            pass
        if not there:
            path.unlink()
    except OSError as error:
        return f"{path} cannot be written: {error.strerror}"
    return None
