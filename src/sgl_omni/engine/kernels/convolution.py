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
        "behind",
        "room",
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
    behind,
    room,
    sums,
    has_residual,
    has_plain,
    has_active,
    TIMES: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
    MOST: tl.constexpr,
    GELU: tl.constexpr,
):
    batch = tl.program_id(2).to(tl.int64)
    known_length = tl.load(lengths + batch) * scale
    if tl.program_id(0) * TIMES >= known_length + reach:
        return
    time = tl.program_id(0) * TIMES + tl.arange(0, TIMES)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, INPUTS)
    known = column < columns
    source = x + (batch * (behind + length) + behind) * inputs
    acc = tl.zeros([TIMES, COLUMNS], tl.float32)
    blocks = tl.cdiv(inputs, INPUTS)
    for step in range(taps * blocks):
        tap = step // blocks
        channel = (step % blocks) * INPUTS + k
        at = time + tap * dilation - left
        there = (at >= -behind) & (at < known_length)
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
        if GELU:
            acc = 0.5 * acc * (1.0 + tl.erf(acc * 0.7071067811865476))
        else:
            sine = _sin(acc * tl.load(alpha + output, mask=known, other=0.0)[None, :])
            acc += sine * sine * tl.load(inverse + output, mask=known, other=0.0)[None, :]
        limited = tl.where(acc > MOST, MOST, tl.where(acc < -MOST, -MOST, acc))
        acc = tl.where(tl.abs(acc) == float("inf"), acc, limited)
        begin = active + batch * (sums + room * outputs) + room * outputs
        tl.store(begin + place, acc.to(active.dtype.element_ty), mask=kept)


def _tile(columns: int, inputs: int) -> tuple[int, int, int, int, int]:
    """Times, columns and inputs at once, warps and stages: the best of eight tried on an H200, by columns, and smaller
    where less of a tile is then nobody's."""
    block = max(_LEAST_COLUMNS, _block(columns, 128))
    if block == 64:
        return 128, block, max(16, min(32, triton.next_power_of_2(inputs))), 4, 4
    return 64, block, max(16, _block(inputs, 64)), 4, 3


def _block(size: int, most: int) -> int:
    """A power of two up to ``most``; half of that, where it covers ``size`` with fewer to spare."""
    if size <= most // 2:
        return triton.next_power_of_2(size)
    return most if triton.cdiv(size, most) * 2 == triton.cdiv(size, most // 2) else most // 2


def factors() -> torch.dtype:
    """What convolutions of float32 take their factors as: float16, 10 bits after the point, as cuDNN takes of float32
    too. Where cuDNN may not (``torch.backends.cudnn.allow_tf32``) they stay float32."""
    return torch.float16 if torch.backends.cudnn.allow_tf32 else torch.float32


def halved(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As ``dtype``, numbers too large for float16 as its largest; infinities stay."""
    if dtype == torch.float16:
        x = torch.where(x.isinf(), x, x.clamp(-_LARGEST_HALF, _LARGEST_HALF))
    return x.to(dtype)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snake:
    """x + sin(alpha x)^2 * inverse, float32 [channels] each."""

    alpha: Tensor
    inverse: Tensor

    @classmethod
    def none(cls, channels: int, device: torch.device) -> Snake:
        """Bends nothing: what is activated is the sums as they are, of the weight's type."""
        zeros = torch.zeros(channels, device=device)
        return cls(alpha=zeros, inverse=zeros)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Convolution:
    """A convolution, or a transposed one, of [batch, behind + time, inputs].

    ``weight`` [taps, stride * outputs, inputs]: for each input step ``stride`` output steps of ``outputs`` channels, of
    which the first ``crop`` are left away. ``left``: how many input steps before its own the first tap looks. Factors
    are of the weight's type, float16 or float32; sums are float32.

    The input begins with ``behind`` steps that were there before, at whose places otherwise zeros are; what is
    activated leaves ``room`` for as many as the next one wants, and does not write there.

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
    behind: int = 0
    room: int = 0
    gelu: bool = False
    """In the snake's place."""

    @classmethod
    def of(cls, module: nn.Module, snake: Snake | None, dtype: torch.dtype) -> Convolution:
        """Of a ``Conv1d`` or ``ConvTranspose1d``; raises ``ValueError`` for one that is no codec's: with groups, other
        strides or paddings, or lengths that it does not keep or multiply."""
        conv = _checked(module)
        kernel, stride, dilation = conv.kernel_size[0], conv.stride[0], conv.dilation[0]
        padding = int(conv.padding[0])
        if isinstance(conv, nn.Conv1d):
            if stride != 1 or 2 * padding != dilation * (kernel - 1):
                raise ValueError(f"{module} does not keep the length")
            return cls._packed(conv, snake, dtype, left=padding)
        if dilation != 1 or kernel - stride - 2 * padding + conv.output_padding[0] != 0:
            raise ValueError(f"{module} does not multiply the length by {stride}")
        return cls._packed(conv, snake, dtype, left=-(-kernel // stride) - 1, crop=padding)

    @classmethod
    def causal(
        cls,
        module: nn.Module,
        snake: Snake | None,
        dtype: torch.dtype,
        *,
        past: bool,
        room: int = 0,
        crop: int = 0,
    ) -> Convolution:
        """Of one that pads nothing, looking back only. ``past``: the input begins with what it looks back to.
        Raises ``ValueError`` as ``of`` does."""
        conv = _checked(module)
        kernel, stride, dilation = conv.kernel_size[0], conv.stride[0], conv.dilation[0]
        grows = isinstance(conv, nn.ConvTranspose1d)
        if conv.padding[0] != 0 or (dilation if grows else stride) != 1:
            raise ValueError(f"{module} pads, or has a stride or dilation that no causal codec has")
        left = -(-kernel // stride) - 1 if grows else (kernel - 1) * dilation
        return cls._packed(conv, snake, dtype, left=left, crop=crop, behind=left if past else 0, room=room)

    @classmethod
    def product(
        cls,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        *,
        snake: Snake | None = None,
        gelu: bool = False,
        room: int = 0,
    ) -> Convolution:
        """Of each step by itself: ``weight`` [outputs, inputs], ``bias`` [outputs]."""
        outputs, found = weight.shape[0], weight.detach().float()
        return cls(
            weight=halved(found[None], dtype).contiguous(),
            bias=found.new_zeros(outputs) if bias is None else bias.detach().float().contiguous(),
            outputs=outputs,
            dilation=1,
            left=0,
            stride=1,
            crop=0,
            snake=snake,
            gelu=gelu,
            room=room,
        )

    @classmethod
    def _packed(
        cls,
        conv: nn.Conv1d | nn.ConvTranspose1d,
        snake: Snake | None,
        dtype: torch.dtype,
        *,
        left: int,
        crop: int = 0,
        behind: int = 0,
        room: int = 0,
    ) -> Convolution:
        kernel, stride = conv.kernel_size[0], conv.stride[0]
        found = conv.weight.detach().float()
        if isinstance(conv, nn.Conv1d):
            packed = found.permute(2, 0, 1)
        else:
            taps = -(-kernel // stride)
            whole = found.new_zeros(*found.shape[:2], taps * stride)
            whole[..., :kernel] = found
            # [inputs, outputs, tap, phase] -> [tap, phase, outputs, inputs]; the last tap is the step itself
            packed = whole.unflatten(2, (taps, stride)).permute(2, 3, 1, 0).flip(0).flatten(1, 2)
        bias = found.new_zeros(conv.out_channels) if conv.bias is None else conv.bias.detach().float()
        return cls(
            weight=halved(packed, dtype).contiguous(),
            bias=bias.contiguous(),
            outputs=conv.out_channels,
            dilation=conv.dilation[0],
            left=left,
            stride=stride,
            crop=crop,
            snake=snake,
            behind=behind,
            room=room,
        )

    @property
    def inputs(self) -> int:
        return self.weight.shape[2]

    def __call__(self, x: Tensor, lengths: Tensor, scale: int, residual: Tensor | None = None) -> Tensor:
        """The sums, float32 [batch, time * stride, outputs]; ``residual``, of their shape, is added first."""
        plain = self._plain(x)
        self._run(x, lengths, scale, residual, plain, None)
        return plain

    def activated(self, x: Tensor, lengths: Tensor, scale: int, residual: Tensor | None = None) -> Tensor:
        """The sums after the snake or GELU, of the weight's type: [batch, room + time * stride, outputs]."""
        active = self._active(x)
        self._run(x, lengths, scale, residual, None, active)
        return active

    def both(self, x: Tensor, lengths: Tensor, scale: int, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Sums and these activated, each as above."""
        plain, active = self._plain(x), self._active(x)
        self._run(x, lengths, scale, residual, plain, active)
        return plain, active

    def _plain(self, x: Tensor) -> Tensor:
        return torch.empty(x.shape[0], self._steps(x), self.outputs, dtype=torch.float32, device=x.device)

    def _active(self, x: Tensor) -> Tensor:
        steps = self.room + self._steps(x)
        return torch.empty(x.shape[0], steps, self.outputs, dtype=self.weight.dtype, device=x.device)

    def _steps(self, x: Tensor) -> int:
        return (x.shape[1] - self.behind) * self.stride

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
        batch, length, inputs = x.shape[0], x.shape[1] - self.behind, x.shape[2]
        taps, columns, _ = self.weight.shape
        times, block, at_once, warps, stages = _tile(columns, inputs)
        reach = -(-self.crop // self.stride)
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
            self.behind,
            self.room,
            length * self.stride * self.outputs,
            int(residual is not None),
            int(plain is not None),
            int(active is not None),
            times,
            block,
            at_once,
            _LARGEST_HALF if x.dtype == torch.float16 else float("inf"),
            self.gelu,
            num_warps=warps,
            num_stages=stages,
        )


def _checked(module: nn.Module) -> nn.Conv1d | nn.ConvTranspose1d:
    if not isinstance(module, nn.Conv1d | nn.ConvTranspose1d) or module.groups != 1 or module.padding_mode != "zeros":
        raise ValueError(f"{module} is no convolution that pads with zeros and has one group")
    return module
