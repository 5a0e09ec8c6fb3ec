"""transformers' DAC decoder by kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sgl_omni.engine.kernels.convolution import Convolution, Snake, factors
from sgl_omni.models.snake_decoder import Block, SnakeDecoder


class DacKernels:
    """Factors are as ``factors`` says: on a GPU rounded to float16, unless cuDNN may round nothing."""

    def __init__(self, decoder: Any) -> None:
        """``decoder``: transformers' ``DacDecoder``, on its device, without the bend at its end."""
        self._dtype = factors()
        blocks = list(decoder.block)
        after = [*(block.snake1 for block in blocks[1:]), decoder.snake1]
        self._decoder = SnakeDecoder(
            Convolution.of(decoder.conv1, _snake(blocks[0].snake1), self._dtype),
            [_block(block, following, self._dtype) for block, following in zip(blocks, after, strict=True)],
            Convolution.of(decoder.conv2, None, self._dtype),
        )

    def __call__(self, latent: Tensor, lengths: Tensor) -> Tensor:
        """latent float32 [batch, frames, width] -> [batch, samples].

        ``lengths`` int32 [batch]: frames of each row; samples behind these are anything.
        """
        return self._decoder(latent.to(self._dtype), lengths)


def _block(block: Any, following: nn.Module, dtype: torch.dtype) -> Block:
    units = [block.res_unit1, block.res_unit2, block.res_unit3]
    after = [units[1].snake1, units[2].snake1, following]
    return Block(
        Convolution.of(block.conv_t1, _snake(units[0].snake1), dtype),
        tuple(
            (Convolution.of(unit.conv1, _snake(unit.snake2), dtype), Convolution.of(unit.conv2, _snake(then), dtype))
            for unit, then in zip(units, after, strict=True)
        ),
    )


def _snake(module: Any) -> Snake:
    alpha = module.alpha.detach().float().flatten().contiguous()
    return Snake(alpha=alpha, inverse=(alpha + 1e-9).reciprocal())
