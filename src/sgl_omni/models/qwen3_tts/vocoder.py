"""The vocoder stage: frames of a request in, audio out, piece by piece."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from sgl_omni.audio.stretch import TimeStretch
from sgl_omni.models.qwen3_tts.codec import CodecDecoder, CodecStream
from sgl_omni.models.qwen3_tts.facts import next_cut
from sgl_omni.runtime.stage import Payload, Request, StreamStage

Samples = npt.NDArray[np.float32]


@dataclass(slots=True)
class VocoderState:
    """Frames that wait for the next cut, how many went before them, and the codec's stream."""

    waiting: npt.NDArray[np.int16]
    done: int = 0
    opened: bool = False
    stretch: TimeStretch | None = None
    stream: CodecStream = field(default_factory=CodecStream)


class Vocoder(StreamStage[VocoderState]):
    """Takes ``TalkerTask``'s chunks and yields ``{"audio", "sample_rate"}``.

    Cuts depend on the frame index alone, so a request's audio does not depend on how its frames were grouped.
    """

    def __init__(self, decoder: CodecDecoder, sample_rate: int, num_threads: int = 1) -> None:
        self._decoder = decoder
        self._sample_rate = sample_rate
        self._num_threads = num_threads

    def open(self, request: Request) -> VocoderState:
        return VocoderState(np.zeros((0, self._decoder.num_codes), np.int16))

    def feed(self, state: VocoderState, chunk: Payload) -> Iterable[Payload]:
        # OpenMP keeps the count per thread, and the results of a product may depend on it.
        torch.set_num_threads(self._num_threads)
        if not state.opened:
            self._begin(state, chunk)
        state.waiting = np.concatenate([state.waiting, chunk["codes"]])
        while len(state.waiting) >= (count := next_cut(state.done) - state.done):
            yield from self._emit(state, self._decode(state, count))

    def flush(self, state: VocoderState) -> Iterable[Payload]:
        torch.set_num_threads(self._num_threads)
        if len(state.waiting):
            yield from self._emit(state, self._decode(state, len(state.waiting)))
        if state.stretch:
            yield from self._chunk(state.stretch.flush())

    def result(self, state: VocoderState, payload: Payload) -> Payload:
        return payload

    def close(self, state: VocoderState) -> None:
        state.stream.memory.clear()

    def _begin(self, state: VocoderState, chunk: Payload) -> None:
        """A cloned voice goes on from the recording."""
        state.opened = True
        speed, reference = chunk["speed"], chunk["reference_codes"]
        state.stretch = None if speed == 1.0 else TimeStretch(speed, self._sample_rate)
        if reference is not None:
            self._decoder.prime(torch.from_numpy(np.asarray(reference, np.int64)), state.stream)

    def _decode(self, state: VocoderState, count: int) -> Samples:
        codes, state.waiting = state.waiting[:count], state.waiting[count:]
        state.done += count
        audio: Samples = self._decoder(torch.from_numpy(codes.astype(np.int64)), state.stream).cpu().numpy()
        return audio

    def _emit(self, state: VocoderState, audio: Samples) -> Iterator[Payload]:
        yield from self._chunk(state.stretch.feed(audio) if state.stretch else audio)

    def _chunk(self, audio: Samples) -> Iterator[Payload]:
        if len(audio):
            yield {"audio": audio, "sample_rate": self._sample_rate}
