"""What causal codecs need beside convolutions, channels last: the past of a stream, a norm behind a depthwise one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from sgl_omni.engine.kernels.convolution import halved
from sgl_omni.engine.kernels.elementwise import need_contiguous

_CHANNELS = 32
"""A program's, whose whole past is in registers before any of it is written."""


@triton.jit(do_not_specialize=["scale", "steps", "left"])
def _carry(x, memory, lengths, scale, steps, channels, numbers, left, LEFT: tl.constexpr, CHANNELS: tl.constexpr):
    batch = tl.program_id(1).to(tl.int64)
    known = tl.load(lengths + batch) * scale
    step = tl.arange(0, LEFT)[:, None]
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    inside = (step < left) & (channel < channels)
    kept = memory + batch * numbers + channel
    row = x + batch * steps * channels + channel
    before = tl.load(kept + step * channels, mask=inside, other=0.0)
    at = known + step  # row ``at`` of x is the past up to ``left``, and of this piece from there on
    older = tl.load(kept + at * channels, mask=inside & (at < left), other=0.0)
    newer = tl.load(row + at * channels, mask=inside & (at >= left), other=0.0)
    tl.debug_barrier()
    tl.store(row + step * channels, before.to(x.dtype.element_ty), mask=inside)
    tl.store(kept + step * channels, tl.where(at < left, older, newer.to(tl.float32)), mask=inside)


def carry(x: Tensor, memory: Tensor, left: int, lengths: Tensor, scale: int) -> None:
    """Writes the past to the first ``left`` steps of x [batch, left + time, channels], and to ``memory`` what is past
    once this piece is.

    ``memory``: float32 [batch, left * channels], a row of it contiguous. Of row i of x ``lengths[i] * scale`` steps are
    there.
    """
    need_contiguous(x=x)
    batch, steps, channels = x.shape
    if memory.stride(1) != 1 or memory.shape != (batch, left * channels):
        raise ValueError(f"the past of {[*x.shape]} is not {[*memory.shape]}, or not contiguous")
    _carry[(triton.cdiv(channels, _CHANNELS), batch)](
        x,
        memory,
        lengths,
        scale,
        steps,
        channels,
        memory.stride(0),
        left,
        triton.next_power_of_2(left),
        _CHANNELS,
    )


@triton.jit(do_not_specialize=["scale", "steps", "behind", "taps"])
def _depthwise_norm(
    x,
    weight,
    bias,
    gain,
    offset,
    out,
    lengths,
    scale,
    steps,
    channels,
    behind,
    taps,
    eps,
    CHANNELS: tl.constexpr,
):
    batch = tl.program_id(1).to(tl.int64)
    time = tl.program_id(0)
    if time >= tl.load(lengths + batch) * scale:
        return
    channel = tl.arange(0, CHANNELS)
    inside = channel < channels
    first = behind + time + 1 - taps
    acc = tl.load(bias + channel, mask=inside, other=0.0)
    for tap in range(taps):
        at = first + tap
        there = channel < tl.where(at >= 0, channels, 0)
        part = tl.load(x + (batch * steps + at) * channels + channel, mask=there, other=0.0)
        acc += part.to(tl.float32) * tl.load(weight + tap * channels + channel, mask=inside, other=0.0)
    off = tl.where(inside, acc - tl.sum(acc, 0) / channels, 0.0)
    normed = off / tl.sqrt(tl.sum(off * off, 0) / channels + eps)
    normed *= tl.load(gain + channel, mask=inside, other=0.0)
    normed += tl.load(offset + channel, mask=inside, other=0.0)
    places = out + (batch * (steps - behind) + time) * channels + channel
    tl.store(places, normed.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DepthwiseNorm:
    """A causal convolution of each channel by itself, then a norm over the channels: [batch, behind + time, channels]
    -> [batch, time, channels], of the same type.

    ``weight`` float32 [taps, channels]; all others float32 [channels]. ``behind`` and lengths as in ``Convolution``.
    """

    weight: Tensor
    bias: Tensor
    gain: Tensor
    offset: Tensor
    eps: float
    behind: int

    @classmethod
    def of(cls, conv: nn.Conv1d, norm: nn.LayerNorm, *, past: bool) -> DepthwiseNorm:
        """Raises ``ValueError`` for a convolution that is not depthwise, or pads."""
        channels = conv.out_channels
        if conv.groups != channels or conv.in_channels != channels or conv.stride[0] * conv.dilation[0] != 1:
            raise ValueError(f"{conv} does more than a channel by itself")
        if conv.padding[0] != 0:
            raise ValueError(f"{conv} pads")
        weight = conv.weight.detach().float()[:, 0].T.contiguous()
        return cls(
            weight=weight,
            bias=weight.new_zeros(channels) if conv.bias is None else conv.bias.detach().float().contiguous(),
            gain=norm.weight.detach().float().contiguous(),
            offset=norm.bias.detach().float().contiguous(),
            eps=norm.eps,
            behind=len(weight) - 1 if past else 0,
        )

    @property
    def inputs(self) -> int:
        return self.weight.shape[1]

    def __call__(self, x: Tensor, lengths: Tensor, scale: int) -> Tensor:
        need_contiguous(x=x)
        batch, steps, channels = x.shape
        out = torch.empty(batch, steps - self.behind, channels, dtype=x.dtype, device=x.device)
        _depthwise_norm[(steps - self.behind, batch)](
            x,
            self.weight,
            self.bias,
            self.gain,
            self.offset,
            out,
            lengths,
            scale,
            steps,
            channels,
            self.behind,
            len(self.weight),
            self.eps,
            triton.next_power_of_2(channels),
        )
        return out


def with_room(x: Tensor, behind: int, dtype: torch.dtype) -> Tensor:
    """x [batch, time, channels] as ``dtype``, behind as many steps for its past: zeros, until ``carry`` fills them."""
    return nn.functional.pad(halved(x, dtype), (0, 0, behind, 0)).contiguous()  # whichever way round x lies
