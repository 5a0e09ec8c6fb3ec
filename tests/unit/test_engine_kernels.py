"""The Triton kernels, compiled for a GPU where there is none. What they compute: tests/interpreted/test_kernels.py."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")


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


@pytest.mark.parametrize("bits", [16, 32])
def test_choices_from_a_large_vocabulary_compile_for_a_gpu(bits: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from sgl_omni.engine.kernels import sampling

    fields = dict(zip(("TEMPERATURE", "TOP_K", "TOP_P", "SEED", "STEP", "DRAWN"), range(6), strict=True))
    sizes = {**fields, "BITS": bits, "CANDIDATES": 64}
    types = {"logits": "*bf16" if bits == 16 else "*fp32", "fields": "*i32", "best": "*fp32", "rows": "*i64"}
    types |= {"ends": "*i64", "ids": "*i32", "counts": "*i32", "out": "*i64"}
    for kernel, more in (
        (sampling._sample_parts, {"BLOCK": 4096}),
        (sampling._sample_rows, {"PARTS": 64, "BLOCK": 8192}),
    ):
        constants, names = {**sizes, **more}, kernel.arg_names
        signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
        places = {(names.index(name),): value for name, value in constants.items()}
        assert compile(ASTSource(kernel, signature, places), target=GPUTarget("cuda", 90, 32)).asm["ptx"]


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


@pytest.mark.parametrize(("heads", "kv_heads", "neighbours"), [(16, 8, False), (8, 2, False), (4, 4, True)])
@pytest.mark.parametrize(("start", "count"), [(0, 2), (20, 1)])
def test_the_kernel_of_fixed_places_compiles_for_a_gpu(
    heads: int, kv_heads: int, neighbours: bool, start: int, count: int
) -> None:
    """Launched early; by the tensor cores' instructions where places lie before."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from sgl_omni.engine.kernels import places

    constants = {
        "PAIR_STRIDE": 2 if neighbours else 1,
        "PARTS": 1 if neighbours else 2,
        "COUNT": count,
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "HALF": 64,
        "HALF_BLOCK": 64,
        "QUERIES": count * heads // kv_heads,
        "BEFORE": 32 if start else 0,
        "HAS_NORM": heads == 16,
        "NEIGHBOURS": neighbours,
        "PRECISION": "tf32",
        "EARLY": True,
    }
    types = dict.fromkeys(("eps", "scale"), "fp32")
    types |= dict.fromkeys(("start", "length", "part_stride", "turn_stride"), "i32")
    types |= dict.fromkeys(("cosine", "sine"), "*fp32") if neighbours else {"qkv": "*fp32"}
    names = places._attend.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "*bf16") for name in names}
    at = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(places._attend, signature, at)
    done = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert ("mma" in done.asm["ptx"]) == bool(start) and "griddepcontrol.wait" in done.asm["ptx"]


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize(("columns", "width"), [(1, 96), (32, 512), (64, 512), (96, 96), (192, 192), (4096, 512)])
def test_the_convolution_kernel_compiles_for_a_gpu(columns: int, width: int, gelu: bool) -> None:
    """By the tensor cores' instructions, within a processor's shared memory."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from sgl_omni.engine.kernels import convolution

    times, block, inputs, warps, stages = convolution._tile(columns, width)
    constants = {"TIMES": times, "COLUMNS": block, "INPUTS": inputs, "MOST": 65504.0, "GELU": gelu}
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


@pytest.mark.parametrize("width", [768, 1280])
def test_the_kernel_of_rings_compiles_for_a_gpu(width: int) -> None:
    """Without room for a register on the stack, and by loads and stores of several numbers."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from sgl_omni.engine.kernels import rings

    constants = {"WIDTH": width, "HALF": 32, "BLOCK": triton.next_power_of_2(width // 2)}
    types = {"rotation": "*fp32", "writes": "*i64", "steps": "i32", "known_steps": "i32"}
    names = rings._rotate_and_keep.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "*bf16") for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(rings._rotate_and_keep, signature, places, aligned)
    compiled = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert "local" not in compiled.asm["ptx"]
    assert "ld.global.v" in compiled.asm["ptx"] and "st.global.v" in compiled.asm["ptx"]


def test_tiles_are_smaller_where_less_of_them_is_nobodys() -> None:
    from sgl_omni.engine.kernels import convolution

    tiles = {size: convolution._tile(size, size)[1:3] for size in (1, 32, 64, 96, 192, 288, 384, 512)}
    assert tiles == {
        1: (16, 16), 32: (32, 32), 64: (64, 32), 96: (128, 32), 192: (64, 32), 288: (64, 32), 384: (128, 64),
        512: (128, 64),
    }  # fmt: skip


def test_the_kernels_of_a_past_compile_for_a_gpu() -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from sgl_omni.engine.kernels import causal

    floats = ("memory", "weight", "bias", "gain", "offset")
    types = dict.fromkeys(floats, "*fp32") | {"x": "*fp16", "out": "*fp16", "lengths": "*i32", "eps": "fp32"}
    sizes = {causal._carry: {"LEFT": 64, "CHANNELS": causal._CHANNELS}, causal._depthwise_norm: {"CHANNELS": 1024}}
    for kernel, constants in sizes.items():
        names = kernel.arg_names
        signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
        places = {(names.index(name),): value for name, value in constants.items()}
        compiled = compile(ASTSource(kernel, signature, places), target=GPUTarget("cuda", 90, 32))
        assert ("bar.sync" in compiled.asm["ptx"]) or kernel is causal._depthwise_norm


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
