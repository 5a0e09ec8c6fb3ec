"""From rows of a transformer to samples by kernels, as the codecs of Qwen3-TTS and Qwen3-Omni both do it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from sgl_omni.engine.kernels.causal import DepthwiseNorm, with_room
from sgl_omni.engine.kernels.convolution import Convolution, Snake, factors
from sgl_omni.models.snake_decoder import Block, Past, SnakeDecoder, ready


@dataclass(frozen=True, slots=True)
class _Grown:
    """More steps, and the ConvNeXt block behind them."""

    grow: Convolution
    near: DepthwiseNorm
    wide: Convolution
    narrow: Convolution


class WaveformKernels:
    """``streams``: pieces of streams, which begin with what was there before. Otherwise windows, before which there are
    zeros; their transposed convolutions then begin as many steps later as a kernel reaches beyond its stride, and so
    lean on the step that follows, and of the last samples ``lookahead`` are anything.
    """

    def __init__(self, upsample: Any, decoder: Any, *, streams: bool) -> None:
        """Of modules called as the tensors are on disk, on their device."""
        self._dtype = factors()
        causal = partial(Convolution.causal, dtype=self._dtype, past=streams)
        first, *blocks, snake, last = decoder
        end = causal(last.conv, None)
        bend, room = _snake(snake), end.behind  # what follows
        found: list[Block] = []
        for block in reversed(blocks):
            snake, grow, *units = block.block
            pairs = []
            for unit in reversed(units):
                narrow = causal(unit.conv2.conv, bend, room=room)
                wide = causal(unit.conv1.conv, _snake(unit.act2))
                pairs.append((wide, narrow))
                bend, room = _snake(unit.act1), wide.behind
            grown = causal(grow.conv, bend, room=room, crop=_crop(grow, streams))
            found.append(Block(grown, tuple(reversed(pairs))))
            bend, room = _snake(snake), grown.behind
        self._decoder = SnakeDecoder(causal(first.conv, bend, room=room), found[::-1], end)
        room = self._decoder.first.behind
        grown_first: list[_Grown] = []
        for grow, block in reversed(upsample):
            none = Snake.none(len(block.gamma), block.gamma.device)
            gain, out = block.gamma.detach().float(), block.pwconv2
            narrow = Convolution.product(
                gain[:, None] * out.weight.float(), gain * out.bias.float(), self._dtype, snake=none, room=room
            )
            wide = Convolution.product(block.pwconv1.weight, block.pwconv1.bias, self._dtype, gelu=True)
            near = DepthwiseNorm.of(block.dwconv.conv, block.norm, past=streams)
            grown = causal(grow.conv, none, room=near.behind, crop=_crop(grow, streams))
            grown_first.append(_Grown(grown, near, wide, narrow))
            room = grown.behind
        self._grown, self._behind = grown_first[::-1], room

    @property
    def lookahead(self) -> int:
        """How many of the last samples of a window lean on what follows it."""
        samples = 0
        for grow in (*(each.grow for each in self._grown), *(block.grow for block in self._decoder.blocks)):
            samples = samples * grow.stride + grow.crop
        return samples

    def kept(self) -> dict[Any, tuple[int, int]]:
        """What parts look back to, [steps, channels] of each."""
        parts: list[Any] = []
        for each in self._grown:
            parts += [each.grow, each.near]
        decoder = self._decoder
        parts.append(decoder.first)
        for block in decoder.blocks:
            parts += [block.grow, *(wide for wide, _ in block.units)]
        return {part: (part.behind, part.inputs) for part in (*parts, decoder.last) if part.behind}

    def __call__(self, latent: Tensor, lengths: Tensor, past: Past | None = None) -> Tensor:
        """latent [batch, frames, width] -> float32 [batch, samples].

        ``lengths`` int32 [batch]: frames of each row; samples behind these are anything.
        """
        x, scale = with_room(latent, self._behind, self._dtype), 1
        for each in self._grown:
            plain, x = each.grow.both(ready(each.grow, x, scale, past), lengths, scale)
            scale *= each.grow.stride
            inner = each.wide.activated(each.near(ready(each.near, x, scale, past), lengths, scale), lengths, scale)
            x = each.narrow.activated(inner, lengths, scale, plain)
        return self._decoder(x, lengths, scale, past)


def _crop(grow: Any, streams: bool) -> int:
    return 0 if streams else int(grow.conv.kernel_size[0] - grow.conv.stride[0])


def _snake(module: Any) -> Snake:
    alpha, beta = module.alpha.detach().float().exp(), module.beta.detach().float().exp()
    return Snake(alpha=alpha.contiguous(), inverse=(beta + 1e-9).reciprocal())
