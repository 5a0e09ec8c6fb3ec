"""The Triton kernels in Triton's own interpreter, against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import engine_kernels as checks

from sgl_omni.engine.kernels import sampling


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("tiled", [False, True])
def test_attention(tiled: bool, window: int | None, splits: int) -> None:
    assert checks.check_attention("cpu", torch.float32, window=window, tiled=tiled, splits=splits) < 3e-6


@pytest.mark.parametrize("splits", [1, 3])
def test_attention_to_places(splits: int) -> None:
    assert checks.check_places("cpu", torch.float32, splits) < 3e-6


@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize(
    ("heads", "more"), [((6, 2, 24), {}), ((2, 1, 64), {"parts": 3}), ((2, 2, 8), {"neighbours": True})]
)
def test_attention_over_fixed_places(heads: tuple[int, int, int], more: dict[str, Any], has_norms: bool) -> None:
    assert checks.check_fixed_places("cpu", torch.float32, heads, has_norms=has_norms, **more) < 3e-6


@pytest.mark.parametrize("width", [96, 100])
def test_elementwise(width: int) -> None:
    assert checks.check_add_norm("cpu", torch.float32, width) < 1e-6
    assert checks.check_silu_mul("cpu", torch.float32, width) < 1e-6


@pytest.mark.parametrize(
    ("vocabulary", "dtype", "first_column"), [(50, torch.float32, 0), (130, torch.bfloat16, 0), (50, torch.float32, 2)]
)
def test_sampling(vocabulary: int, dtype: torch.dtype, first_column: int) -> None:
    chosen, expected = checks.check_sampling("cpu", vocabulary, dtype, first_column)
    assert torch.equal(chosen, expected)


@pytest.mark.parametrize("candidates", [64, 4])
def test_sampling_from_a_large_vocabulary(candidates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large is here what one program would hold anyway, and a part of it a few ids. With few candidates, more requests
    have their rows gone over again."""
    for name, value in (("LARGEST_AT_ONCE", 32), ("_PART", 16), ("_CANDIDATES", candidates)):
        monkeypatch.setattr(sampling, name, value)
    chosen, expected = checks.check_sampling("cpu", 50, torch.bfloat16, 1, times=1)
    assert torch.equal(chosen, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_penalties_of_repetition(dtype: torch.dtype) -> None:
    checks.check_penalty("cpu", 5000, dtype)


@pytest.mark.parametrize(("rows", "experts", "choices"), [(1, 4, 1), (5, 4, 2), (3, 16, 4), (70, 6, 3)])
def test_experts(rows: int, experts: int, choices: int) -> None:
    assert checks.check_moe("cpu", torch.float32, rows=rows, experts=experts, choices=choices) < 3e-6


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 2e-6), (torch.float16, 4e-3)])
@pytest.mark.parametrize("which", range(len(checks.CONVOLUTIONS)))
def test_convolution(which: int, dtype: torch.dtype, most: float) -> None:
    assert checks.check_convolution("cpu", dtype, *checks.CONVOLUTIONS[which]) < most


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 2e-6), (torch.float16, 4e-3)])
def test_what_a_causal_convolution_remembers(dtype: torch.dtype, most: float) -> None:
    assert checks.check_causal("cpu", dtype) < most


def test_state() -> None:
    checks.check_state("cpu")
    checks.check_bits("cpu")
    assert checks.check_added("cpu") < 1e-6
