"""Tests that run a GPU's path on a CPU, the kernels in Triton's interpreter: `TRITON_INTERPRET=1 python -m pytest ...`.

They are slow, so those of models look at the first few outputs only. The same run whole on a GPU in tests/gpu.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "unit")]

from engine_fixtures import one_thread, spoil_new_memory  # noqa: E402

__all__ = ["one_thread"]


@pytest.fixture(autouse=True)
def is_interpreted() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs TRITON_INTERPRET=1, which Triton reads when it is imported")


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch, is_interpreted: None) -> Iterator[None]:
    """Models take a GPU's path; afterwards it must have been taken."""
    from sgl_omni.engine.kernels import attention

    spoil_new_memory()
    kernel = Mock(wraps=attention.decode_attention)
    monkeypatch.setattr("sgl_omni.engine.platform.everywhere", True)
    monkeypatch.setattr(attention, "decode_attention", kernel)
    yield
    assert kernel.call_count > 0, "the test ran without the kernels"
