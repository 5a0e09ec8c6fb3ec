"""The config of OpenMOSS-Team/MOSS-Audio-Tokenizer-v2."""

from __future__ import annotations

from typing import Any


def moss_codec(tiny: bool) -> dict[str, Any]:
    """``tiny``: the same frames of 3840 samples, in narrow and shallow transformers."""

    def transformer(inside: int, outside: int, seconds: float, width: int = 768, layers: int = 12) -> dict[str, Any]:
        width, layers, heads = (32, 1, 2) if tiny else (width, layers, width // 64)
        return {
            "module_type": "Transformer",
            "input_dimension": inside,
            "output_dimension": outside,
            "d_model": width,
            "num_heads": heads,
            "num_layers": layers,
            "dim_feedforward": 4 * width,
            "causal": True,
            "norm": "layer_norm",
            "positional_embedding": "rope",
            "max_period": 10000,
            "gating": "none",
            "layer_scale": 0.01,
            "conv_layout": True,
            "context_duration": seconds,
        }

    first = {"module_type": "PatchedPretransform", "patch_size": 240}
    half = {"module_type": "PatchedPretransform", "patch_size": 2}
    down = [transformer(240, 384, 1.0), *(transformer(768, 384, s) for s in (2.0, 4.0, 8.0))]
    down.append(transformer(768, 640, 10.0))
    up = [transformer(640, 768, 10.0), *(transformer(384, 768, s) for s in (8.0, 4.0, 2.0))]
    up.append(transformer(384, 240, 1.0))
    between = [part for block in down for part in (half, block)][1:]
    return {
        "model_type": "moss-audio-tokenizer",
        "sampling_rate": 48000,
        "downsample_rate": 3840,
        "number_channels": 2,
        "enable_channel_interleave": True,
        "encoder_kwargs": [first, *between, half, transformer(1280, 768, 10.0, 1280, 32)],
        "decoder_kwargs": [
            transformer(768, 1280, 10.0, 1280, 32),
            *(part for block in up for part in (half, block)),
            first,
        ],
        "quantizer_type": "rlfq",
        "quantizer_kwargs": {
            "input_dim": 768,
            "rvq_dim": 512,
            "output_dim": 768,
            "num_quantizers": 32,
            "codebook_size": 1024,
            "codebook_dim": 8,
        },
    }
