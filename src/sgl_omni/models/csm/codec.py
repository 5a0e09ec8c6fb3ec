"""Mimi, the codec inside a CSM checkpoint, in float32: samples to frames of codes, and frames to samples by the piece.

Layers are transformers' own. Every part of the decoder is causal, and a stream remembers what the next piece will see
of the last, so that the pieces are the whole but for rounding, and no frame is decoded twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sgl_omni.engine.checkpoint import Checkpoint, Slot
from sgl_omni.engine.rope import Rope, rotate
from sgl_omni.engine.rope_config import RopeConfig

_PREFIX = "codec_model."
_HALVES = {
    "encoder": ("encoder", "encoder_transformer", "downsample"),
    "decoder": ("decoder", "decoder_transformer", "upsample"),
}


@dataclass(slots=True)
class CodecStream:
    """What the parts remember of one stream, by the part, and how many steps of the transformer have gone by."""

    memory: dict[nn.Module, Tensor] = field(default_factory=dict)
    steps: int = 0


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
        codes: Tensor = parts["quantizer"].encode(x)[:, 0].T
        return codes.cpu()


class CodecDecoder:
    """Codes to samples, as the next piece of a stream."""

    def __init__(self, parts: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        self.num_codebooks = int(config["num_quantizers"])
        self.sample_rate = int(config.get("sampling_rate", 24000))
        self._parts = parts
        self._upsample = parts["upsample"].conv
        layer = parts["decoder_transformer"].layers[0].self_attn
        self._head_dim, self._window = int(layer.head_dim), int(config.get("sliding_window", 250))
        self._rope = Rope(RopeConfig.parse(config), self._head_dim, self.device)

    @classmethod
    def load(cls, folder: Path, device: torch.device | str = "cpu") -> CodecDecoder:
        """Raises ``CheckpointError`` for what is missing or of other shapes."""
        config = Checkpoint(folder).config()["codec_config"]
        return cls(_load(folder, config, "decoder", device), config)

    @property
    def device(self) -> torch.device:
        weight: Tensor = self._upsample.weight
        return weight.device

    @torch.inference_mode()
    def decode(self, codes: Tensor, stream: CodecStream) -> Tensor:
        """The stream's next codes int64 [frames, codebooks] -> float32 [samples], about -1 to 1."""
        x = self._parts["quantizer"].decode(codes.T[None].to(self.device))
        x = self._grown(self._upsample, x, stream)
        positions = torch.arange(stream.steps, stream.steps + x.shape[-1], device=x.device)
        stream.steps += x.shape[-1]
        rotation = self._rope(positions[None], x.dtype)
        x = x[0].T
        for layer in self._parts["decoder_transformer"].layers:
            x = x + layer.self_attn_layer_scale(
                self._attended(layer.self_attn, layer.input_layernorm(x), rotation, stream)
            )
            x = x + layer.mlp_layer_scale(layer.mlp(layer.post_attention_layernorm(x)))
        x = x.T[None]
        for layer in self._parts["decoder"].layers:
            x = self._layer(layer, x, stream)
        samples: Tensor = x[0, 0].cpu()
        return samples

    def _layer(self, layer: Any, x: Tensor, stream: CodecStream) -> Tensor:
        """One of the convolutional layers: they are told apart by what they hold."""
        if hasattr(layer, "block"):
            y = x
            for part in layer.block:
                y = self._layer(part, y, stream)
            return x + y
        conv = getattr(layer, "conv", None)
        if isinstance(conv, nn.ConvTranspose1d):
            return self._grown(conv, x, stream)
        if isinstance(conv, nn.Conv1d):
            x = _joined(conv, x, (conv.kernel_size[0] - 1) * conv.dilation[0], stream)
            return F.conv1d(x, conv.weight, conv.bias, dilation=conv.dilation, groups=conv.groups)
        found: Tensor = layer(x)
        return found

    def _grown(self, conv: nn.ConvTranspose1d, x: Tensor, stream: CodecStream) -> Tensor:
        """[1, channels, time] -> [1, channels, time * stride]; a kernel of two strides reaches into what follows."""
        stride, length = conv.stride[0], x.shape[-1] * conv.stride[0]
        left = -(-conv.kernel_size[0] // stride) - 1
        found: Tensor = conv(_joined(conv, x, left, stream))
        return found[..., left * stride : left * stride + length]

    def _attended(self, attention: Any, x: Tensor, rotation: tuple[Tensor, Tensor], stream: CodecStream) -> Tensor:
        """x [n, width]: each row sees itself and the rows of the window before it."""
        n = x.shape[0]
        q, k, v = (
            part(x).view(n, -1, self._head_dim) for part in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        kv = torch.stack([rotate(k, rotation), v])
        before = stream.memory.get(attention)
        kv = kv if before is None else torch.cat([before, kv], 1)
        stream.memory[attention] = kv[:, max(0, kv.shape[1] - self._window + 1) :].clone()
        places = torch.arange(kv.shape[1], device=x.device)
        distance = places[-n:, None] - places
        keys, values = kv.transpose(1, 2)
        out = F.scaled_dot_product_attention(
            rotate(q, rotation).transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=(distance >= 0) & (distance < self._window),
            enable_gqa=q.shape[1] != k.shape[1],
        )
        found: Tensor = attention.o_proj(out[0].transpose(0, 1).flatten(1))
        return found


def _joined(part: nn.Module, x: Tensor, left: int, stream: CodecStream) -> Tensor:
    """x [1, channels, time] behind the last ``left`` of what this part saw before; zeros at the beginning."""
    if not left:
        return x
    before = stream.memory.get(part)
    x = F.pad(x, (left, 0)) if before is None else torch.cat([before, x], -1)
    stream.memory[part] = x[..., -left:].clone()
    return x


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
