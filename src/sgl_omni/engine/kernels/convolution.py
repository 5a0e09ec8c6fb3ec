"""Convolutions over time, channels last, with what codecs do to their sums: bias, residual, snake activation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from sgl_omni.engine.kernels.elementwise import need_contiguous

_LEAST_COLUMNS = 16
"""A tensor core's."""
_LARGEST_HALF = 65504.0


@triton.jit
def _sin(x):
    """Of what is left of ``x`` within a quarter turn of a whole half, which has the same square: by its series there,
    to 6e-8. Of numbers beyond a million something between -1 and 1."""
    turns = tl.floor(x * 0.3183098861837907 + 0.5)
    x = x - turns * 3.140625 - turns * 9.676535897932795e-4
    x = tl.minimum(tl.maximum(x, -1.5707963267948966), 1.5707963267948966)
    s = x * x
    return x * (1.0 + s * (-1 / 6 + s * (1 / 120 + s * (-1 / 5040 + s * (1 / 362880 + s * (-1 / 39916800))))))


@triton.jit(
    do_not_specialize=[
        "scale",
        "length",
        "outputs",
        "taps",
        "dilation",
        "left",
        "reach",
        "cropped",
        "sums",
        "has_residual",
        "has_plain",
        "has_active",
    ]
)
def _convolve(
    x,
    weight,
    bias,
    residual,
    alpha,
    inverse,
    plain,
    active,
    lengths,
    scale,
    length,
    inputs,
    columns,
    outputs,
    taps,
    dilation,
    left,
    reach,
    cropped,
    sums,
    has_residual,
    has_plain,
    has_active,
    TIMES: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
    MOST: tl.constexpr,
):
    batch = tl.program_id(2).to(tl.int64)
    known_length = tl.load(lengths + batch) * scale
    if tl.program_id(0) * TIMES >= known_length + reach:
        return
    time = tl.program_id(0) * TIMES + tl.arange(0, TIMES)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, INPUTS)
    known = column < columns
    source = x + batch * length * inputs
    acc = tl.zeros([TIMES, COLUMNS], tl.float32)
    blocks = tl.cdiv(inputs, INPUTS)
    for step in range(taps * blocks):
        tap = step // blocks
        channel = (step % blocks) * INPUTS + k
        at = time + tap * dilation - left
        there = (at >= 0) & (at < known_length)
        inside = channel < inputs
        places = source + at[:, None] * inputs + channel[None, :]
        part = tl.load(places, mask=there[:, None] & inside[None, :], other=0.0)
        lines = weight + (tap * columns + column[None, :]) * inputs + channel[:, None]
        factors = tl.load(lines, mask=inside[:, None] & known[None, :], other=0.0)
        acc = tl.dot(part, factors, acc, input_precision="ieee")
    output = column % outputs
    acc += tl.load(bias + output, mask=known, other=0.0)[None, :]
    place = time[:, None] * columns + column[None, :] - cropped
    kept = known[None, :] & (place >= 0) & (place < known_length * columns)
    if has_residual:
        acc += tl.load(residual + batch * sums + place, mask=kept, other=0.0)
    if has_plain:
        tl.store(plain + batch * sums + place, acc, mask=kept)
    if has_active:
        sine = _sin(acc * tl.load(alpha + output, mask=known, other=0.0)[None, :])
        acc += sine * sine * tl.load(inverse + output, mask=known, other=0.0)[None, :]
        limited = tl.where(acc > MOST, MOST, tl.where(acc < -MOST, -MOST, acc))
        acc = tl.where(tl.abs(acc) == float("inf"), acc, limited)
        tl.store(active + batch * sums + place, acc.to(active.dtype.element_ty), mask=kept)


def _tile(columns: int, inputs: int) -> tuple[int, int, int, int, int]:
    """Times, columns and inputs at once, warps and stages: the best of eight tried on an H200, by columns."""
    block = max(_LEAST_COLUMNS, min(128, triton.next_power_of_2(columns)))
    if block == 64:
        return 128, block, max(16, min(32, triton.next_power_of_2(inputs))), 4, 4
    return 64, block, max(16, min(64, triton.next_power_of_2(inputs))), 4, 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snake:
    """x + sin(alpha x)^2 * inverse, float32 [channels] each."""

    alpha: Tensor
    inverse: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Convolution:
    """A convolution, or a transposed one, of [batch, time, inputs].

    ``weight`` [taps, stride * outputs, inputs]: for each input step ``stride`` output steps of ``outputs`` channels, of
    which the first ``crop`` are left away. ``left``: how many input steps before its own the first tap looks. Factors
    are of the weight's type, float16 or float32; sums are float32.

    Of row i the first ``lengths[i] * scale`` steps of the input are there, and what they lead to is written, no more;
    ``lengths`` int32 [batch].
    """

    weight: Tensor
    bias: Tensor
    outputs: int
    dilation: int
    left: int
    stride: int
    crop: int
    snake: Snake | None
    """Applied to the sums."""

    @classmethod
    def of(cls, module: nn.Module, snake: Snake | None, dtype: torch.dtype) -> Convolution:
        """Of a ``Conv1d`` or ``ConvTranspose1d``; raises ``ValueError`` for one that is no codec's: with groups, other
        strides or paddings, or lengths that it does not keep or multiply."""
        if (
            not isinstance(module, nn.Conv1d | nn.ConvTranspose1d)
            or module.groups != 1
            or module.padding_mode != "zeros"
        ):
            raise ValueError(f"{module} is no convolution that pads with zeros and has one group")
        kernel, stride, dilation = module.kernel_size[0], module.stride[0], module.dilation[0]
        padding = module.padding[0]
        found = module.weight.detach().float()
        bias = found.new_zeros(module.out_channels) if module.bias is None else module.bias.detach().float()
        if isinstance(module, nn.Conv1d):
            if stride != 1 or 2 * int(padding) != dilation * (kernel - 1):
                raise ValueError(f"{module} does not keep the length")
            packed = found.permute(2, 0, 1)
            left, crop = int(padding), 0
        else:
            taps = -(-kernel // stride)
            if dilation != 1 or kernel - stride - 2 * int(padding) + module.output_padding[0] != 0:
                raise ValueError(f"{module} does not multiply the length by {stride}")
            whole = found.new_zeros(*found.shape[:2], taps * stride)
            whole[..., :kernel] = found
            # [inputs, outputs, tap, phase] -> [tap, phase, outputs, inputs]; the last tap is the step itself
            packed = whole.unflatten(2, (taps, stride)).permute(2, 3, 1, 0).flip(0).flatten(1, 2)
            left, crop = taps - 1, int(padding)
        if dtype == torch.float16:
            packed = torch.where(packed.isinf(), packed, packed.clamp(-_LARGEST_HALF, _LARGEST_HALF))
        return cls(
            weight=packed.to(dtype).contiguous(),
            bias=bias.contiguous(),
            outputs=module.out_channels,
            dilation=dilation,
            left=left,
            stride=stride,
            crop=crop,
            snake=snake,
        )

    def __call__(self, x: Tensor, lengths: Tensor, scale: int) -> Tensor:
        """The sums, float32 [batch, time * stride, outputs]."""
        plain = self._empty(x, torch.float32)
        self._run(x, lengths, scale, None, plain, None)
        return plain

    def activated(self, x: Tensor, lengths: Tensor, scale: int) -> Tensor:
        """The sums after the snake, of the weight's type."""
        active = self._empty(x, self.weight.dtype)
        self._run(x, lengths, scale, None, None, active)
        return active

    def both(self, x: Tensor, lengths: Tensor, scale: int, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Sums and these activated; ``residual``, of the shape of the sums, is added first."""
        plain, active = self._empty(x, torch.float32), self._empty(x, self.weight.dtype)
        self._run(x, lengths, scale, residual, plain, active)
        return plain, active

    def _empty(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty(x.shape[0], x.shape[1] * self.stride, self.outputs, dtype=dtype, device=x.device)

    def _run(
        self,
        x: Tensor,
        lengths: Tensor,
        scale: int,
        residual: Tensor | None,
        plain: Tensor | None,
        active: Tensor | None,
    ) -> None:
        """Writes to ``plain`` and ``active`` where they are given."""
        need_contiguous(x=x, **({} if residual is None else {"residual": residual}))
        batch, length, inputs = x.shape
        taps, columns, _ = self.weight.shape
        times, block, at_once, warps, stages = _tile(columns, inputs)
        reach = taps - 1 if self.stride > 1 else 0
        snake = self.snake
        _convolve[(triton.cdiv(length + reach, times), triton.cdiv(columns, block), batch)](
            x,
            self.weight,
            self.bias,
            self.bias if residual is None else residual,
            self.bias if snake is None else snake.alpha,
            self.bias if snake is None else snake.inverse,
            self.bias if plain is None else plain,
            x if active is None else active,
            lengths,
            scale,
            length,
            inputs,
            columns,
            self.outputs,
            taps,
            self.dilation,
            self.left,
            reach,
            self.crop * self.outputs,
            length * self.stride * self.outputs,
            int(residual is not None),
            int(plain is not None),
            int(active is not None),
            times,
            block,
            at_once,
            _LARGEST_HALF if x.dtype == torch.float16 else float("inf"),
            num_warps=warps,
            num_stages=stages,
        )
