"""The vocoder stage: latents of a request in, audio out, piece by piece."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from sgl_omni.audio.chunk import audio_chunk, clipped
from sgl_omni.audio.gathering import Gathering
from sgl_omni.audio.stretch import TimeStretch
from sgl_omni.engine.task import HandOver
from sgl_omni.models.ming_omni_tts.vae_streams import Floats, Piece, VaeStream, VaeStreams
from sgl_omni.runtime.stage import Payload, Request, StreamStage


@dataclass(slots=True)
class VocoderState:
    """``waiting``: latents that are not decoded yet."""

    stream: VaeStream
    waiting: Floats
    stretch: TimeStretch | None = None
    opened: bool = False


class MingVocoder(StreamStage[VocoderState]):
    """Takes chunks ``{"latents": float32 [n, latent_size], "speed": float}`` and yields ``{"audio", "sample_rate"}``.

    Latents are cut into pieces by their number alone, so that the audio does not depend on how they were grouped on
    arrival. With a ``max_batch`` above 1, pieces of several requests are decoded together, which may round differently
    from one alone.
    """

    def __init__(self, streams: VaeStreams, pieces: HandOver, num_threads: int = 1, max_batch: int = 1) -> None:
        """``pieces``: of latents."""
        self.concurrency = max_batch
        self._streams = streams
        self._spec = streams.decoder.spec
        self._pieces = pieces
        self._num_threads = num_threads
        self._decode = Gathering(self._decode_all, max_batch)

    def open(self, request: Request) -> VocoderState:
        state = VocoderState(self._streams.open(), np.zeros((0, self._spec.latent_size), np.float32))
        self._decode.join()
        return state

    def feed(self, state: VocoderState, chunk: Payload) -> Iterable[Payload]:
        if not state.opened:
            state.opened = True
            speed = chunk["speed"]
            state.stretch = None if speed == 1 else TimeStretch(speed, self._spec.sample_rate)
        state.waiting = np.concatenate([state.waiting, chunk["latents"]])
        while len(state.waiting) >= (count := self._pieces.frames_after(state.stream.heard)):
            yield from self._spoken(state, count, last=False)

    def flush(self, state: VocoderState) -> Iterable[Payload]:
        """The last latent is only decoded when it is known that none comes after it."""
        if state.opened:
            yield from self._spoken(state, len(state.waiting), last=True)
        if state.stretch is not None:
            yield from self._chunk(state.stretch.flush())

    def result(self, state: VocoderState, payload: Payload) -> Payload:
        return payload

    def close(self, state: VocoderState) -> None:
        self._decode.leave()
        self._streams.close(state.stream)

    def _spoken(self, state: VocoderState, count: int, last: bool) -> Iterator[Payload]:
        latents, state.waiting = state.waiting[:count], state.waiting[count:]
        samples = clipped(self._decode(Piece(latents, state.stream, last)))
        yield from self._chunk(samples if state.stretch is None else state.stretch.feed(samples))

    def _decode_all(self, pieces: list[Piece]) -> list[Floats]:
        # OpenMP keeps the count per thread, and the results of a product may depend on it
        torch.set_num_threads(self._num_threads)
        return self._streams.decode(pieces)

    def _chunk(self, samples: Floats) -> Iterator[Payload]:
        if len(samples):
            yield audio_chunk(samples, self._spec.sample_rate)
