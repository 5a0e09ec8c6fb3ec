"""Products of a few rows with large weights, where reading the weights is all the work.

Each kernel asks for its first weights before it waits for its input, so that they arrive while the kernel before it
still runs (programmatic dependent launch). What is split along the inputs is left as partial sums, which the kernel
that comes next adds up.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from sgl_omni.engine.kernels.elementwise import prefetch_l2

MOST_ROWS = 64
_PROCESSORS = 132
_LEAST_INPUTS = 512


@triton.jit
def _prefetch(weight, first_row, row_stride, first_k, ROWS: tl.constexpr, LINES: tl.constexpr):
    row = first_row + tl.arange(0, ROWS)
    line = tl.arange(0, LINES) * 64
    prefetch_l2(weight + row[:, None].to(tl.int64) * row_stride + first_k + line[None, :])


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x_tiles,
    weight,
    weight_tiles,
    out,
    rows,
    outputs,
    inputs,
    splits,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    AHEAD: tl.constexpr,
    SWAPPED: tl.constexpr,
):
    first = tl.program_id(0) * OUTPUTS
    split = tl.program_id(1)
    share = tl.cdiv(tl.cdiv(inputs, INPUTS), splits) * INPUTS
    start = split * share
    stop = tl.minimum(inputs, start + share)
    if AHEAD > 0:
        _prefetch(weight, first, inputs, start, OUTPUTS, AHEAD)
        if GATED:
            _prefetch(weight, outputs + first, inputs, start, OUTPUTS, AHEAD)
    gdc_wait()
    gdc_launch_dependents()
    if SWAPPED:
        acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
        acc_up = tl.zeros([OUTPUTS, ROWS], tl.float32)
        for k in range(start, stop, INPUTS):
            x = tl.trans(x_tiles.load([0, k]))
            acc = tl.dot(weight_tiles.load([first, k]), x, acc)
            if GATED:
                acc_up = tl.dot(weight_tiles.load([outputs + first, k]), x, acc_up)
        row = tl.arange(0, ROWS)[None, :]
        column = first + tl.arange(0, OUTPUTS)[:, None]
    else:
        acc = tl.zeros([ROWS, OUTPUTS], tl.float32)
        acc_up = tl.zeros([ROWS, OUTPUTS], tl.float32)
        for k in range(start, stop, INPUTS):
            x = x_tiles.load([0, k])
            acc = tl.dot(x, tl.trans(weight_tiles.load([first, k])), acc)
            if GATED:
                acc_up = tl.dot(x, tl.trans(weight_tiles.load([outputs + first, k])), acc_up)
        row = tl.arange(0, ROWS)[:, None]
        column = first + tl.arange(0, OUTPUTS)[None, :]
    inside = (row < rows) & (column < outputs)
    at = row * outputs + column
    if GATED:
        gate = acc.to(out.dtype.element_ty).to(tl.float32)
        activated = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty)
        tl.store(out + at, activated * acc_up.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(out + split * rows * outputs + at, acc, mask=inside)


class Tiling(NamedTuple):
    """How a product is cut: ``rows`` of x at once, ``outputs`` and ``inputs`` of the weight, its inputs in ``splits``.

    ``ahead``: lines of each weight row that are asked for before the input is there. ``swapped``: the weight is the
    product's left side, which suits the tensor cores where there are few rows.
    """

    rows: int
    outputs: int
    inputs: int
    splits: int
    stages: int
    ahead: int = 2
    swapped: bool = False


@lru_cache(maxsize=256)
def _tiling(rows: int, outputs: int, inputs: int, gated: bool) -> Tiling:
    # Measured on an H200, within whole steps.
    block = 16 if rows <= 16 else 32 if rows <= 32 else MOST_ROWS
    if gated:
        return Tiling(block, 32, 64, 1, stages=4) if block == MOST_ROWS else Tiling(block, 64, 128, 1, stages=3)
    if block == 16:
        return Tiling(block, 64, 128, _splits(outputs // 64, inputs, 150, 512), stages=4, swapped=True)
    if block == 32:
        return Tiling(block, 32, 128, _splits(outputs // 32, inputs, 300, 1024), stages=4)
    splits = _splits(outputs // 32, inputs, 300, 1200)
    # Memory for four stages is there where no more than two programs share a processor.
    return Tiling(block, 32, 128, splits, stages=4 if outputs // 32 * splits <= 2 * _PROCESSORS else 3)


def _splits(programs: int, inputs: int, enough: int, least: int) -> int:
    """Doubled until there are programs enough, each with at least so many inputs; fewer than processors are too few."""
    splits = 1
    while inputs // (2 * splits) >= (least if programs * splits >= _PROCESSORS else _LEAST_INPUTS):
        if programs * splits >= enough:
            break
        splits *= 2
    return splits


def is_few_rows(x: Tensor, weight: Tensor) -> bool:
    """Whether these kernels are made for x [n, inputs] and a weight [outputs, inputs]."""
    return (
        x.is_cuda
        and x.dtype == weight.dtype == torch.bfloat16
        and x.is_contiguous()
        and x.shape[0] <= MOST_ROWS
        and x.shape[1] % 64 == 0
        and weight.shape[0] % 128 == 0
        and torch.cuda.get_device_capability(x.device) >= (9, 0)
    )


def is_split_well(x: Tensor, weight: Tensor) -> bool:
    """Whether a product of more rows gains from being made in two halves, whose sum is left to the next kernel."""
    return (
        x.is_cuda
        and x.dtype == torch.bfloat16
        and x.is_contiguous()
        and MOST_ROWS < x.shape[0] <= 2 * MOST_ROWS
        and weight.shape[0] <= 4096
        and x.shape[1] % 128 == 0
    )


def halved_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [n, inputs], weight [outputs, inputs] -> float32 [2, n, outputs], whose sum is the product."""
    rows, inputs = x.shape
    halves = x.view(rows, 2, inputs // 2).transpose(0, 1)
    return torch.bmm(halves, weight.view(-1, 2, inputs // 2).permute(1, 2, 0), out_dtype=torch.float32)


def partial_linear(x: Tensor, weight: Tensor, tiling: Tiling | None = None) -> Tensor:
    """x [n, inputs], weight [outputs, inputs] -> float32 [splits, n, outputs], whose sum is the product."""
    outputs = weight.shape[0]
    tiling = tiling or _tiling(x.shape[0], outputs, x.shape[1], False)
    out = torch.empty(tiling.splits, x.shape[0], outputs, dtype=torch.float32, device=x.device)
    _launch(x, weight, out, outputs, tiling, gated=False)
    return out


def gated_linear(x: Tensor, weight: Tensor, tiling: Tiling | None = None) -> Tensor:
    """x [n, inputs], weight [2 * width, inputs], the gates first -> silu(gate) * up [n, width]."""
    width = weight.shape[0] // 2
    out = x.new_empty(x.shape[0], width)
    _launch(x, weight, out, width, tiling or _tiling(x.shape[0], width, x.shape[1], True), gated=True)
    return out


def _launch(x: Tensor, weight: Tensor, out: Tensor, outputs: int, tiling: Tiling, *, gated: bool) -> None:
    rows, inputs = x.shape
    x_tiles = TensorDescriptor(x, [rows, inputs], [inputs, 1], [tiling.rows, tiling.inputs])
    weight_tiles = TensorDescriptor(weight, list(weight.shape), [inputs, 1], [tiling.outputs, tiling.inputs])
    _linear[(triton.cdiv(outputs, tiling.outputs), tiling.splits)](
        x_tiles,
        weight,
        weight_tiles,
        out,
        rows,
        outputs,
        inputs,
        tiling.splits,
        gated,
        tiling.rows,
        tiling.outputs,
        tiling.inputs,
        tiling.ahead,
        tiling.swapped,
        num_warps=4,
        num_stages=tiling.stages,
        launch_pdl=True,
    )
