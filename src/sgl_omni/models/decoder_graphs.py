"""The codec's decoder as CUDA graphs, for windows of up to so many frames: a launch instead of dozens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sgl_omni.engine.graphs import StepGraphs

Decode = Callable[[Tensor, Tensor], Tensor]


class DecoderGraphs:
    """One graph for each of 1, 2, 4, ... windows; shorter windows and rows to spare cost next to nothing."""

    @torch.inference_mode()
    def __init__(self, decode: Decode, *, windows: int, frames: int, codebooks: int, device: torch.device) -> None:
        """``decode``: codes int64 [batch, frames, codebooks] and lengths int32 [batch] -> float32 [batch, samples]."""
        self.windows, self.frames = windows, frames
        self._decode = decode
        self._codes = torch.zeros(windows, frames, codebooks, dtype=torch.int64, device=device)
        self._lengths = torch.zeros(windows, dtype=torch.int32, device=device)
        self._audio: dict[int, Tensor] = {}
        self._graphs = StepGraphs(self._run, [*(1 << i for i in range((windows - 1).bit_length())), windows])
        pinned = device.type == "cuda"
        self._host = torch.empty(self._audio[windows].shape, pin_memory=pinned)
        self._host_codes = torch.zeros(self._codes.shape, dtype=torch.int64, pin_memory=pinned)
        self._host_lengths = torch.zeros(windows, dtype=torch.int32, pin_memory=pinned)

    @torch.inference_mode()
    def __call__(self, pieces: Sequence[NDArray[np.int16]]) -> list[NDArray[np.float32]]:
        """Codes [frames, codebooks] of up to ``windows`` pieces -> the samples of each. For one thread at a time."""
        bucket = self._graphs.bucket_for(len(pieces))
        assert bucket is not None, "more pieces than there is a graph for"
        codes, lengths = self._host_codes.numpy(), self._host_lengths.numpy()
        lengths[:bucket] = 0
        for row, piece in enumerate(pieces):
            codes[row, : len(piece)], lengths[row] = piece, len(piece)
        self._codes[:bucket].copy_(self._host_codes[:bucket], non_blocking=True)
        self._lengths[:bucket].copy_(self._host_lengths[:bucket], non_blocking=True)
        self._graphs.replay(bucket)
        hop = self._host.shape[1] // self.frames
        longest = hop * max(map(len, pieces))
        self._host[: len(pieces), :longest].copy_(self._audio[bucket][: len(pieces), :longest], non_blocking=True)
        if self._codes.is_cuda:
            torch.cuda.current_stream(self._codes.device).synchronize()
        audio = self._host.numpy()
        return [audio[row, : hop * len(piece)].copy() for row, piece in enumerate(pieces)]

    def _run(self, windows: int) -> None:
        self._audio[windows] = self._decode(self._codes[:windows], self._lengths[:windows])
