"""Names and shapes of the audio tokenizer's tensors, from its config. Imports no torch.

They are those that ``CodecEncoder`` and ``CodecDecoder`` read, known before anything is built; tests hold both equal.
"""

from __future__ import annotations

from collections.abc import Sequence

from sgl_omni.engine.shapes import Named, norm_shapes
from sgl_omni.models.moss_tts_local.codec_spec import BlockSpec, CodecSpec, QuantizerSpec, TransformerSpec


def codec_shapes(spec: CodecSpec, num_codebooks: int) -> Named:
    """``num_codebooks``: of the first, those that the model speaks."""
    yield from _stack(spec.encoder, "encoder")
    yield from _stack(spec.decoder, "decoder")
    yield from _quantizer(spec.quantizer, num_codebooks)


def _stack(blocks: Sequence[BlockSpec], name: str) -> Named:
    for i, block in enumerate(blocks):
        if not isinstance(block, TransformerSpec):
            continue
        width = block.width
        yield f"{name}.{i}.input_proj.weight", (width, block.in_size)
        yield f"{name}.{i}.output_proj.weight", (block.out_size, width)
        for at in range(block.num_layers):
            layer = f"{name}.{i}.transformer.layers.{at}"
            yield from norm_shapes(f"{layer}.norm1", width)
            yield from norm_shapes(f"{layer}.norm2", width)
            yield f"{layer}.self_attn.in_proj.weight", (3 * width, width)
            yield f"{layer}.self_attn.out_proj.weight", (width, width)
            yield f"{layer}.ffn.0.weight", (block.inner_size, width)
            yield f"{layer}.ffn.2.weight", (width, block.inner_size)
            if block.scaled:
                yield f"{layer}.layer_scale_1.scale", (width,)
                yield f"{layer}.layer_scale_2.scale", (width,)


def _quantizer(spec: QuantizerSpec, num_codebooks: int) -> Named:
    yield from _projection("quantizer.input_proj", spec.in_size, spec.size)
    yield from _projection("quantizer.output_proj", spec.size, spec.out_size)
    for i in range(num_codebooks):
        book = f"quantizer.quantizers.{i}"
        yield f"{book}.codebook.weight", (spec.codebook_size, spec.codebook_dim)
        yield from _projection(f"{book}.in_proj", spec.size, spec.codebook_dim)
        yield from _projection(f"{book}.out_proj", spec.codebook_dim, spec.size)


def _projection(name: str, in_size: int, out_size: int) -> Named:
    """Its weight as directions and lengths; there is none between equal sizes."""
    if in_size == out_size:
        return
    yield f"{name}.parametrizations.weight.original0", (out_size, 1, 1)
    yield f"{name}.parametrizations.weight.original1", (out_size, in_size, 1)
    yield f"{name}.bias", (out_size,)
