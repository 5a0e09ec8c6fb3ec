"""A causal codec's decoder as CUDA graphs, for the next pieces of streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sgl_omni.audio.causal import Batch, CausalStream, Codes, Layout
from sgl_omni.engine.decoder_graphs import DecoderGraphs, doubling

Decode = Callable[[Tensor, Batch], Tensor]


class StreamGraphs:
    """What streams remember is copied to where the graphs read and write it, and back."""

    def __init__(
        self,
        decode: Decode,
        layout: Layout,
        *,
        streams: int,
        frames: int,
        codebooks: int,
        device: torch.device,
    ) -> None:
        """``decode``: codes int64 [batch, frames, codebooks] of a batch -> float32 [batch, samples]."""
        self._decode, self._layout = decode, layout
        self._memory = torch.zeros(streams, layout.numbers, device=device)
        self._seen = torch.zeros(streams, dtype=torch.int64, device=device)
        self._graphs = DecoderGraphs(
            self._run, buckets=doubling(streams), frames=frames, codebooks=codebooks, device=device
        )

    def holds(self, codes: Sequence[Codes]) -> bool:
        """Whether there is a graph for so many pieces of such lengths."""
        return len(codes) <= self._graphs.windows and max(map(len, codes)) <= self._graphs.frames

    @torch.inference_mode()
    def __call__(self, codes: Sequence[Codes], streams: Sequence[CausalStream]) -> list[NDArray[np.float32]]:
        """The next codes [frames, codebooks] of streams -> the samples of each. For one thread at a time."""
        rows = len(codes)
        torch.stack([stream.memory for stream in streams], out=self._memory[:rows])
        self._seen[:rows] = torch.tensor([stream.frames for stream in streams])
        audio = self._graphs(codes)
        for stream, row, piece in zip(streams, self._memory, codes, strict=False):
            stream.memory.copy_(row)
            stream.frames += len(piece)
        return audio

    def _run(self, codes: Tensor, numbers: Tensor) -> Tensor:
        rows, frames, _ = codes.shape
        batch = Batch(self._layout, self._memory[:rows], self._seen[:rows], numbers[0].long(), frames)
        return self._decode(codes, batch)
