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
for vocabulary, dtype, first_column in ((50, torch.float32, 0), (130, torch.bfloat16, 0), (50, torch.float32, 2)):
    chosen, expected = checks.check_sampling("cpu", vocabulary, dtype, first_column)
    assert torch.equal(chosen, expected), vocabulary
for rows, experts, choices in ((1, 4, 1), (5, 4, 2), (3, 16, 4), (70, 6, 3)):
    off = checks.check_moe("cpu", torch.float32, rows=rows, experts=experts, choices=choices)
    assert off < 3e-6, ("moe", rows, experts, choices, off)
for dtype, most in ((torch.float32, 2e-6), (torch.float16, 4e-3)):
    for module, inputs, length in checks.CONVOLUTIONS:
        off = checks.check_convolution("cpu", dtype, module, inputs, length)
        assert off < most, ("convolution", module, dtype, off)
checks.check_state("cpu")
checks.check_bits("cpu")
assert checks.check_added("cpu") < 1e-6
for splits in (1, 3):
    assert checks.check_places("cpu", torch.float32, splits) < 3e-6, splits
print("all checked")
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{TESTS}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=900)
    assert done.stdout.endswith("all checked\n"), done.stderr


@pytest.mark.parametrize("tile", [16, 64])
def test_the_experts_kernels_compile_for_a_gpu(tile: int) -> None:
    """Without one: what the interpreter lets pass may not compile."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from sgl_omni.engine.kernels import moe

    sizes = {"HIDDEN": 256, "WIDTH": 192, "CHOICES": 2, "PAIRS": tile, "OUTPUTS": 64, "INPUTS": 64, "PRECISION": "tf32"}
    for kernel, constants in ((moe._order, {"SCAN": 1024}), (moe._gate_up, sizes), (moe._down, sizes)):
        types = {"experts": "*i64", "order": "*i32", "starts": "*i32", "pairs": "i32", "rows": "i32", "out": "*fp32"}
        names = kernel.arg_names
        signature = {name: "constexpr" if name in constants else types.get(name, "*bf16") for name in names}
        places = {(names.index(name),): value for name, value in constants.items()}
        compiled = compile(ASTSource(kernel, signature, places), target=GPUTarget("cuda", 90, 32))
        assert "mma" in compiled.asm["ptx"] or kernel is moe._order


@pytest.mark.parametrize("notes", [False, True])
def test_the_kernel_that_chooses_compiles_for_a_gpu(notes: bool) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from sgl_omni.engine.kernels import sampling

    constants = {"NOTES": notes, "TEMPERATURE": 5, "TOP_K": 6, "TOP_P": 7, "SEED": 8, "STEP": 2, "DRAWN": 9}
    constants |= {"BITS": 16, "BLOCK": 2048}
    types = dict.fromkeys(("rows", "ends", "out"), "*i64") | {"logits": "*bf16", "fields": "*i32", "lost": "*i32"}
    names = sampling._sample.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    done = compile(ASTSource(sampling._sample, signature, places), target=GPUTarget("cuda", 90, 32))
    assert done.asm["ptx"].count("st.global.b32") == notes, "besides the id, one word is written where it is asked for"


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_the_attention_kernels_compile_for_a_gpu(tiled: bool, split: bool) -> None:
    """By the tensor cores' instructions, launched early, within a processor's shared memory."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from sgl_omni.engine.kernels import attention

    sizes = {"HEADS": 32, "KV_HEADS": 8, "GROUP": 4, "HEAD_DIM": 128, "HEAD_BLOCK": 128, "PAGE": 16, "TILE": 64}
    kinds = {
        attention._decode: {"AT_ONCE": 2, "SPLIT": split, "TILED": tiled, "EARLY": True},
        attention._prefill: {"ROWS": attention.TILE_ROWS},
    }
    types = dict.fromkeys(("rows", "positions", "tiled", "tiles"), "*i64")
    types |= {"tables": "*i32", "partial": "*fp32" if split else "*bf16", "scale": "fp32"}
    types |= dict.fromkeys(("window", "table_stride", "splits"), "i32")
    for kernel, more in kinds.items():
        constants = {**sizes, **more, "PRECISION": "tf32"}
        names = kernel.arg_names
        signature = {name: "constexpr" if name in constants else types.get(name, "*bf16") for name in names}
        places = {(names.index(name),): value for name, value in constants.items()}
        options = {"num_warps": 4, "num_stages": 3 if kernel is attention._decode else 2}
        source = ASTSource(kernel, signature, places)
        done = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert "mma" in done.asm["ptx"] and done.metadata.shared <= 227 * 1024
        assert ("griddepcontrol.wait" in done.asm["ptx"]) == (kernel is attention._decode)


@pytest.mark.parametrize("columns", [1, 32, 64, 4096])
def test_the_convolution_kernel_compiles_for_a_gpu(columns: int) -> None:
    """By the tensor cores' instructions, within a processor's shared memory."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from sgl_omni.engine.kernels import convolution

    times, block, inputs, warps, stages = convolution._tile(columns, 512)
    constants = {"TIMES": times, "COLUMNS": block, "INPUTS": inputs, "MOST": 65504.0}
    halves = {"x", "weight", "active"}
    floats = {"bias", "residual", "alpha", "inverse", "plain"}
    names = convolution._convolve.arg_names
    types = dict.fromkeys(halves, "*fp16") | dict.fromkeys(floats, "*fp32") | {"lengths": "*i32"}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    aligned = {
        (at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if name in {*halves, *floats, "inputs"}
    }
    options = {"num_warps": warps, "num_stages": stages}
    source = ASTSource(convolution._convolve, signature, places, aligned)
    compiled = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert "mma" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 227 * 1024


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [1, 24, 64])
def test_products_of_few_rows_compile_for_a_gpu(rows: int, gated: bool) -> None:
    """By the tensor cores' instructions, within a processor's shared memory."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from sgl_omni.engine.kernels import linear

    for outputs, inputs in ((6144, 2560), (2560, 4096)):
        tiling = linear._tiling(rows, outputs, inputs, gated)
        types = {
            "x_tiles": f"tensordesc<bf16[{tiling.rows}, {tiling.inputs}]>",
            "weight": "*bf16",
            "weight_tiles": f"tensordesc<bf16[{tiling.outputs}, {tiling.inputs}]>",
            "out": "*bf16" if gated else "*fp32",
            **dict.fromkeys(("rows", "outputs", "inputs", "splits"), "i32"),
        }
        constants = {
            "GATED": gated,
            "ROWS": tiling.rows,
            "OUTPUTS": tiling.outputs,
            "INPUTS": tiling.inputs,
            "AHEAD": tiling.ahead,
            "SWAPPED": tiling.swapped,
        }
        signature = types | dict.fromkeys(constants, "constexpr")
        source = ASTSource(linear._linear, signature=signature, constexprs=constants)
        done = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": tiling.stages})
        assert "wgmma" in done.asm["ptx"] or "mma.sync" in done.asm["ptx"]
        assert done.metadata.shared <= 227 * 1024
