"""The codec's decoder: residual codes at 25 frames a second to a 16 kHz waveform, for inference only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from sgl_omni.engine.headers import check_shapes, read_headers
from sgl_omni.models.demo_voice.linear import PackedLinear
from sgl_omni.models.demo_voice.spec import CODE_REACH, REACH, CodecSpec, codec_shapes

_LAYER_NORM_EPS = 1e-6
_LARGEST_LOG_MAGNITUDE = 6.0
_SMALLEST_WINDOW_SUM = 1e-2

Weights = dict[str, Tensor]


class _LayerNorm:
    def __init__(self, weights: Weights, prefix: str) -> None:
        self._weight, self._bias = weights[prefix + "weight"], weights[prefix + "bias"]

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self._weight.shape, self._weight, self._bias, _LAYER_NORM_EPS)


class _ConvNeXtBlock:
    """Depthwise convolution, LayerNorm, MLP, residual; [time, dim] -> the same."""

    def __init__(self, weights: Weights, prefix: str, left: int, right: int) -> None:
        self._padding = (left, right)
        self._kernel, self._bias = weights[prefix + "dwconv.weight"], weights[prefix + "dwconv.bias"]
        self._norm = _LayerNorm(weights, prefix + "norm.")
        self._expand = PackedLinear(weights[prefix + "pw1.weight"], weights[prefix + "pw1.bias"])
        gamma = weights[prefix + "gamma"]
        self._contract = PackedLinear(
            weights[prefix + "pw2.weight"] * gamma[:, None], weights[prefix + "pw2.bias"] * gamma
        )

    def __call__(self, x: Tensor) -> Tensor:
        padded = F.pad(x.t(), self._padding)
        y = F.conv1d(padded[None], self._kernel, self._bias, groups=x.shape[1])[0].t()
        return x + self._contract(F.gelu(self._expand(self._norm(y.contiguous()))))


class CodecDecoder:
    """``codes`` [frames, codebooks] -> waveform [frames * samples_per_frame]."""

    def __init__(self, spec: CodecSpec, tensors: Weights, device: torch.device) -> None:
        weights = {name: tensor.to(device, torch.float32) for name, tensor in tensors.items()}
        self.spec = spec
        self.device = device
        self._codebooks = weights["quantizer.codebooks"].flatten(0, 1)
        self._columns = torch.arange(spec.num_codebooks, device=device) * spec.codebook_size
        kernel = weights["decoder.inp.weight"]  # [dim, latent_dim, taps]
        self._taps = kernel.shape[-1]
        self._input = PackedLinear(kernel.flatten(1), weights["decoder.inp.bias"])
        self._code_blocks = [
            _ConvNeXtBlock(weights, f"decoder.code_blocks.{i}.", *CODE_REACH) for i in range(spec.code_blocks)
        ]
        self._up = PackedLinear(weights["decoder.up.weight"], weights["decoder.up.bias"])
        self._blocks = [_ConvNeXtBlock(weights, f"decoder.blocks.{i}.", *REACH) for i in range(spec.blocks)]
        self._norm = _LayerNorm(weights, "decoder.norm.")
        self._head = PackedLinear(weights["decoder.head.weight"], weights["decoder.head.bias"])
        self._window = torch.hann_window(spec.n_fft, device=device)

    @classmethod
    def load(cls, folder: Path, device: str = "cpu") -> CodecDecoder:
        """Raises ``CheckpointError`` that names the tensors that are missing, unknown or of another shape."""
        spec, files = CodecSpec.load(folder), folder / "codec"
        check_shapes(read_headers(files), codec_shapes(spec), str(files), prefix="")
        return cls(spec, load_file(files / "model.safetensors"), torch.device(device))

    @torch.inference_mode()
    def decode(self, codes: np.ndarray) -> np.ndarray:
        """codes [frames, codebooks] -> float32 samples in [-1, 1], ``samples_per_frame`` a frame."""
        if not len(codes):
            return np.zeros(0, dtype=np.float32)
        ids = torch.from_numpy(codes.astype(np.int64)).to(self.device)
        latent = self._codebooks[ids + self._columns].sum(-2)
        return self._waveform(self._spectrum(latent)).clamp_(-1.0, 1.0).cpu().numpy()

    def decode_chunk(self, codes: np.ndarray, start: int, end: int) -> np.ndarray:
        """Samples of the frames [start, end), from these and the frames of context around them."""
        first, last = max(0, start - self.spec.left_context), min(len(codes), end + self.spec.right_context)
        samples = self.decode(codes[first:last])
        per_frame = self.spec.samples_per_frame
        return samples[(start - first) * per_frame : (end - first) * per_frame]

    def _spectrum(self, latent: Tensor) -> Tensor:
        """latent [frames, latent_dim] -> complex bins [frames * upsample, n_fft / 2 + 1]."""
        taps = F.pad(latent.t(), (self._taps - 1, 0)).unfold(1, self._taps, 1)  # a causal convolution's inputs
        x = self._input(taps.transpose(0, 1).flatten(1))
        for block in self._code_blocks:
            x = block(x)
        x = self._up(x).view(-1, self.spec.dim)
        for block in self._blocks:
            x = block(x)
        magnitude, phase = self._head(self._norm(x)).chunk(2, -1)
        return torch.polar(magnitude.clamp(max=_LARGEST_LOG_MAGNITUDE).exp(), phase.contiguous())

    def _waveform(self, spectrum: Tensor) -> Tensor:
        """Windowed overlap-add, normalised by the sum of the squared windows."""
        spec = self.spec
        windows = torch.fft.irfft(spectrum, n=spec.n_fft, dim=-1) * self._window
        samples = self._overlap_add(windows)
        norm = self._overlap_add((self._window**2).expand(len(windows), -1))
        centre = (spec.n_fft - spec.hop_length) // 2
        kept = slice(centre, centre + len(windows) * spec.hop_length)
        return samples[kept] / norm[kept].clamp(min=_SMALLEST_WINDOW_SUM)

    def _overlap_add(self, windows: Tensor) -> Tensor:
        """windows [n, n_fft] at multiples of the hop -> [(n - 1) * hop + n_fft]."""
        n, hop = len(windows), self.spec.hop_length
        hops = self.spec.n_fft // hop
        parts = windows.reshape(n, hops, hop)
        out = windows.new_zeros(n + hops - 1, hop)
        for i in range(hops):
            out[i : i + n] += parts[:, i]
        return out.flatten()
