"""Mimi, the codec inside a CSM checkpoint, in float32: samples to frames of codes, and frames to samples by the piece.

Layers are transformers' own. Every part of the decoder is causal, and several streams are decoded together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sgl_omni.audio.causal import CausalStream, Codes, Layout, Pieces, filled_up
from sgl_omni.audio.features import check_features
from sgl_omni.engine.checkpoint import Checkpoint, Slot
from sgl_omni.engine.rope import Rope, rotate
from sgl_omni.engine.rope_config import RopeConfig

_CONVOLUTION = (nn.Conv1d, nn.ConvTranspose1d)
_PREFIX = "codec_model."
_HALVES = {
    "encoder": ("encoder", "encoder_transformer", "downsample"),
    "decoder": ("decoder", "decoder_transformer", "upsample"),
}


class CodecEncoder:
    """Samples to codes, a whole recording at a time."""

    def __init__(self, parts: Mapping[str, Any], sample_rate: int) -> None:
        self.sample_rate = sample_rate
        self._parts = parts
        self._device = next(parts["downsample"].parameters()).device

    @classmethod
    def load(cls, folder: Path, device: torch.device | str = "cpu") -> CodecEncoder:
        """Raises ``CheckpointError`` for what is missing or of other shapes."""
        config = Checkpoint(folder).config()["codec_config"]
        return cls(_load(folder, config, "encoder", device), config.get("sampling_rate", 24000))

    @torch.inference_mode()
    def encode(self, samples: Tensor) -> Tensor:
        """float32 [samples] at ``sample_rate`` -> codes int64 [frames, codebooks]; the last frame may be cut."""
        parts = self._parts
        x = parts["encoder"](samples[None, None].to(self._device))
        x = parts["encoder_transformer"](x.transpose(1, 2), use_cache=False).last_hidden_state
        x = parts["downsample"](x.transpose(1, 2))
        check_features(x)
        codes: Tensor = parts["quantizer"].encode(x)[:, 0].T
        return codes.cpu()


class CodecDecoder:
    """Codes to samples, as the next pieces of streams."""

    def __init__(self, parts: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        self.num_codebooks = int(config["num_quantizers"])
        self.sample_rate = int(config.get("sampling_rate", 24000))
        self._parts = parts
        self._upsample = parts["upsample"].conv
        self._layers = parts["decoder_transformer"].layers
        attention = self._layers[0].self_attn
        self._head_dim, self._window = int(attention.head_dim), int(config.get("sliding_window", 250))
        self._rope = Rope(RopeConfig.parse(config), self._head_dim, self.device)
        kept = 2, self._window - 1, attention.k_proj.out_features // self._head_dim, self._head_dim
        convolutions = [
            self._upsample,
            *(part for part in parts["decoder"].modules() if isinstance(part, _CONVOLUTION)),
        ]
        self._layout = Layout(
            {part: (part.in_channels, left) for part in convolutions if (left := _left(part))}
            | {layer.self_attn: kept for layer in self._layers}
        )

    @classmethod
    def load(cls, folder: Path, device: torch.device | str = "cpu") -> CodecDecoder:
        """Raises ``CheckpointError`` for what is missing or of other shapes."""
        config = Checkpoint(folder).config()["codec_config"]
        return cls(_load(folder, config, "decoder", device), config)

    @property
    def device(self) -> torch.device:
        weight: Tensor = self._upsample.weight
        return weight.device

    def open(self) -> CausalStream:
        return self._layout.open(self.device)

    @torch.inference_mode()
    def decode(self, codes: Sequence[Codes], streams: Sequence[CausalStream]) -> list[Tensor]:
        """The next codes [frames, codebooks] of as many streams -> float32 [samples] of each, about -1 to 1, on the
        host."""
        frames = [len(each) for each in codes]
        pieces = Pieces(self._layout, streams, frames)
        x = self._parts["quantizer"].decode(filled_up(codes).to(self.device).transpose(1, 2))
        x = self._transformed(self._grown(self._upsample, x, pieces).transpose(1, 2), pieces).transpose(1, 2)
        for layer in self._parts["decoder"].layers:
            x = self._layer(layer, x, pieces)
        samples = x[:, 0].cpu()
        pieces.finish()
        hop = samples.shape[1] // max(frames)
        return [row[: count * hop] for row, count in zip(samples, frames, strict=True)]

    def _transformed(self, x: Tensor, pieces: Pieces) -> Tensor:
        """[batch, steps, width] -> the same."""
        batch, steps, _ = x.shape
        cosine, sine = self._rope(pieces.positions(steps).view(1, -1), x.dtype)
        rotation = cosine.view(batch, steps, 1, -1), sine.view(batch, steps, 1, -1)
        near = pieces.near(self._window, steps)
        for layer in self._layers:
            mixed = self._attended(layer.self_attn, layer.input_layernorm(x), rotation, near, pieces)
            x = x + layer.self_attn_layer_scale(mixed)
            x = x + layer.mlp_layer_scale(layer.mlp(layer.post_attention_layernorm(x)))
        return x

    def _attended(
        self, attention: Any, x: Tensor, rotation: tuple[Tensor, Tensor], near: Tensor, pieces: Pieces
    ) -> Tensor:
        heads = (*x.shape[:2], -1, self._head_dim)
        q, k, v = (part(x).view(heads) for part in (attention.q_proj, attention.k_proj, attention.v_proj))
        mixed = pieces.attention(attention, rotate(q, rotation), rotate(k, rotation), v, near)
        found: Tensor = attention.o_proj(mixed)
        return found

    def _layer(self, layer: Any, x: Tensor, pieces: Pieces) -> Tensor:
        """One of the convolutional layers: they are told apart by what they hold."""
        if hasattr(layer, "block"):
            y = x
            for part in layer.block:
                y = self._layer(part, y, pieces)
            return x + y
        conv = getattr(layer, "conv", None)
        if isinstance(conv, nn.ConvTranspose1d):
            return self._grown(conv, x, pieces)
        if isinstance(conv, nn.Conv1d):
            x = pieces.behind(conv, x) if _left(conv) else x
            return F.conv1d(x, conv.weight, conv.bias, dilation=conv.dilation, groups=conv.groups)
        found: Tensor = layer(x)
        return found

    def _grown(self, conv: nn.ConvTranspose1d, x: Tensor, pieces: Pieces) -> Tensor:
        """[batch, channels, time] -> [batch, channels, time * stride]; a kernel of two strides reaches into what
        follows."""
        stride, length, left = conv.stride[0], x.shape[-1] * conv.stride[0], _left(conv)
        found: Tensor = conv(pieces.behind(conv, x) if left else x)
        return found[..., left * stride : left * stride + length]


def _left(conv: nn.Conv1d | nn.ConvTranspose1d) -> int:
    """Steps of its input that a causal convolution sees before the one at hand."""
    if isinstance(conv, nn.ConvTranspose1d):
        return -(-conv.kernel_size[0] // conv.stride[0]) - 1
    return (conv.kernel_size[0] - 1) * conv.dilation[0]


def _load(folder: Path, config: Mapping[str, Any], half: str, device: torch.device | str) -> dict[str, Any]:
    """One half of the codec and its codebooks, by the names that the parts have on disk."""
    from transformers import MimiConfig, MimiModel

    model: Any = MimiModel(MimiConfig(**config))
    coder = getattr(model, half)
    names = _HALVES[half]
    # newer versions hold the parts of a half below one module, and checkpoints beside each other
    nested = hasattr(coder, f"{half}_seanet")
    parts = {
        name: getattr(coder, f"{half}_seanet" if name == half else name) if nested else getattr(model, name)
        for name in names
    }
    parts["quantizer"] = model.quantizer
    slots = []
    for name, part in parts.items():
        part.eval().requires_grad_(False)
        slots += [
            Slot(f"{_PREFIX}{name}.{key}", tensor, tuple(tensor.shape)) for key, tensor in part.state_dict().items()
        ]
    others = [f"{_PREFIX}{name}.*" for name in {*_HALVES["encoder"], *_HALVES["decoder"]} - {*names}]
    Checkpoint(folder).load(slots, prefix=_PREFIX, ignore=others)  # before any of the device's memory is taken
    return {name: part.to(device) for name, part in parts.items()}
