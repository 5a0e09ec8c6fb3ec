"""The parts of the codec's decoder. All of them look back only, and ``kept`` is the shape of what a stream needs of it.

Modules are named as their tensors on disk; plain lists and tuples of them are what a part calls its own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sgl_omni.audio.causal import Batch
from sgl_omni.engine.rope import rotate


class CausalConv(nn.Module):
    """[batch, channels, time] -> the same length; what lies before the beginning is zero."""

    def __init__(self, inputs: int, outputs: int, kernel: int, *, dilation: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inputs, outputs, kernel, dilation=dilation, groups=groups)
        self.left = (kernel - 1) * dilation
        self.kept = inputs, self.left

    def forward(self, x: Tensor, pieces: Batch) -> Tensor:
        found: Tensor = self.conv(pieces.behind(self, x) if self.left else x)
        return found


class CausalUpsample(nn.Module):
    """[batch, channels, time] -> [batch, outputs, time * stride]; kernels may reach into what follows."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(inputs, outputs, kernel, stride)
        self.stride = stride
        self.left = -(-kernel // stride) - 1
        self.kept = inputs, self.left

    def forward(self, x: Tensor, pieces: Batch) -> Tensor:
        start, length = self.left * self.stride, x.shape[-1] * self.stride
        found: Tensor = self.conv(pieces.behind(self, x) if self.left else x)[..., start : start + length]
        return found


class SnakeBeta(nn.Module):
    """x + sin(a x)^2 / b, a and b in logarithms, one each a channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(channels))
        self.beta = nn.Parameter(torch.empty(channels))
        self._factors: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self._factors is None:  # once: on a GPU each of these is a launch
            self._factors = self.alpha.exp()[:, None], self.beta.exp()[:, None] + 1e-9
        alpha, beta = self._factors
        return (x * alpha).sin_().square_().div_(beta).add_(x)  # in place: these are the largest tensors of the codec


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dwconv = CausalConv(width, width, 7, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.pwconv1 = nn.Linear(width, 4 * width)
        self.pwconv2 = nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor, pieces: Batch) -> Tensor:
        y = self.norm(self.dwconv(x, pieces).transpose(1, 2))
        y = self.gamma * self.pwconv2(F.gelu(self.pwconv1(y)))
        found: Tensor = x + y.transpose(1, 2)
        return found


class ResidualUnit(nn.Module):
    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.act1 = SnakeBeta(channels)
        self.conv1 = CausalConv(channels, channels, 7, dilation=dilation)
        self.act2 = SnakeBeta(channels)
        self.conv2 = CausalConv(channels, channels, 1)

    def forward(self, x: Tensor, pieces: Batch) -> Tensor:
        y = self.conv1(self.act1(x), pieces)
        found: Tensor = self.conv2(self.act2(y), pieces)
        return x + found


class UpsampleBlock(nn.Module):
    """``rate`` times as many steps of half as many channels."""

    def __init__(self, inputs: int, outputs: int, rate: int) -> None:
        super().__init__()
        snake = SnakeBeta(inputs)
        grow, units = CausalUpsample(inputs, outputs, 2 * rate, rate), [ResidualUnit(outputs, d) for d in (1, 3, 9)]
        self.block = nn.ModuleList([snake, grow, *units])
        self.parts = snake, grow, units

    def forward(self, x: Tensor, pieces: Batch) -> Tensor:
        snake, grow, units = self.parts
        x = grow(snake(x), pieces)
        for unit in units:
            x = unit(x, pieces)
        return x


class WindowAttention(nn.Module):
    """x [batch, n, hidden]; each place sees itself and the ``window`` - 1 places before it."""

    def __init__(self, hidden_size: int, heads: int, kv_heads: int, head_dim: int, window: int, bias: bool) -> None:
        super().__init__()
        self._head_dim = head_dim
        self.kept = 2, window - 1, kv_heads, head_dim
        self.q_proj = nn.Linear(hidden_size, heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden_size, kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden_size, kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, hidden_size, bias=bias)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], near: Tensor, pieces: Batch) -> Tensor:
        heads = (*x.shape[:2], -1, self._head_dim)
        q, k = rotate(self.q_proj(x).view(heads), rotation), rotate(self.k_proj(x).view(heads), rotation)
        found: Tensor = self.o_proj(pieces.attention(self, q, k, self.v_proj(x).view(heads), near))
        return found


class Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class GatedMLP(nn.Module):
    def __init__(self, hidden_size: int, inner_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, inner_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, inner_size, bias=False)
        self.down_proj = nn.Linear(inner_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return found


class Quantizer(nn.Module):
    """Codes of several books -> the sum of their entries, projected."""

    def __init__(self, books: int, size: int, width: int, output_size: int) -> None:
        super().__init__()
        found = [_Book(size, width) for _ in range(books)]
        self.vq = nn.ModuleDict({"layers": nn.ModuleList(found)})
        self.output_proj = nn.Conv1d(width, output_size, 1, bias=False)
        self._books = found
        self._table: Tensor | None = None

    def forward(self, codes: Tensor) -> Tensor:
        """codes int64 [batch, time, books] -> [batch, output_size, time]."""
        if self._table is None:  # once: the entries lie on disk as sums and counts
            self._table = self.entries()
        books = torch.arange(codes.shape[-1], device=codes.device)
        found: Tensor = self.output_proj(self._table[books, codes].sum(-2).transpose(1, 2))
        return found

    def entries(self) -> Tensor:
        """[books, size, width]"""
        return torch.stack([book._codebook.entries() for book in self._books])


class _Book(nn.Module):
    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self._codebook = _Codebook(size, width)


class _Codebook(nn.Module):
    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.cluster_usage = nn.Parameter(torch.empty(size))
        self.embedding_sum = nn.Parameter(torch.empty(size, width))

    def entries(self) -> Tensor:
        return self.embedding_sum / self.cluster_usage.clamp(min=1e-5)[:, None]
