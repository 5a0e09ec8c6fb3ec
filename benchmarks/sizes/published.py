"""What the configs of published checkpoints say, as far as anything here reads it: sizes, ids, rates.

Each function returns the JSON files of a model folder by their paths in it. ``layers`` cuts the main decoder; ``tiny``
makes every width small and keeps vocabularies and ids, so that prompts are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.sizes.moss_codec import moss_codec

Files = dict[str, dict[str, Any]]

QWEN_IDS = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}
_SMALL_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, **_SMALL_HEADS}
_QWEN3_4B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "attention_bias": False,
    "tie_word_embeddings": True,
}


def merged(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with some values changed, within objects too."""
    found = dict(config)
    for key, value in changes.items():
        inner = found.get(key)
        found[key] = merged(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    return found


def text_llm(layers: int | None, tiny: bool) -> Files:
    """Qwen/Qwen3-4B."""
    config = {
        **_backbone(layers, tiny),
        "architectures": ["Qwen3ForCausalLM"],
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "torch_dtype": "bfloat16",
    }
    generation = {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "bos_token_id": 151643,
        "eos_token_id": [151645, 151643],
    }
    return {"config.json": config, "generation_config.json": generation}


def higgs_tts(layers: int | None, tiny: bool) -> Files:
    """bosonai/higgs-tts-3-4b: Qwen3-4B's body, eight codebooks, the audio tokenizer in the same file."""
    text = {**_backbone(layers, tiny), "rope_theta": None}
    audio = {
        "model_type": "higgs_audio_encoder",
        "encoder_type": "discrete",
        "num_codebooks": 8,
        "vocab_size": 1026,
        "out_dim": text["hidden_size"],
        "tie_word_embeddings": True,
        "use_delay_pattern": True,
    }
    files: Files = {
        "config.json": {
            "architectures": ["HiggsMultimodalQwen3ForConditionalGeneration"],
            "model_type": "higgs_multimodal_qwen3",
            "audio_token_id": -100,
            "text_config": text,
            "audio_encoder_config": audio,
        }
    }
    if tiny:  # the published checkpoint has no such file; its codec is what the loader takes without one
        files["audio_tokenizer/config.json"] = _SMALL_HIGGS_CODEC
    return files


def qwen3_tts(layers: int | None, tiny: bool) -> Files:
    """Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice."""
    small = _SMALL if tiny else {}
    predictor = {
        "model_type": "qwen3_tts_talker_code_predictor",
        "vocab_size": 2048,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 5,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_code_groups": 16,
        "max_position_embeddings": 65536,
        "rope_theta": 1000000,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        **small,
    }
    talker: dict[str, Any] = {
        "model_type": "qwen3_tts_talker",
        "vocab_size": 3072,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_code_groups": 16,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000,
        "rope_scaling": {"interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "text_hidden_size": 64 if tiny else 2048,
        "text_vocab_size": 151936,
        "codec_pad_id": 2148,
        "codec_bos_id": 2149,
        "codec_eos_token_id": 2150,
        "codec_think_id": 2154,
        "codec_nothink_id": 2155,
        "codec_think_bos_id": 2156,
        "codec_think_eos_id": 2157,
        "codec_language_id": {"chinese": 2055, "english": 2050, "german": 2053, "sichuan_dialect": 2062},
        "spk_id": {"vivian": 3065, "serena": 3066, "ryan": 3061, "eric": 2875},
        "spk_is_dialect": {"vivian": False, "serena": False, "ryan": False, "eric": "sichuan_dialect"},
        "code_predictor_config": predictor,
        **small,
        **_depth(layers),
    }
    if tiny:
        talker["rope_scaling"] = {**talker["rope_scaling"], "mrope_section": [2, 3, 3]}
    config = {
        "architectures": ["Qwen3TTSForConditionalGeneration"],
        "model_type": "qwen3_tts",
        "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        "tts_model_size": "1b7",
        "tts_model_type": "custom_voice",
        "im_start_token_id": 151644,
        "im_end_token_id": 151645,
        "assistant_token_id": 77091,
        "tts_pad_token_id": 151671,
        "tts_bos_token_id": 151672,
        "tts_eos_token_id": 151673,
        "talker_config": talker,
    }
    generation = {
        "do_sample": True,
        "temperature": 0.9,
        "top_k": 50,
        "top_p": 1.0,
        "repetition_penalty": 1.05,
        "subtalker_dosample": True,
        "subtalker_temperature": 0.9,
        "subtalker_top_k": 50,
        "subtalker_top_p": 1.0,
        "max_new_tokens": 8192,
    }
    return {
        "config.json": config,
        "generation_config.json": generation,
        "speech_tokenizer/config.json": _qwen3_tts_codec(tiny),
    }


def moss_tts_local(layers: int | None, tiny: bool) -> Files:
    """OpenMOSS-Team/MOSS-TTS-Local-Transformer-v1.5, with MOSS-Audio-Tokenizer-v2 in a folder within."""
    body = _backbone(layers, tiny)
    local = {
        "n_embd": body["hidden_size"],
        "n_layer": 1,
        "n_head": 4 if tiny else 32,
        "n_inner": body["intermediate_size"],
        "activation_function": "silu",
        "layer_norm_epsilon": 1e-6,
        "position_embedding_type": "rope",
        "rope_base": 1e6,
    }
    config = {
        "architectures": ["MossTTSLocalModel"],
        "model_type": "moss_tts_local",
        "qwen3_config": body,
        "gpt2_config": local,
        "local_transformer_layers": 1,
        "local_text_head_mode": "binary",
        "n_vq": 12,
        "audio_vocab_size": 1024,
        "audio_codebook_sizes": [1024] * 12,
        "audio_pad_token_id": 1024,
        "pad_token_id": 151643,
        "im_start_token_id": 151644,
        "im_end_token_id": 151645,
        "audio_start_token_id": 151669,
        "audio_end_token_id": 151670,
        "audio_user_slot_token_id": 151654,
        "audio_assistant_slot_token_id": 151656,
        "sampling_rate": 48000,
        "audio_tokenizer_name_or_path": "OpenMOSS-Team/MOSS-Audio-Tokenizer-v2",
    }
    return {"config.json": config, "audio_tokenizer/config.json": moss_codec(tiny)}


def csm(layers: int | None, tiny: bool) -> Files:
    """sesame/csm-1b as transformers has it, with Mimi in the same file."""

    def rope(low: float, high: float, length: int) -> dict[str, Any]:
        scaling = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0}
        lengths = {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": length}
        return {**scaling, **lengths}

    shared = {"num_codebooks": 32, "vocab_size": 2051, "hidden_act": "silu", "rms_norm_eps": 1e-5}
    depth = {
        **shared,
        "model_type": "csm_depth_decoder_model",
        "hidden_size": 1024,
        "backbone_hidden_size": 64 if tiny else 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 33,
        "rope_parameters": rope(0.001953125, 0.0078125, 16),
        **(_SMALL if tiny else {}),
    }
    config = {
        **shared,
        "architectures": ["CsmForConditionalGeneration"],
        "model_type": "csm",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "text_vocab_size": 128256,
        "rope_parameters": rope(0.125, 0.5, 1024),
        "bos_token_id": 128000,
        "audio_token_id": 128002,
        "audio_eos_token_id": 128003,
        "pad_token_id": 128002,
        "codebook_pad_token_id": 2050,
        "codebook_eos_token_id": 0,
        "tie_codebooks_embeddings": True,
        "depth_decoder_config": depth,
        "codec_config": _mimi(tiny),
        **(_SMALL if tiny else {}),
        **_depth(layers),
    }
    return {"config.json": config}


def _mimi(tiny: bool) -> dict[str, Any]:
    found = {
        "model_type": "mimi",
        "sampling_rate": 24000,
        "audio_channels": 1,
        "num_quantizers": 32,
        "codebook_size": 2048,
        "codebook_dim": 256,
        "hidden_size": 512,
        "num_filters": 64,
        "vector_quantization_hidden_dimension": 256,
        "upsampling_ratios": [8, 6, 5, 4],
        "upsample_groups": 512,
        "num_hidden_layers": 8,
        "intermediate_size": 2048,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 250,
    }
    if tiny:
        found |= {"codebook_dim": 8, "hidden_size": 16, "num_filters": 2, "vector_quantization_hidden_dimension": 8}
        found |= {"upsample_groups": 16, "num_hidden_layers": 2, "intermediate_size": 32, "head_dim": 8}
        found |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    return found


def whisper(layers: int | None, tiny: bool) -> Files:
    """openai/whisper-large-v3-turbo."""
    config: dict[str, Any] = {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "vocab_size": 51866,
        "d_model": 1280,
        "num_mel_bins": 128,
        "encoder_layers": 32,
        "decoder_layers": 4,
        "encoder_attention_heads": 20,
        "decoder_attention_heads": 20,
        "encoder_ffn_dim": 5120,
        "decoder_ffn_dim": 5120,
        "max_source_positions": 1500,
        "max_target_positions": 448,
        "activation_function": "gelu",
        "bos_token_id": 50257,
        "eos_token_id": 50257,
        "pad_token_id": 50257,
        "decoder_start_token_id": 50258,
    }
    if tiny:
        config |= {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2}
        config |= {f"{part}_attention_heads": 4 for part in ("encoder", "decoder")}
        config |= {f"{part}_ffn_dim": 96 for part in ("encoder", "decoder")}
    if layers:
        config |= {"encoder_layers": layers, "decoder_layers": min(layers, config["decoder_layers"])}
    return {"config.json": config}


def qwen3_asr(layers: int | None, tiny: bool) -> Files:
    """Qwen/Qwen3-ASR-1.7B in its authors' layout."""
    audio = {
        "model_type": "qwen3_asr_audio_encoder",
        "d_model": 1024,
        "encoder_layers": 24,
        "encoder_attention_heads": 16,
        "encoder_ffn_dim": 4096,
        "num_mel_bins": 128,
        "output_dim": 2048,
        "downsample_hidden_size": 480,
        "n_window": 50,
        "n_window_infer": 800,
        "conv_chunksize": 500,
        "max_source_positions": 1500,
        **(_SMALL_TOWER if tiny else {}),
    }
    text = {
        **_QWEN3_4B,
        "model_type": "qwen3_asr_text",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "max_position_embeddings": 65536,
        "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True},
        **(_SMALL if tiny else {}),
        **_depth(layers),
    }
    if tiny:
        text["rope_scaling"] = {**text["rope_scaling"], "mrope_section": [2, 3, 3]}
    thinker = {
        "model_type": "qwen3_asr_thinker",
        "audio_config": audio,
        "text_config": text,
        "audio_token_id": ASR_IDS["<|audio_pad|>"],
    }
    mel = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128, "sampling_rate": 16000}
    return {
        "config.json": {
            "architectures": ["Qwen3ASRForConditionalGeneration"],
            "model_type": "qwen3_asr",
            "thinker_config": thinker,
            "support_languages": ["Chinese", "English", "German"],
        },
        "generation_config.json": {"do_sample": False, "eos_token_id": [151643, 151645]},
        "preprocessor_config.json": {**mel, "hop_length": 160, "n_fft": 400, "chunk_length": 30},
    }


def qwen3_omni(layers: int | None, tiny: bool) -> Files:
    """Qwen/Qwen3-Omni-30B-A3B-Instruct."""
    config = merged(_OMNI, _SMALL_OMNI if tiny else {})
    if layers:
        thinker, talker = config["thinker_config"]["text_config"], config["talker_config"]
        thinker["num_hidden_layers"] = layers
        talker["text_config"]["num_hidden_layers"] = min(layers, talker["text_config"]["num_hidden_layers"])
        talker["accept_hidden_layer"] = min(talker["accept_hidden_layer"], layers - 1)
    pictures = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 128,
        "sampling_rate": 16000,
        "hop_length": 160,
        "n_fft": 400,
        "chunk_length": 300,
        "return_attention_mask": True,
        "image_processor_type": "Qwen2VLImageProcessor",
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "patch_size": 16,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "min_pixels": 3136,
        "max_pixels": 12845056,
    }
    generation = {
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "eos_token_id": [151645],
        "talker_temperature": 0.9,
        "talker_top_k": 50,
        "talker_top_p": 1.0,
        "talker_repetition_penalty": 1.05,
        "talker_max_new_tokens": 8 if tiny else 48,  # published: 4096; here speech ends by this limit alone
    }
    return {
        "config.json": config,
        "preprocessor_config.json": pictures,
        "generation_config.json": generation,
        "chat_template.json": {"chat_template": OMNI_TEMPLATE},
    }


def _depth(layers: int | None) -> dict[str, int]:
    return {"num_hidden_layers": layers} if layers else {}


def _backbone(layers: int | None, tiny: bool) -> dict[str, Any]:
    return {**_QWEN3_4B, **(_SMALL if tiny else {}), **_depth(layers)}


_SMALL_HIGGS_CODEC: dict[str, Any] = {
    "target_bandwidths": [2],
    "sample_rate": 24000,
    "codebook_size": 1024,
    "codebook_dim": 8,
    "downsample_factor": 320,
    "acoustic_model_config": {
        "model_type": "dac",
        "encoder_hidden_size": 4,
        "downsampling_ratios": [8, 5, 4, 2, 3],
        "decoder_hidden_size": 32,
        "upsampling_ratios": [8, 5, 4, 2, 3],
        "hidden_size": 16,
        "n_codebooks": 1,
        "codebook_size": 1024,
        "codebook_dim": 8,
    },
    "semantic_model_config": {
        "model_type": "hubert",
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "conv_dim": [16] * 7,
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 2,
    },
}


def _qwen3_tts_codec(tiny: bool) -> dict[str, Any]:
    decoder = {
        "codebook_size": 2048,
        "codebook_dim": 512,
        "num_quantizers": 16,
        "latent_dim": 1024,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 64,
        "sliding_window": 72,
        "rope_theta": 10000,
        "rms_norm_eps": 1e-5,
        "layer_scale_initial_scale": 0.01,
        "max_position_embeddings": 8000,
        "decoder_dim": 1536,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
    }
    if tiny:
        decoder |= {"codebook_dim": 16, "latent_dim": 24, "hidden_size": 16, "intermediate_size": 24, "head_dim": 8}
        decoder |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "decoder_dim": 32}
    return {
        "architectures": ["Qwen3TTSTokenizerV2Model"],
        "model_type": "qwen3_tts_tokenizer_12hz",
        "encoder_valid_num_quantizers": 16,
        "input_sample_rate": 24000,
        "output_sample_rate": 24000,
        "encode_downsample_rate": 1920,
        "decode_upsample_rate": 1920,
        "decoder_config": decoder,
    }


OMNI_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}"
    "{% elif part.type == 'audio' %}<|audio_start|><|audio_pad|><|audio_end|>"
    "{% else %}<|vision_start|><|{{ part.type }}_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OMNI_IDS = {
    **QWEN_IDS,
    "<|vision_start|>": 151652,
    "<|vision_end|>": 151653,
    "<|image_pad|>": 151655,
    "<|video_pad|>": 151656,
    "<|audio_start|>": 151669,
    "<|audio_end|>": 151670,
    "<tts_pad>": 151671,
    "<tts_text_bos>": 151672,
    "<tts_text_eod>": 151673,
    "<|audio_pad|>": 151675,
}
ROLE_IDS = {"system": 8948, "user": 872, "assistant": 77091}

ASR_IDS = {**QWEN_IDS, "<|audio_start|>": 151669, "<|audio_end|>": 151670, "<|audio_pad|>": 151676}

_AXES = {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True, "rope_theta": 1000000}
_OMNI: dict[str, Any] = {
    "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
    "model_type": "qwen3_omni_moe",
    "enable_audio_output": True,
    "im_start_token_id": 151644,
    "im_end_token_id": 151645,
    "system_token_id": 8948,
    "user_token_id": 872,
    "assistant_token_id": 77091,
    "tts_pad_token_id": 151671,
    "tts_bos_token_id": 151672,
    "tts_eos_token_id": 151673,
    "thinker_config": {
        "model_type": "qwen3_omni_moe_thinker",
        "audio_token_id": 151675,
        "image_token_id": 151655,
        "video_token_id": 151656,
        "audio_start_token_id": 151669,
        "audio_end_token_id": 151670,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "user_token_id": 872,
        "position_id_per_seconds": 13,
        "text_config": {
            "model_type": "qwen3_omni_moe_text",
            "vocab_size": 152064,
            "hidden_size": 2048,
            "intermediate_size": 768,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 65536,
            "rope_theta": 1000000,
            "rope_parameters": _AXES,
            "tie_word_embeddings": False,
            "attention_bias": False,
        },
        "audio_config": {
            "model_type": "qwen3_omni_moe_audio_encoder",
            "d_model": 1280,
            "encoder_layers": 32,
            "encoder_attention_heads": 20,
            "encoder_ffn_dim": 5120,
            "num_mel_bins": 128,
            "output_dim": 2048,
            "downsample_hidden_size": 480,
            "n_window": 50,
            "n_window_infer": 800,
            "conv_chunksize": 500,
            "max_source_positions": 1500,
        },
        "vision_config": {
            "model_type": "qwen3_omni_moe_vision_encoder",
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "out_hidden_size": 2048,
            "num_position_embeddings": 2304,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "deepstack_visual_indexes": [8, 16, 24],
        },
    },
    "talker_config": {
        "model_type": "qwen3_omni_moe_talker",
        "num_code_groups": 16,
        "thinker_hidden_size": 2048,
        "accept_hidden_layer": 24,
        "codec_pad_id": 2148,
        "codec_bos_id": 2149,
        "codec_eos_token_id": 2150,
        "codec_nothink_id": 2155,
        "codec_think_bos_id": 2156,
        "codec_think_eos_id": 2157,
        "speaker_id": {"chelsie": 2301, "ethan": 2302, "aiden": 2303},
        "spatial_merge_size": 2,
        "position_id_per_seconds": 13,
        "audio_token_id": 151675,
        "image_token_id": 151655,
        "video_token_id": 151656,
        "audio_start_token_id": 151669,
        "vision_start_token_id": 151652,
        "text_config": {
            "model_type": "qwen3_omni_moe_talker_text",
            "vocab_size": 3072,
            "hidden_size": 1024,
            "intermediate_size": 2048,
            "moe_intermediate_size": 384,
            "shared_expert_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 6,
            "norm_topk_prob": True,
            "num_hidden_layers": 20,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 65536,
            "rope_theta": 1000000,
            "rope_parameters": _AXES,
            "attention_bias": False,
        },
        "code_predictor_config": {
            "model_type": "qwen3_omni_moe_talker_code_predictor",
            "vocab_size": 2048,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 5,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_code_groups": 16,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 32768,
            "rope_theta": 1000000,
            "attention_bias": False,
        },
    },
    "code2wav_config": {
        "model_type": "qwen3_omni_moe_code2wav",
        "codebook_size": 2048,
        "num_quantizers": 16,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "decoder_dim": 1536,
        "sliding_window": 72,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
    },
}
_SMALL_TOWER = {
    "d_model": 32,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "output_dim": 64,
    "downsample_hidden_size": 16,
}
_SMALL_EXPERTS = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
_SMALL_AXES = {"rope_parameters": {"mrope_section": [2, 3, 3]}}
_SMALL_OMNI: dict[str, Any] = {
    "thinker_config": {
        "text_config": {**_SMALL, **_SMALL_EXPERTS, **_SMALL_AXES, "num_hidden_layers": 4},
        "audio_config": _SMALL_TOWER,
        "vision_config": {
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 1, 2],
        },
    },
    "talker_config": {
        "thinker_hidden_size": 64,
        "accept_hidden_layer": 2,
        "text_config": {**_SMALL, **_SMALL_EXPERTS, **_SMALL_AXES, "shared_expert_intermediate_size": 24},
        "code_predictor_config": _SMALL,
    },
    "code2wav_config": {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "decoder_dim": 64,
    },
}
