"""What was made of a recording is made once, while it is among the last."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_omni.audio.kept import LastMade


def test_the_last_results_are_found_by_content_and_kind() -> None:
    made: list[str] = []

    def make(name: str) -> str:
        made.append(name)
        return name

    kept: LastMade[str] = LastMade(2)
    assert kept.get(b"one", lambda: make("one")) == kept.get(bytearray(b"one"), lambda: make("again")) == "one"
    assert kept.get(b"one", lambda: make("one with codes"), kind=True) == "one with codes"
    assert kept.get(b"one", lambda: make("again")) == "one"
    assert kept.get(np.ones(3, np.float32), lambda: make("samples")) == "samples"
    assert kept.get(b"one", lambda: make("again"), kind=True) == "again", "the one that was asked for longest ago went"
    assert made == ["one", "one with codes", "samples", "again"]


def test_what_fails_is_not_kept() -> None:
    kept: LastMade[int] = LastMade(2)
    with pytest.raises(ZeroDivisionError):
        kept.get(b"one", lambda: 1 // 0)
    assert kept.get(b"one", lambda: 1) == 1
