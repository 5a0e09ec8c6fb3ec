"""The Higgs audio tokenizer as its config says it: rates, codebooks and how far its decoder looks. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sgl_omni.errors import InvalidRequest

_RATIOS = (8, 5, 4, 2, 3)

PUBLISHED: Mapping[str, Any] = {
    "sample_rate": 24_000,
    "semantic_sample_rate": 16_000,
    "downsample_factor": 320,
    "target_bandwidths": (0.5, 1, 1.5, 2),
    "codebook_size": 1024,
    "codebook_dim": 64,
    "kernel_size": 3,
    "unit_kernel_size": 3,
    "channel_ratios": (1, 1),
    "strides": (1, 1),
    "block_dilations": (1, 1),
    "acoustic_model_config": {
        "encoder_hidden_size": 64,
        "decoder_hidden_size": 1024,
        "hidden_size": 256,
        "downsampling_ratios": list(_RATIOS),
        "upsampling_ratios": list(_RATIOS),
    },
    "semantic_model_config": {"hidden_size": 768},
}
"""What `bosonai/higgs-audio-v2-tokenizer` says where it differs from the defaults of its parts; a Higgs TTS 3
checkpoint holds this tokenizer's weights and not its config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpec:
    """``acoustic`` and ``semantic`` are configs of transformers' DAC and HuBERT; the rest is the tokenizer's own."""

    sample_rate: int
    semantic_rate: int
    codebook_size: int
    codebook_dim: int
    num_codebooks: int
    hop: int
    """Samples a frame."""
    semantic_stride: int
    """Of HuBERT's frames, every so many-th is taken."""
    kernel_size: int
    unit_kernel_size: int
    channel_ratios: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    upsampling: tuple[int, ...]
    acoustic: Mapping[str, Any]
    semantic: Mapping[str, Any]

    @classmethod
    def parse(cls, config: Mapping[str, Any], source: str) -> CodecSpec:
        """``source``: where the config comes from. Raises ``InvalidRequest`` that names it and the field at fault."""
        found = {**PUBLISHED, **{key: value for key, value in config.items() if value is not None}}
        parts = {}
        for name in ("acoustic_model_config", "semantic_model_config"):
            part = found[name]
            if not isinstance(part, Mapping):
                raise InvalidRequest(f"{source}: {name} is not an object", param="model_path")
            parts[name] = part if name in config else PUBLISHED[name]
        acoustic, semantic = parts["acoustic_model_config"], parts["semantic_model_config"]
        for key in ("hidden_size", "decoder_hidden_size", "encoder_hidden_size"):
            _require(acoustic, key, f"{source}: acoustic_model_config")
        _require(semantic, "hidden_size", f"{source}: semantic_model_config")
        down = _numbers(acoustic, "downsampling_ratios", source)
        up = _numbers(acoustic, "upsampling_ratios", source)
        hop = math.prod(down)
        if math.prod(up) != hop:
            raise InvalidRequest(f"{source}: upsampling_ratios do not undo downsampling_ratios", param="model_path")
        _check_lengths(found, semantic, source)
        rate, size = int(found["sample_rate"]), int(found["codebook_size"])
        if size < 2:
            raise InvalidRequest(f"{source}: codebook_size is {size}, no choice between codes", param="model_path")
        bits = math.ceil(math.log2(size)) * math.ceil(rate / hop)
        stride = int(hop / (rate / found["semantic_sample_rate"]) / found["downsample_factor"])
        return cls(
            sample_rate=rate,
            semantic_rate=int(found["semantic_sample_rate"]),
            codebook_size=size,
            codebook_dim=int(found["codebook_dim"]),
            num_codebooks=int(1000 * found["target_bandwidths"][-1] // bits),
            hop=hop,
            semantic_stride=max(1, stride),
            kernel_size=int(found["kernel_size"]),
            unit_kernel_size=int(found["unit_kernel_size"]),
            channel_ratios=tuple(found["channel_ratios"]),
            strides=tuple(found["strides"]),
            dilations=tuple(found["block_dilations"]),
            upsampling=tuple(up),
            acoustic=acoustic,
            semantic=semantic,
        )

    @property
    def frames_per_second(self) -> float:
        return self.sample_rate / self.hop

    @property
    def acoustic_options(self) -> dict[str, Any]:
        """For transformers' ``DacConfig``."""
        return {key: value for key, value in self.acoustic.items() if key != "model_type"}

    @property
    def semantic_options(self) -> dict[str, Any]:
        """For transformers' ``HubertConfig``, with nothing that masks features in training."""
        kept = {key: value for key, value in self.semantic.items() if key != "model_type"}
        return kept | {"apply_spec_augment": False, "mask_time_prob": 0.0, "mask_feature_prob": 0.0}

    @property
    def hidden_size(self) -> int:
        """Of what the codebooks quantise."""
        return int(self.acoustic["hidden_size"]) + int(self.semantic["hidden_size"])

    def decoding_bytes(self, frames: int) -> int:
        """GPU memory that decoding a window of so many frames takes, activations in float16 and sums in float32.

        Two layers' sums and three's activations are there at once, of the stage where they are largest.
        """
        width, longest, largest = int(self.acoustic["decoder_hidden_size"]), frames, 0
        for i, stride in enumerate(self.upsampling):
            longest *= stride
            largest = max(largest, longest * (width >> (i + 1)))
        return largest * (2 * 4 + 3 * 2)

    @property
    def context(self) -> tuple[int, int]:
        """Frames before and after a frame that its samples depend on."""
        first, last = _widened(0, self.hop - 1, 3)
        for stride in reversed(self.upsampling):
            for dilation in (9, 3, 1):
                first, last = _widened(first, last, 3 * dilation)
            padding = math.ceil(stride / 2)
            # sample o of the transposed convolution takes inputs i with 0 <= o + padding - i * stride < 2 * stride
            first = math.ceil((first + padding - 2 * stride + 1) / stride)
            last = math.floor((last + padding) / stride)
        first, last = _widened(first, last, 3)
        return -first, last


def _widened(first: int, last: int, by: int) -> tuple[int, int]:
    return first - by, last + by


def _numbers(config: Mapping[str, Any], key: str, source: str) -> list[int]:
    value = config.get(key)
    if not isinstance(value, Sequence) or not value or not all(isinstance(each, int) and each > 0 for each in value):
        raise InvalidRequest(f"{source}: acoustic_model_config.{key} must be a list of factors", param="model_path")
    return list(value)


def _check_lengths(config: Mapping[str, Any], semantic: Mapping[str, Any], source: str) -> None:
    """Lists that are gone through together have as many entries each."""
    pairs = [("strides", config["strides"], "channel_ratios", config["channel_ratios"])]
    if "conv_dim" in semantic and "conv_kernel" in semantic:
        at = "semantic_model_config."
        pairs.append((f"{at}conv_kernel", semantic["conv_kernel"], f"{at}conv_dim", semantic["conv_dim"]))
    for name, values, other, others in pairs:
        if len(values) != len(others):
            raise InvalidRequest(
                f"{source}: {name} has {len(values)} entries, and {other} {len(others)}", param="model_path"
            )


def _require(config: Mapping[str, Any], key: str, source: str) -> None:
    if not isinstance(config.get(key), int):
        raise InvalidRequest(f"{source} lacks the field {key}", param="model_path")
