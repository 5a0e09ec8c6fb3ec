"""transformers' DAC decoder as one kernel a convolution, which activates what it has summed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sgl_omni.engine.kernels.convolution import Convolution, Snake


@dataclass(frozen=True, slots=True)
class _Block:
    grow: Convolution
    units: tuple[tuple[Convolution, Convolution], ...]


class DacKernels:
    """On a GPU a decoder is bound by reading and writing what lies between its hundreds of small operations.

    Factors are rounded to float16: 10 bits after the point, as cuDNN takes of float32 too. Where cuDNN may not
    (``torch.backends.cudnn.allow_tf32``) they stay float32.
    """

    def __init__(self, decoder: Any) -> None:
        """``decoder``: transformers' ``DacDecoder``, on its device, without the bend at its end."""
        self._dtype = torch.float16 if torch.backends.cudnn.allow_tf32 else torch.float32
        blocks = list(decoder.block)
        after = [*(block.snake1 for block in blocks[1:]), decoder.snake1]
        self._first = Convolution.of(decoder.conv1, _snake(blocks[0].snake1), self._dtype)
        self._blocks = [_block(block, following, self._dtype) for block, following in zip(blocks, after, strict=True)]
        self._last = Convolution.of(decoder.conv2, None, self._dtype)

    def __call__(self, latent: Tensor, lengths: Tensor) -> Tensor:
        """latent float32 [batch, frames, width] -> [batch, samples].

        ``lengths`` int32 [batch]: frames of each row; samples behind these are anything.
        """
        scale = 1
        active = self._first.activated(latent.to(self._dtype), lengths, scale)
        for block in self._blocks:
            plain, active = block.grow.both(active, lengths, scale)
            scale *= block.grow.stride
            for wide, narrow in block.units:
                plain, active = narrow.both(wide.activated(active, lengths, scale), lengths, scale, plain)
        return self._last(active, lengths, scale)[..., 0]


def _block(block: Any, following: nn.Module, dtype: torch.dtype) -> _Block:
    units = [block.res_unit1, block.res_unit2, block.res_unit3]
    after = [units[1].snake1, units[2].snake1, following]
    return _Block(
        Convolution.of(block.conv_t1, _snake(units[0].snake1), dtype),
        tuple(
            (Convolution.of(unit.conv1, _snake(unit.snake2), dtype), Convolution.of(unit.conv2, _snake(then), dtype))
            for unit, then in zip(units, after, strict=True)
        ),
    )


def _snake(module: Any) -> Snake:
    alpha = module.alpha.detach().float().flatten().contiguous()
    return Snake(alpha=alpha, inverse=(alpha + 1e-9).reciprocal())
