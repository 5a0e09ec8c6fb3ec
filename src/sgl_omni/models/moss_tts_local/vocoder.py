"""The vocoder stage: frames of codes in, audio out, piece by piece."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sgl_omni.audio.chunk import audio_chunk, clipped
from sgl_omni.audio.stretch import TimeStretch
from sgl_omni.engine.task import HandOver
from sgl_omni.models.moss_tts_local.codec import CodecDecoder, CodecStream
from sgl_omni.models.moss_tts_local.gathering import GatheringDecoder
from sgl_omni.runtime.stage import Payload, Request, StreamStage


@dataclass(slots=True)
class VocoderState:
    """``waiting``: codes that are not decoded yet."""

    waiting: NDArray[np.int16]
    stream: CodecStream
    stretch: TimeStretch | None = None
    opened: bool = False


class MossVocoder(StreamStage[VocoderState]):
    """Takes chunks ``{"codes": [frames, codebooks], "speed": float}`` and yields ``{"audio", "sample_rate"}``.

    The codec's channels are averaged. Frames are cut into pieces by their number alone, so that the audio does not
    depend on how they were grouped on arrival. With a ``max_batch`` above 1, pieces of several requests are decoded
    together, which may round differently from one alone.
    """

    def __init__(self, codec: CodecDecoder, num_codebooks: int, pieces: HandOver, max_batch: int = 1) -> None:
        self.concurrency = max_batch
        self._codec = GatheringDecoder(codec, max_batch)
        self._sample_rate = codec.spec.sample_rate
        self._num_codebooks = num_codebooks
        self._pieces = pieces

    def open(self, request: Request) -> VocoderState:
        return VocoderState(np.zeros((0, self._num_codebooks), dtype=np.int16), self._codec.open())

    def feed(self, state: VocoderState, chunk: Payload) -> Iterable[Payload]:
        if not state.opened:
            state.opened = True
            speed = chunk.get("speed", 1.0)
            state.stretch = None if speed == 1 else TimeStretch(speed, self._sample_rate)
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
        self._codec.close(state.stream)

    def _spoken(self, state: VocoderState, frames: int) -> Iterator[Payload]:
        codes, state.waiting = state.waiting[:frames], state.waiting[frames:]
        samples = clipped(self._codec.decode(codes, state.stream).mean(0))
        yield from self._chunk(samples if state.stretch is None else state.stretch.feed(samples))

    def _chunk(self, samples: NDArray[np.float32]) -> Iterator[Payload]:
        if len(samples):
            yield audio_chunk(samples, self._sample_rate)
