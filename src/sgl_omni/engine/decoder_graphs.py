"""A codec's decoder as CUDA graphs, for windows of up to so many frames: a launch instead of hundreds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sgl_omni.engine.graphs import StepGraphs

log = logging.getLogger("sgl_omni.engine")

Decode = Callable[[Tensor, Tensor], Tensor]


def doubling(most: int) -> list[int]:
    """Buckets 1, 2, 4 and so on up to ``most``."""
    return [*(1 << i for i in range((most - 1).bit_length())), most]


class DecoderGraphs:
    """One graph for each bucket of windows. Shorter windows are filled up, and there are rows to spare."""

    @torch.inference_mode()
    def __init__(
        self,
        decode: Decode,
        *,
        buckets: Sequence[int],
        frames: int,
        codebooks: int,
        device: torch.device,
        facts: int = 0,
        beside: DecoderGraphs | None = None,
    ) -> None:
        """``decode``: codes int64 [batch, frames, codebooks] and numbers int32 [1 + facts, batch] -> float32
        [batch, ..., samples]. The first of the numbers is the length of each window, the others are what else there
        is to know of it; all are 0 in rows to spare. ``beside``: others that share their memory, as `StepGraphs` says.
        """
        self.windows = windows = max(buckets)
        self.frames = frames
        self._decode = decode
        self._codes = torch.zeros(windows, frames, codebooks, dtype=torch.int64, device=device)
        self._numbers = torch.zeros(1 + facts, windows, dtype=torch.int32, device=device)
        self._audio: dict[int, Tensor] = {}
        self._graphs = StepGraphs(self._run, buckets, None if beside is None else beside._graphs)
        log.info(
            "decoder: %d CUDA graphs of up to %d frames, captured in %.1f s, %.2f GiB",
            len(buckets),
            frames,
            self._graphs.capture_seconds,
            self._graphs.bytes / 2**30,
        )
        pinned = device.type == "cuda"
        self._host = torch.empty(self._audio[windows].shape, pin_memory=pinned)
        self._host_codes = torch.zeros(self._codes.shape, dtype=torch.int64, pin_memory=pinned)
        self._host_numbers = torch.zeros(self._numbers.shape, dtype=torch.int32, pin_memory=pinned)

    def hold(self, pieces: Sequence[NDArray[Any]]) -> bool:
        """Whether so many pieces of these lengths can be decoded at once."""
        return len(pieces) <= self.windows and max(map(len, pieces)) <= self.frames

    @torch.inference_mode()
    def __call__(
        self, pieces: Sequence[NDArray[np.integer[Any]]], facts: Sequence[Sequence[int]] = ()
    ) -> list[NDArray[np.float32]]:
        """Codes [frames, codebooks] of up to ``windows`` pieces, and each fact of all of them -> the samples
        [..., samples] of each. For one thread at a time."""
        bucket = self._graphs.bucket_for(len(pieces))
        assert bucket is not None, "more pieces than there is a graph for"
        codes, numbers = self._host_codes.numpy(), self._host_numbers.numpy()
        numbers[:] = 0
        for row, piece in enumerate(pieces):
            codes[row, : len(piece)], numbers[0, row] = piece, len(piece)
        for row, fact in enumerate(facts, 1):
            numbers[row, : len(pieces)] = fact
        self._codes[:bucket].copy_(self._host_codes[:bucket], non_blocking=True)
        self._numbers.copy_(self._host_numbers, non_blocking=True)
        self._graphs.replay(bucket)
        hop = self._host.shape[-1] // self.frames
        longest = hop * max(map(len, pieces))
        self._host[: len(pieces), ..., :longest].copy_(
            self._audio[bucket][: len(pieces), ..., :longest], non_blocking=True
        )
        if self._codes.is_cuda:
            torch.cuda.current_stream(self._codes.device).synchronize()
        audio = self._host.numpy()
        return [audio[row, ..., : hop * len(piece)].copy() for row, piece in enumerate(pieces)]

    def _run(self, windows: int) -> None:
        self._audio[windows] = self._decode(self._codes[:windows], self._numbers[:, :windows])
