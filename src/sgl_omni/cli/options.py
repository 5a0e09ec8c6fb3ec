"""What several commands take, and refuse before anything starts."""

from __future__ import annotations

import math
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


def in_a_folder(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """Refuses a file whose folder does not exist."""
    if value is not None and not value.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no folder {value.absolute().parent}", ctx, param)
    return value
