"""Recordings that become audio piece by piece, several in one call; on a GPU as CUDA graphs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sgl_omni.engine.decoder_graphs import doubling
from sgl_omni.engine.graphs import StepGraphs, can_capture
from sgl_omni.models.ming_omni_tts.vae_decoder import VaeDecoder, VaeMemory

log = logging.getLogger("sgl_omni.models")

Floats = NDArray[np.float32]


@dataclass(slots=True)
class VaeStream:
    """Of one recording: its ``row`` in the decoder's memory, and how many latents were decoded."""

    row: int
    heard: int = 0


class Piece(NamedTuple):
    """The next latents float32 [n, latent_size] of a stream, and whether they are its ``last``; these may be none."""

    latents: Floats
    stream: VaeStream
    last: bool


class VaeStreams:
    """A decoder and what it remembers of streams, which may be opened and closed while it decodes."""

    def __init__(self, decoder: VaeDecoder, rows: int = 8) -> None:
        """``rows``: streams that there is room for at first."""
        self.decoder = decoder
        self._memory = decoder.memory(1 + rows)  # the first is for places of a graph that nobody takes
        self._rows = Lock()
        self._free: list[int] = []
        self._used = 1
        self._graphs: PieceGraphs | None = None

    def open(self) -> VaeStream:
        with self._rows:
            if self._free:
                return VaeStream(self._free.pop())
            self._used += 1
            return VaeStream(self._used - 1)

    def close(self, stream: VaeStream) -> None:
        with self._rows:
            self._free.append(stream.row)

    def capture(self, pieces: int, latents: int) -> None:
        """On a GPU, takes calls of up to so many pieces of up to so many latents into graphs, unless a layer of the
        decoder sees more than a window, for what it sees grows."""
        if can_capture(self.decoder.device) and not self.decoder.sees_all:
            self._graphs = PieceGraphs(self.decoder, self._memory, pieces, latents)

    @torch.inference_mode()
    def decode(self, pieces: Sequence[Piece]) -> list[Floats]:
        """Of each stream the samples that are complete by now; all of them at the last piece.

        For one thread at a time. Pieces of any lengths go through the decoder in one call.
        """
        self._make_room(pieces)
        graphs, longest = self._graphs, max(len(piece.latents) for piece in pieces)
        if graphs is not None and graphs.hold(len(pieces), longest):
            audio = graphs(pieces)
        else:
            audio = self._decode(pieces, longest)
        found = []
        for row, (latents, stream, last) in zip(audio, pieces, strict=True):
            found.append(row[self.decoder.samples(stream.heard, len(latents), last)].copy())
            stream.heard += len(latents)
        return found

    def _decode(self, pieces: Sequence[Piece], longest: int) -> Floats:
        device = self.decoder.device
        latents = np.zeros((len(pieces), longest, self.decoder.spec.latent_size), np.float32)
        facts = np.zeros((4, len(pieces)), np.int64)
        _write(pieces, latents, facts)
        seen = max(self.decoder.seen(piece.stream.heard) for piece in pieces)
        given = torch.from_numpy(latents).to(device), torch.from_numpy(facts).to(device)
        return self.decoder(*given, self._memory, min(seen, self._memory.places)).cpu().numpy()  # type: ignore[no-any-return]

    def _make_room(self, pieces: Sequence[Piece]) -> None:
        """Doubles the memory as often as it takes."""
        rows, places = self._memory.latents.shape[0], self._memory.places
        while rows <= max(piece.stream.row for piece in pieces):
            rows *= 2
        if self.decoder.sees_all:
            most = max(self.decoder.seen(stream.heard + len(latents)) for latents, stream, _ in pieces)
            while places < most:
                places = max(64, 2 * places)
        if (rows, places) == (self._memory.latents.shape[0], self._memory.places):
            return
        memory, graphs = self._memory.grow(rows, places), self._graphs
        if graphs is not None:
            log.info("the vocoder makes room for %d streams and captures its graphs again", rows - 1)
            self._graphs = PieceGraphs(self.decoder, memory, graphs.pieces, graphs.latents)
        self._memory = memory


class PieceGraphs:
    """One graph for each of 1, 2, 4, ... pieces, all of one length; shorter ones and pieces to spare cost little."""

    @torch.inference_mode()
    def __init__(self, decoder: VaeDecoder, memory: VaeMemory, pieces: int, latents: int) -> None:
        self.pieces, self.latents = pieces, latents
        self._decoder, self._memory = decoder, memory
        device, pinned = decoder.device, decoder.device.type == "cuda"
        self._latents = torch.zeros(pieces, latents, decoder.spec.latent_size, device=device)
        self._facts = torch.zeros(4, pieces, dtype=torch.int64, device=device)
        self._samples: dict[int, Tensor] = {}
        self._graphs = StepGraphs(self._run, doubling(pieces))
        self._host = torch.empty(self._samples[pieces].shape, pin_memory=pinned)
        self._host_latents = torch.zeros(self._latents.shape, pin_memory=pinned)
        self._host_facts = torch.zeros(self._facts.shape, dtype=torch.int64, pin_memory=pinned)

    def hold(self, pieces: int, latents: int) -> bool:
        return pieces <= self.pieces and latents <= self.latents

    def __call__(self, pieces: Sequence[Piece]) -> Floats:
        """Of each piece all samples, which the next call overwrites."""
        bucket = self._graphs.bucket_for(len(pieces))
        assert bucket is not None, "more pieces than there is a graph for"
        self._host_latents[:bucket] = 0
        self._host_facts[:] = 0
        _write(pieces, self._host_latents.numpy(), self._host_facts.numpy())
        self._latents[:bucket].copy_(self._host_latents[:bucket], non_blocking=True)
        self._facts.copy_(self._host_facts, non_blocking=True)
        self._graphs.replay(bucket)
        count = len(pieces)
        self._host[:count].copy_(self._samples[bucket][:count], non_blocking=True)
        if self._latents.is_cuda:
            torch.cuda.current_stream(self._latents.device).synchronize()
        return self._host[:count].numpy()

    def _run(self, pieces: int) -> None:
        given = self._latents[:pieces], self._facts[:, :pieces]
        self._samples[pieces] = self._decoder(*given, self._memory, self._memory.places)


def _write(pieces: Sequence[Piece], latents: Floats, facts: NDArray[np.int64]) -> None:
    """What ``VaeDecoder`` takes, into zeros."""
    for i, (given, stream, last) in enumerate(pieces):
        latents[i, : len(given)] = given
        facts[:, i] = stream.row, stream.heard, len(given), last
