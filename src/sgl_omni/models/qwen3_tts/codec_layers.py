"""The parts of the codec's decoder. All of them look back only, so that a stream needs to remember little.

What a part remembers of a stream lies in its ``Memory``, by the part itself; it is cloned, for a view would keep the
whole piece. Modules are named as their tensors on disk; plain lists and tuples of them are what a part calls its own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sgl_omni.engine.rope import rotate

Memory = dict[nn.Module, Tensor]


class CausalConv(nn.Module):
    """[1, channels, time] -> the same length; what lies before the beginning is zero."""

    def __init__(self, inputs: int, outputs: int, kernel: int, *, dilation: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inputs, outputs, kernel, dilation=dilation, groups=groups)
        self.left = (kernel - 1) * dilation

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        if self.left:
            before = memory.get(self)
            x = F.pad(x, (self.left, 0)) if before is None else torch.cat([before, x], -1)
            memory[self] = x[..., -self.left :].clone()
        found: Tensor = self.conv(x)
        return found


class CausalUpsample(nn.Module):
    """[1, channels, time] -> [1, outputs, time * stride]; a kernel of several strides reaches into what follows."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(inputs, outputs, kernel, stride)
        self.stride = stride
        self.left = -(-kernel // stride) - 1

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        length = x.shape[-1] * self.stride
        if self.left:
            before = memory.get(self)
            x = F.pad(x, (self.left, 0)) if before is None else torch.cat([before, x], -1)
            memory[self] = x[..., -self.left :].clone()
        start = self.left * self.stride
        found: Tensor = self.conv(x)[..., start : start + length]
        return found


class SnakeBeta(nn.Module):
    """x + sin(a x)^2 / b, a and b in logarithms, one each a channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(channels))
        self.beta = nn.Parameter(torch.empty(channels))

    def forward(self, x: Tensor) -> Tensor:
        alpha, beta = self.alpha.exp()[:, None], self.beta.exp()[:, None]
        return x + (x * alpha).sin().square() / (beta + 1e-9)


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dwconv = CausalConv(width, width, 7, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.pwconv1 = nn.Linear(width, 4 * width)
        self.pwconv2 = nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        y = self.norm(self.dwconv(x, memory).transpose(1, 2))
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

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        y = self.conv1(self.act1(x), memory)
        found: Tensor = self.conv2(self.act2(y), memory)
        return x + found


class UpsampleBlock(nn.Module):
    """``rate`` times as many steps of half as many channels."""

    def __init__(self, inputs: int, outputs: int, rate: int) -> None:
        super().__init__()
        snake = SnakeBeta(inputs)
        grow, units = CausalUpsample(inputs, outputs, 2 * rate, rate), [ResidualUnit(outputs, d) for d in (1, 3, 9)]
        self.block = nn.ModuleList([snake, grow, *units])
        self.parts = snake, grow, units

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        snake, grow, units = self.parts
        x = grow(snake(x), memory)
        for unit in units:
            x = unit(x, memory)
        return x


class WindowAttention(nn.Module):
    """x [n, hidden]; each row sees itself and the ``window`` - 1 rows before it."""

    def __init__(self, hidden_size: int, heads: int, kv_heads: int, head_dim: int, window: int, bias: bool) -> None:
        super().__init__()
        self._heads, self._kv_heads, self._window = heads, kv_heads, window
        self.q_proj = nn.Linear(hidden_size, heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden_size, kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden_size, kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, hidden_size, bias=bias)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], memory: Memory) -> Tensor:
        n = x.shape[0]
        q = rotate(self.q_proj(x).view(n, self._heads, -1), rotation)
        k = rotate(self.k_proj(x).view(n, self._kv_heads, -1), rotation)
        kv = torch.stack([k, self.v_proj(x).view(n, self._kv_heads, -1)])
        before = memory.get(self)
        kv = kv if before is None else torch.cat([before, kv], 1)
        memory[self] = kv[:, max(0, kv.shape[1] - self._window + 1) :].clone()
        rows = torch.arange(n, device=x.device)[:, None] + kv.shape[1] - n
        distance = rows - torch.arange(kv.shape[1], device=x.device)
        keys, values = kv.transpose(1, 2)
        attended = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=(distance >= 0) & (distance < self._window),
            enable_gqa=self._heads != self._kv_heads,
        )
        found: Tensor = self.o_proj(attended[0].transpose(0, 1).flatten(1))
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
        """codes int64 [books, time] -> [1, output_size, time]."""
        if self._table is None:  # once: the entries lie on disk as sums and counts
            self._table = torch.stack([book._codebook.entries() for book in self._books])
        books = torch.arange(codes.shape[0], device=codes.device)[:, None]
        found: Tensor = self.output_proj(self._table[books, codes].sum(0).T[None])
        return found


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
