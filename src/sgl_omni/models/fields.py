"""What fields that are no numbers may hold in a model's JSON files, by their names, wherever they stand. No torch.

As ``numbers`` does for numbers: a field that nobody reads, neither here nor in transformers, may hold anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sgl_omni.errors import InvalidRequest

_FLAGS = frozenset(
    {
        *("do_sample", "talker_do_sample", "subtalker_dosample", "tie_word_embeddings", "tie_codebooks_embeddings"),
        *("attention_bias", "mlp_bias", "qkv_bias", "use_bias", "use_qkv_bias", "conv_bias", "norm_topk_prob"),
        *("use_cache", "use_sliding_window", "use_delay_pattern", "use_causal_conv", "use_conv_shortcut"),
        *("mrope_interleaved", "is_multilingual", "is_encoder_decoder", "enable_audio_output", "scale_embedding"),
        *("feat_proj_layer_norm", "do_stable_layer_norm", "scale_attn_weights", "scale_attn_by_inverse_layer_idx"),
        *("return_attention_mask", "do_normalize"),
    }
)
_OBJECTS = frozenset(
    {
        *("rope_parameters", "rope_scaling", "speaker_id", "spk_id", "spk_is_dialect", "codec_language_id"),
        *("text_config", "audio_config", "vision_config", "thinker_config", "talker_config", "code2wav_config"),
        *("code_predictor_config", "speaker_encoder_config", "encoder_config", "decoder_config", "codec_config"),
        *("depth_decoder_config", "audio_encoder_config", "acoustic_model_config", "semantic_model_config"),
        *("llm_config", "ditar_config", "aggregator_config", "audio_tokenizer_config", "qwen3_config", "gpt2_config"),
        *("enc_kwargs", "dec_kwargs", "backbone", "quantizer_kwargs", "quantization_config"),
    }
)
_TEXTS = frozenset(
    {
        *("hidden_act", "activation_function", "model_type", "rope_type", "dtype", "torch_dtype"),
        *("module_type", "quantizer_type"),
    }
)
_BLOCKS = frozenset({"encoder_kwargs", "decoder_kwargs"})
_IDS = frozenset({"bos_token_id", "pad_token_id"})
_LAYERS = ("full_attention", "sliding_attention")


def check_kinds(config: Mapping[str, Any], file: Path, within: str = "") -> None:
    """Raises ``InvalidRequest`` that names the first field anywhere in a config which is none of its kind.

    Null is none where it stands, and leaves a field to its default.
    """
    for name, value in config.items():
        at = within + name
        kind = None if value is None else _kind_of(name)
        if kind is not None and not kind[1](value):
            raise InvalidRequest(f"{file}: {at} is {str(value)[:80]!r}, no {kind[0]}", param="model_path")
        if name == "layer_types" and value is not None:
            _check_layers(value, config.get("num_hidden_layers"), file, at)
        for i, part in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(part, Mapping):
                check_kinds(part, file, f"{at}.{i}." if isinstance(value, list) else f"{at}.")


def _kind_of(name: str) -> tuple[str, Callable[[Any], bool]] | None:
    if name in _FLAGS:
        return "true or false", lambda value: isinstance(value, bool)
    if name in _OBJECTS:
        return "object", lambda value: isinstance(value, Mapping)
    if name in _TEXTS:
        return "text", lambda value: isinstance(value, str)
    if name == "padding_side":
        return "side, left or right", lambda value: value in ("left", "right")
    if name in _BLOCKS:
        return "list of objects", _are_objects
    if name == "support_languages":
        return "list of texts", _are_texts
    if name in _IDS:
        return "id", _is_id
    if name == "eos_token_id":
        return "id or list of ids", lambda value: _is_id(value) or _are_ids(value)
    return None


def _is_id(value: Any) -> bool:
    """-1 is written for none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= -1


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(map(_is_id, value))


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, Mapping) for each in value)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _check_layers(kinds: Any, count: Any, file: Path, at: str) -> None:
    if not _are_texts(kinds):
        raise InvalidRequest(f"{file}: {at} is {str(kinds)[:80]!r}, no list of texts", param="model_path")
    other = next((kind for kind in kinds if kind not in _LAYERS), None)
    if other is not None:
        raise InvalidRequest(f"{file}: {at} has {other!r}, not one of {', '.join(_LAYERS)}", param="model_path")
    if isinstance(count, int) and len(kinds) != count:
        raise InvalidRequest(f"{file}: {at} has {len(kinds)} entries for {count} layers", param="model_path")
