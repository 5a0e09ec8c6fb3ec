"""The vocoder stage: frames of codes in, audio out, piece by piece."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sgl_omni.audio.causal import CausalStream, Codes
from sgl_omni.audio.chunk import audio_chunk, clipped
from sgl_omni.audio.gathering import Gathering
from sgl_omni.audio.stretch import TimeStretch
from sgl_omni.engine.task import HandOver
from sgl_omni.models.csm.codec import CodecDecoder
from sgl_omni.runtime.stage import Payload, Request, StreamStage


@dataclass(slots=True)
class VocoderState:
    """``waiting``: codes that are not decoded yet."""

    stream: CausalStream
    waiting: NDArray[np.int16]
    stretch: TimeStretch | None = None
    opened: bool = False


class CsmVocoder(StreamStage[VocoderState]):
    """Takes chunks ``{"codes": [frames, codebooks], "speed": float}`` and yields ``{"audio", "sample_rate"}``.

    Frames are cut into pieces by their number alone, so that the audio does not depend on how they were grouped on
    arrival. With a ``max_batch`` above 1, pieces of several requests are decoded together, which may round differently
    from one alone.
    """

    def __init__(self, codec: CodecDecoder, pieces: HandOver, num_threads: int = 1, max_batch: int = 1) -> None:
        self.concurrency = max_batch
        self._codec = codec
        self._pieces = pieces
        self._num_threads = num_threads
        self._decode = Gathering(self._decode_all, max_batch)

    def open(self, request: Request) -> VocoderState:
        state = VocoderState(self._codec.open(), np.zeros((0, self._codec.num_codebooks), dtype=np.int16))
        self._decode.join()
        return state

    def feed(self, state: VocoderState, chunk: Payload) -> Iterable[Payload]:
        if not state.opened:
            state.opened = True
            speed = chunk.get("speed", 1.0)
            state.stretch = None if speed == 1 else TimeStretch(speed, self._codec.sample_rate)
        state.waiting = np.concatenate([state.waiting, chunk["codes"]])
        while len(state.waiting) >= (frames := self._pieces.frames_after(state.stream.frames)):
            yield from self._spoken(state, frames)

    def flush(self, state: VocoderState) -> Iterable[Payload]:
        if len(state.waiting):
            yield from self._spoken(state, len(state.waiting))
        if state.stretch is not None:
            yield from self._chunk(state.stretch.flush())

    def result(self, state: VocoderState, payload: Payload) -> Payload:
        return payload

    def close(self, state: VocoderState) -> None:
        self._decode.leave()

    def _spoken(self, state: VocoderState, frames: int) -> Iterator[Payload]:
        codes, state.waiting = state.waiting[:frames], state.waiting[frames:]
        samples = clipped(self._decode((codes, state.stream)))
        yield from self._chunk(samples if state.stretch is None else state.stretch.feed(samples))

    def _decode_all(self, pieces: list[tuple[Codes, CausalStream]]) -> list[NDArray[np.float32]]:
        # OpenMP keeps the count per thread, and the results of a product may depend on it
        torch.set_num_threads(self._num_threads)
        codes, streams = zip(*pieces, strict=True)
        return [audio.numpy() for audio in self._codec.decode(codes, streams)]

    def _chunk(self, samples: NDArray[np.float32]) -> Iterator[Payload]:
        if len(samples):
            yield audio_chunk(samples, self._codec.sample_rate)
