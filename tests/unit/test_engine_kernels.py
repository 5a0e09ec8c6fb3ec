"""The Triton kernels in Triton's own interpreter, against plain torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

TESTS = Path(__file__).parents[1]


def test_kernels_compute_what_plain_torch_does() -> None:
    """In a process of its own, because Triton decides at import whether it interprets."""
    program = """
import torch
import engine_kernels as checks

for tiled in (False, True):
    for window in (None, 9):
        for splits in (1, 3):
            off = checks.check_attention("cpu", torch.float32, window=window, tiled=tiled, splits=splits)
            assert off < 3e-6, ("attention", tiled, window, splits, off)
for width in (96, 100):
    assert checks.check_add_norm("cpu", torch.float32, width) < 1e-6, width
    assert checks.check_silu_mul("cpu", torch.float32, width) < 1e-6, width
for vocabulary, dtype in ((50, torch.float32), (130, torch.bfloat16)):
    chosen, expected = checks.check_sampling("cpu", vocabulary, dtype)
    assert torch.equal(chosen, expected), vocabulary
checks.check_state("cpu")
print("all checked")
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{TESTS}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.endswith("all checked\n"), done.stderr
