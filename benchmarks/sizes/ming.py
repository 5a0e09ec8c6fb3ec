"""The configs of Ming-Omni-TTS's two checkpoints.

inclusionAI/Ming-omni-tts-0.5B: every number is one of its published ``config.json``.

inclusionAI/Ming-omni-tts-16.8B-A3B: its ``config.json`` was not seen. The language model's numbers are those of
inclusionAI/Ling-lite-1.5, a BailingMoe of 16.8 billion parameters; width, layers, heads, experts and vocabulary are
also what other code takes by default for this checkpoint. The kind of its positions is known from code that reads
it. Assumed: that flow, aggregator and audio VAE are as large as the small checkpoint's.
"""

from __future__ import annotations

from typing import Any

from benchmarks.sizes.published import Files, merged

_TOWER = {
    "model_type": "qwen2",
    "vocab_size": 1,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "use_sliding_window": True,
    "sliding_window": 64,
    "max_window_layers": 0,
}
_DENSE = {
    **_TOWER,
    "vocab_size": 151936,
    "use_sliding_window": False,
    "sliding_window": 32768,
    "max_window_layers": 21,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "tie_word_embeddings": True,
}
_EXPERTS = {
    "model_type": "bailing_moe",
    "vocab_size": 126464,
    "hidden_size": 2048,
    "intermediate_size": 1408,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rope_theta": 600000,
    "rope_scaling": {"type": "3D", "factor": None},
    "first_k_dense_replace": 0,
    "num_experts": 64,
    "num_experts_per_tok": 6,
    "num_shared_experts": 2,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": True,
    "use_bias": False,
    "use_qkv_bias": False,
    "eos_token_id": 126081,
    "tie_word_embeddings": False,
}
_BLOCKS = {"hidden_size": 1024, "depth": 8, "num_heads": 16, "mlp_ratio": 4}
_SMALL_BLOCKS = {"hidden_size": 32, "depth": 2, "num_heads": 2}
_SMALL_TOWER = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_SMALL_EXPERTS = {"head_dim": 16, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
_SMALL = {
    "llm_config": _SMALL_TOWER,
    "ditar_config": _SMALL_BLOCKS,
    "aggregator_config": _SMALL_BLOCKS,
    "audio_tokenizer_config": {
        "enc_kwargs": {"backbone": _SMALL_TOWER},
        "dec_kwargs": {"backbone": _SMALL_TOWER},
    },
}


def ming_omni_tts(layers: int | None, tiny: bool) -> Files:
    """inclusionAI/Ming-omni-tts-0.5B."""
    return _files("dense", _DENSE, _SMALL, layers, tiny)


def ming_omni_tts_moe(layers: int | None, tiny: bool) -> Files:
    """inclusionAI/Ming-omni-tts-16.8B-A3B, as far as it is known."""
    return _files("bailingmm", _EXPERTS, merged(_SMALL, {"llm_config": _SMALL_EXPERTS}), layers, tiny)


def _files(kind: str, llm: dict[str, Any], small: dict[str, Any], layers: int | None, tiny: bool) -> Files:
    """``tiny``: the same steps of 0.32 s, four latents of four frames of 882 samples."""
    config = {
        "architectures": ["BailingMMNativeForConditionalGeneration"],
        "model_type": kind,
        "llm_config": llm,
        "ditar_config": {**_BLOCKS, "patch_size": 4, "history_patch_size": 32},
        "aggregator_config": _BLOCKS,
        "audio_tokenizer_config": {
            "sample_rate": 44100,
            "patch_size": 4,
            "enc_kwargs": {"latent_dim": 64, "hop_size": 882, "input_dim": 882, "backbone": _TOWER},
            "dec_kwargs": {"latent_dim": 64, "output_dim": 882, "backbone": _TOWER},
            "semantic_module_kwargs": None,
        },
    }
    config = merged(config, small if tiny else {})
    return {"config.json": merged(config, {"llm_config": {"num_hidden_layers": layers}} if layers else {})}
