"""Tests for a machine with an NVIDIA GPU: `python -m pytest -m gpu tests/gpu`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "unit"), str(TESTS / "integration"), str(TESTS / "gpu")]

from engine_fixtures import churn, one_thread  # noqa: E402

__all__ = ["churn", "one_thread"]


@pytest.fixture(autouse=True)
def needs_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU and a torch built for CUDA")
