"""What numbers in a model's JSON files may be, by the fields' names, wherever in a file they stand. Imports no torch.

Everything downstream multiplies, divides and counts with them. A field that nobody here reads may hold anything.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_omni.errors import InvalidRequest

_MOST = 1 << 40
_REPEATED = re.compile(r"(^|_)(layers?|depth|blocks|experts|quantizers|codebooks|n_vq|code_groups|res2net_scale)$")
_MOST_REPEATED = 4096
"""Layers, or experts or codebooks of one: more is no model, and would be counted out name by name."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """``least`` is the first that is allowed, or with ``above`` the first that is not."""

    name: str
    least: float = 1
    most: float = _MOST
    whole: bool = True
    above: bool = False

    def holds(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.whole else (int, float)):
            return False
        return value > self.least if self.above else value >= self.least


_SIZE = _Kind("whole number above 0")
_COUNT = _Kind("whole number of 0 or more", 0)
_REAL = _Kind("number above 0", 0, whole=False, above=True)
_RATE = _Kind("whole number of 4000 or more", 4000, 192_000)
"""Samples a second: below it there is no speech to hear, and above it no file or player for it."""
_SHARE = _Kind("number of 0 or more", 0, whole=False)
_PART = _Kind("number above 0 and at most 1", 0, 1, whole=False, above=True)
_TOP_K = _Kind("whole number of -1 or more", -1)

_ONE: dict[str, _Kind] = {
    **dict.fromkeys(
        (
            # decoders
            *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
            *(
                "head_dim",
                "vocab_size",
                "max_position_embeddings",
                "sliding_window",
                "original_max_position_embeddings",
            ),
            *("moe_intermediate_size", "num_experts_per_tok", "decoder_sparse_step", "num_code_groups"),
            *("text_vocab_size", "text_hidden_size", "thinker_hidden_size", "n_embd", "n_layer", "n_head", "n_inner"),
            *("local_transformer_layers", "n_vq", "audio_vocab_size", "num_codebooks", "codebook_size", "depth"),
            *("column_vocab_size", "head_vocab_size", "max_text_length", "max_audio_frames", "history_patch_size"),
            # encoders
            *("d_model", "encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"),
            *("encoder_ffn_dim", "decoder_ffn_dim", "max_source_positions", "max_target_positions", "num_mel_bins"),
            *("downsample_hidden_size", "output_dim", "out_hidden_size", "num_position_embeddings", "in_channels"),
            *("patch_size", "spatial_merge_size", "temporal_patch_size", "n_window", "n_window_infer"),
            *("conv_chunksize", "enc_dim", "mel_dim", "enc_attention_channels", "enc_res2net_scale", "enc_se_channels"),
            # codecs
            *("downsample_rate", "downsample_factor", "decode_upsample_rate", "encode_downsample_rate"),
            *("audio_channels", "number_channels", "num_filters", "num_residual_layers", "kernel_size"),
            *("last_kernel_size", "residual_kernel_size", "unit_kernel_size", "compress", "dilation_growth_rate"),
            *("codebook_dim", "num_quantizers", "num_semantic_quantizers", "vector_quantization_hidden_dimension"),
            *("upsample_groups", "latent_dim", "decoder_dim", "encoder_hidden_size", "decoder_hidden_size", "rvq_dim"),
            *("encoder_valid_num_quantizers", "num_conv_pos_embeddings", "num_conv_pos_embedding_groups"),
            *("input_dim", "input_dimension", "output_dimension", "num_heads", "num_layers", "dim_feedforward"),
            *("samples_per_frame", "code_blocks"),
            # what makes frames of samples, and patches of pictures
            *("feature_size", "hop_size", "hop_length", "n_fft", "chunk_length", "min_pixels", "max_pixels"),
            *("shortest_edge", "longest_edge", "max_new_tokens"),
        ),
        _SIZE,
    ),
    **dict.fromkeys(
        (
            *("first_k_dense_replace", "num_shared_experts", "shared_expert_intermediate_size", "num_experts"),
            *("num_local_experts", "max_window_layers", "accept_hidden_layer", "left_context_frames"),
            *("right_context_frames", "text_lookahead", "max_initial_timestamp_index"),
            *("text_token_offset", "voice_token_offset"),
        ),
        _COUNT,
    ),
    **dict.fromkeys(
        (
            *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "rope_theta", "rope_base"),
            *("max_period", "factor", "low_freq_factor", "high_freq_factor", "partial_rotary_factor", "mlp_ratio"),
            *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
            *("frame_rate", "_frame_rate", "context_duration", "causal_transformer_context_duration"),
            *("position_id_per_seconds", "rescale_factor", "repetition_penalty"),
        ),
        _REAL,
    ),
    **dict.fromkeys(
        (
            *("temperature", "initializer_range", "init_std", "dropout", "attention_dropout", "activation_dropout"),
            *("encoder_layerdrop", "decoder_layerdrop", "classifier_dropout", "dither"),
        ),
        _SHARE,
    ),
    **dict.fromkeys(
        ("sampling_rate", "sample_rate", "semantic_sample_rate", "output_sample_rate", "input_sample_rate"), _RATE
    ),
    "padding_value": _Kind("number", -_MOST, whole=False),
    "top_p": _PART,
    "top_k": _TOP_K,
    "audio_tokenizer_config.patch_size": _Kind("whole number above 0, or -1 for none", -1),
}
"""A name, or where the same means something else, the name with that of the object around it."""

_SEVERAL: dict[str, _Kind] = {
    **dict.fromkeys(
        (
            *("upsampling_ratios", "downsampling_ratios", "upsample_rates", "strides", "block_dilations", "conv_dim"),
            *("conv_kernel", "conv_stride", "enc_channels", "enc_kernel_sizes", "enc_dilations"),
            *("audio_codebook_sizes", "mrope_section"),
        ),
        _SIZE,
    ),
    **dict.fromkeys(("channel_ratios", "target_bandwidths", "image_std"), _REAL),
    **dict.fromkeys(("deepstack_visual_indexes", "mlp_only_layers", "delay_pattern"), _COUNT),
    "image_mean": _SHARE,
}
_MAY_BE_EMPTY = frozenset({"deepstack_visual_indexes", "mlp_only_layers"})
_SAMPLING = re.compile(r"(?:^|_)(temperature|top_k|top_p|repetition_penalty|max_new_tokens)$")
_ID = re.compile(r"(^|_)id$")

_NEEDED = frozenset(
    {
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "rms_norm_eps"),
        *("num_code_groups", "thinker_hidden_size", "position_id_per_seconds", "latent_dim", "sampling_rate"),
        *("layer_norm_epsilon", "rope_base", "max_period", "context_duration", "causal_transformer_context_duration"),
        *("patch_size", "history_patch_size", "mlp_ratio", "hop_size", "enc_kwargs.input_dim", "chunk_length"),
        *("enc_channels", "enc_kernel_sizes", "enc_dilations", "enc_dim", "mel_dim", "enc_attention_channels"),
        *("enc_res2net_scale", "enc_se_channels", "conv_dim", "conv_kernel", "conv_stride", "num_conv_pos_embeddings"),
        *("num_conv_pos_embedding_groups", "downsampling_ratios"),
    }
)
"""Not null where they are there: the code that reads them has no choice of its own for that."""
_NOT_NULL_WITHIN = frozenset({"codec_config", "encoder_config", "code2wav_config", "audio_config", "vision_config"})
_NULL_EVEN_THERE = frozenset({"head_dim", "frame_rate", "_frame_rate", "max_position_embeddings"})
"""The first are handed to modules of transformers, which take null for a choice of their own in the second alone."""


def check_numbers(config: Mapping[str, Any], file: Path, within: str = "") -> None:
    """Raises ``InvalidRequest`` that names the first number anywhere in a config which is none of its kind."""
    around = within.removesuffix(".").rpartition(".")[2]
    for name, value in config.items():
        at = within + name
        for i, part in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(part, Mapping):
                check_numbers(part, file, f"{at}.{i}." if isinstance(value, list) else f"{at}.")
        if value is None:
            if _needs_number(name, around):
                raise _wrong(file, at, value, "number")
        elif name in _SEVERAL:
            _check_list(value, _SEVERAL[name], file, at)
        else:
            _check_one(value, _kind_of(name, around), file, at)
        if _REPEATED.search(name) and isinstance(value, int) and value > _MOST_REPEATED:
            raise InvalidRequest(f"{file}: {at} is {value}, more than {_MOST_REPEATED}", param="model_path")


def check_ids(config: Mapping[str, Any], fields: Collection[str], file: Path, size: int | None = None) -> None:
    """Those of the dotted ``fields`` that are called an id and are there must be ids of a vocabulary of ``size``, or
    without it whole numbers of 0 or more."""
    for field in fields:
        value: Any = config
        for part in field.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if _ID.search(field) and not isinstance(value, Mapping) and value is not None:
            check_id(value, field, file, size)


def check_size(value: Any, field: str, file: Path) -> None:
    """For names that mean something else in other files. Raises ``InvalidRequest`` that names file and field."""
    _check_one(value, _SIZE, file, field)


def check_id(value: Any, field: str, file: Path, size: int | None = None) -> None:
    """Raises ``InvalidRequest`` that names file and field for what is no id of a vocabulary of ``size``."""
    _check_one(value, _COUNT, file, field)
    if size is not None and value >= size:
        raise InvalidRequest(f"{file}: {field} is {value}, not an id below {size}", param="model_path")


def _needs_number(name: str, around: str) -> bool:
    if around in _NOT_NULL_WITHIN and (name in _ONE or name in _SEVERAL):
        return name not in _NULL_EVEN_THERE and not _SAMPLING.search(name)
    return name in _NEEDED or f"{around}.{name}" in _NEEDED


def _kind_of(name: str, around: str) -> _Kind | None:
    sampling = _SAMPLING.search(name)
    return _ONE.get(f"{around}.{name}") or _ONE.get(name) or (_ONE[sampling[1]] if sampling else None)


def _check_one(value: Any, kind: _Kind | None, file: Path, at: str) -> None:
    if kind is None:
        return
    if not kind.holds(value):
        raise _wrong(file, at, value, kind.name)
    if not (math.isfinite(value) and value <= kind.most):
        raise InvalidRequest(f"{file}: {at} is {value}, more than {kind.most:g}", param="model_path")


def _check_list(value: Any, kind: _Kind, file: Path, at: str) -> None:
    empty = isinstance(value, list) and not value and at.rpartition(".")[2] not in _MAY_BE_EMPTY
    if not isinstance(value, list) or empty:
        raise InvalidRequest(f"{file}: {at} is {value!r}, no list of numbers", param="model_path")
    for i, each in enumerate(value):
        _check_one(each, kind, file, f"{at}.{i}")


def _wrong(file: Path, at: str, value: Any, kind: str) -> InvalidRequest:
    found = "null" if value is None else repr(value)
    return InvalidRequest(f"{file}: {at} is {found}, no {kind}", param="model_path")
