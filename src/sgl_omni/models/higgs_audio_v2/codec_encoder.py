"""Audio to codes: the encoding half of the Higgs audio tokenizer, in float32.

Acoustic features (transformers' DAC encoder) and semantic ones (transformers' HuBERT, the mean of all its layers)
lie side by side and are quantised by residual codebooks.
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sgl_omni.audio.features import check_features
from sgl_omni.engine.checkpoint import Checkpoint
from sgl_omni.models.higgs_audio_v2.codec_spec import CodecSpec
from sgl_omni.models.higgs_audio_v2.codec_weights import CodecWeights

_OTHERS = ("acoustic_decoder.*", "fc2.*")
_SEMANTIC_PADDING = 160
"""Samples of silence that HuBERT gets on either side."""


class _Unit(nn.Module):
    def __init__(self, channels: int, kernel: int, dilation: int) -> None:
        super().__init__()
        padding = (kernel - 1) // 2 * dilation
        self.conv1 = nn.Conv1d(channels, channels, kernel, padding=padding, dilation=dilation, bias=False)
        self.conv2 = nn.Conv1d(channels, channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv2(F.elu(self.conv1(F.elu(x))))
        return x + y


class _Block(nn.Module):
    def __init__(self, spec: CodecSpec, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.res_units = nn.ModuleList(_Unit(inner, spec.unit_kernel_size, d) for d in spec.dilations)
        kernel = 3 if stride == 1 else 2 * stride
        self.conv = nn.Conv1d(inner, outer, kernel, stride=stride, padding=(kernel - 1) // 2)

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.res_units:
            x = unit(x)
        y: Tensor = self.conv(x)
        return y


class SemanticEncoder(nn.Module):
    """Features [batch, width, frames] to the same shape."""

    def __init__(self, spec: CodecSpec) -> None:
        super().__init__()
        width = int(spec.semantic["hidden_size"])
        self.conv = nn.Conv1d(width, width, spec.kernel_size, padding=spec.kernel_size // 2, bias=False)
        widths = [width, *(int(width * ratio) for ratio in spec.channel_ratios)]
        self.conv_blocks = nn.ModuleList(
            _Block(spec, inner, outer, stride)
            for (inner, outer), stride in zip(pairwise(widths), spec.strides, strict=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        for block in self.conv_blocks:
            x = block(x)
        return x


class CodecEncoder(nn.Module):
    """``encode``: samples to codes."""

    def __init__(self, spec: CodecSpec) -> None:
        from transformers import DacConfig, HubertConfig, HubertModel
        from transformers.models.dac.modeling_dac import DacEncoder

        super().__init__()
        self.spec = spec
        self.acoustic_encoder = DacEncoder(DacConfig(**spec.acoustic_options))
        self.semantic_model = HubertModel(HubertConfig(**spec.semantic_options))
        position = self.semantic_model.encoder.pos_conv_embed.conv
        if nn.utils.parametrize.is_parametrized(position):
            nn.utils.parametrize.remove_parametrizations(position, "weight", leave_parametrized=True)
        self.encoder_semantic = SemanticEncoder(spec)
        self.fc = nn.Linear(spec.hidden_size, spec.hidden_size)
        count = range(spec.num_codebooks)
        self.project_in = nn.ModuleList(nn.Linear(spec.hidden_size, spec.codebook_dim) for _ in count)
        self.project_out = nn.ModuleList(nn.Linear(spec.codebook_dim, spec.hidden_size) for _ in count)
        self.books = nn.ParameterList(torch.empty(spec.codebook_size, spec.codebook_dim) for _ in count)

    @classmethod
    def load(
        cls, folder: Path, spec: CodecSpec, *, prefix: str = "", device: torch.device | str = "cpu"
    ) -> CodecEncoder:
        """Reads the tensors below ``prefix``. Raises ``CheckpointError`` for what is missing or of other shapes."""
        with torch.device("meta"):
            model = cls(spec)
        model.to_empty(device="cpu").requires_grad_(False)
        weights = CodecWeights(Checkpoint(folder), prefix)
        for name in ("acoustic_encoder", "encoder_semantic", "fc"):
            weights.module(name, getattr(model, name))
        weights.module("semantic_model", model.semantic_model, norm_dim=2)
        for k in range(spec.num_codebooks):
            weights.tensor(f"quantizer.quantizers.{k}.codebook.embed", model.books[k])
            weights.module(f"quantizer.quantizers.{k}.project_in", model.project_in[k])
            weights.module(f"quantizer.quantizers.{k}.project_out", model.project_out[k])
        weights.load(_OTHERS)
        return model.eval().to(device)

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    @torch.inference_mode()
    def encode(self, samples: Tensor) -> Tensor:
        """samples float32 [n] at the codec's rate -> codes int64 [frames, codebooks] on the same device."""
        semantic = self.encoder_semantic(self._semantic_features(samples).transpose(1, 2))
        acoustic = self.acoustic_encoder(self._padded(samples, semantic.shape[2])[None, None])
        frames = min(acoustic.shape[2], semantic.shape[2])
        joined = torch.cat([acoustic[:, :, :frames], semantic[:, :, :frames]], 1)
        return self._quantise(self.fc(joined[0].T))

    def _semantic_features(self, samples: Tensor) -> Tensor:
        """[1, frames, width]."""
        heard = resample(samples, self.spec.sample_rate, self.spec.semantic_rate)
        heard = F.pad(heard, (_SEMANTIC_PADDING, _SEMANTIC_PADDING))
        states = self.semantic_model(heard[None], output_hidden_states=True).hidden_states
        mean: Tensor = torch.stack(states).mean(0)
        return mean[:, :: self.spec.semantic_stride]

    def _padded(self, samples: Tensor, frames: int) -> Tensor:
        """With half a frame of silence on either side where the acoustic frames would be too few."""
        count = samples.shape[0]
        for module in self.acoustic_encoder.modules():
            if isinstance(module, nn.Conv1d):
                span = module.dilation[0] * (module.kernel_size[0] - 1) + 1
                count = (count + 2 * int(module.padding[0]) - span) // module.stride[0] + 1
        half = self.spec.hop // 2
        return samples if count == frames else F.pad(samples, (half, half))

    def _quantise(self, rest: Tensor) -> Tensor:
        """Features [frames, width] -> codes: each codebook takes what those before it left."""
        codes = []
        for book, narrow, widen in zip(self.books, self.project_in, self.project_out, strict=True):
            wanted = narrow(rest)
            # the nearest, without the term that all distances of a frame share
            nearest = (2 * wanted @ book.T - book.square().sum(1)).argmax(1)
            rest = rest - widen(book[nearest])
            codes.append(nearest)
        check_features(rest)
        return torch.stack(codes, 1)


def resample(samples: Tensor, rate: int, target: int, *, zeros: int = 6, rolloff: float = 0.99) -> Tensor:
    """float32 [n] -> [ceil(n * target / rate)], by a sinc under a Hann window of ``zeros`` zero crossings a side.

    This filter, and no better one, because the codec was trained behind it.
    """
    if rate == target:
        return samples
    common = math.gcd(rate, target)
    step, phases = rate // common, target // common
    cutoff = min(step, phases) * rolloff
    width = math.ceil(zeros * step / cutoff)
    place = torch.arange(-width, width + step, dtype=torch.float64) / step
    time = (place - torch.arange(phases, dtype=torch.float64)[:, None] / phases) * cutoff
    time = time.clamp(-zeros, zeros)
    kernels = torch.sinc(time) * torch.cos(time * math.pi / zeros / 2).square() * (cutoff / step)
    padded = F.pad(samples, (width, width + step))
    found = F.conv1d(padded[None, None], kernels[:, None].to(samples), stride=step)
    return found[0].T.reshape(-1)[: math.ceil(phases * samples.shape[0] / step)]
