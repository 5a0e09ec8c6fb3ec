"""The vocoder stage: frames of a request in, audio out, piece by piece."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sgl_omni.audio.causal import CausalStream, Codes
from sgl_omni.audio.chunk import audio_chunk, clipped
from sgl_omni.audio.gathering import Gathering
from sgl_omni.audio.stretch import TimeStretch
from sgl_omni.models.qwen3_tts.codec import CodecDecoder
from sgl_omni.models.qwen3_tts.facts import next_cut
from sgl_omni.runtime.stage import Payload, Request, StreamStage

Samples = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Frames that a stream is to speak next; or that it is to go on from, if nobody wants their audio."""

    codes: Codes
    stream: CausalStream
    spoken: bool


@dataclass(slots=True)
class VocoderState:
    """The codec's stream, and the frames that wait for its next cut."""

    stream: CausalStream
    waiting: npt.NDArray[np.int16]
    opened: bool = False
    spoken: int = 0
    """Frames that are audio."""
    stretch: TimeStretch | None = None


class Vocoder(StreamStage[VocoderState]):
    """Takes ``TalkerTask``'s chunks and yields ``{"audio", "sample_rate"}``.

    Cuts depend on the frame index alone, so a request's audio does not depend on how its frames were grouped. With a
    ``max_batch`` above 1, pieces of several requests are decoded together, which may round differently from one alone.
    """

    def __init__(self, decoder: CodecDecoder, sample_rate: int, num_threads: int = 1, max_batch: int = 1) -> None:
        self.concurrency = max_batch
        self._decoder = decoder
        self._sample_rate = sample_rate
        self._num_threads = num_threads
        self._decode = Gathering(self._decode_all, max_batch, lambda piece: piece.spoken)

    def open(self, request: Request) -> VocoderState:
        state = VocoderState(self._decoder.open(), np.zeros((0, self._decoder.num_codes), np.int16))
        self._decode.join()
        return state

    def feed(self, state: VocoderState, chunk: Payload) -> Iterable[Payload]:
        if not state.opened:
            self._begin(state, chunk)
        state.waiting = np.concatenate([state.waiting, chunk["codes"]])
        while len(state.waiting) >= (count := next_cut(state.spoken) - state.spoken):
            yield from self._speak(state, count)

    def flush(self, state: VocoderState) -> Iterable[Payload]:
        if len(state.waiting):
            yield from self._speak(state, len(state.waiting))
        if state.stretch:
            yield from self._chunk(state.stretch.flush())

    def result(self, state: VocoderState, payload: Payload) -> Payload:
        return payload

    def close(self, state: VocoderState) -> None:
        self._decode.leave()

    def _begin(self, state: VocoderState, chunk: Payload) -> None:
        """A cloned voice goes on from the recording."""
        state.opened = True
        speed, reference = chunk["speed"], chunk["reference_codes"]
        state.stretch = None if speed == 1.0 else TimeStretch(speed, self._sample_rate)
        if reference is not None and len(reference):
            self._decode(_Piece(np.asarray(reference), state.stream, spoken=False))

    def _speak(self, state: VocoderState, count: int) -> Iterator[Payload]:
        codes, state.waiting = state.waiting[:count], state.waiting[count:]
        state.spoken += count
        audio = clipped(self._decode(_Piece(codes, state.stream, spoken=True)))
        yield from self._chunk(state.stretch.feed(audio) if state.stretch else audio)

    def _decode_all(self, pieces: list[_Piece]) -> list[Samples]:
        # OpenMP keeps the count per thread, and the results of a product may depend on it.
        torch.set_num_threads(self._num_threads)
        codes, streams = [piece.codes for piece in pieces], [piece.stream for piece in pieces]
        if pieces[0].spoken:
            return [audio.numpy() for audio in self._decoder(codes, streams)]
        self._decoder.prime(codes, streams)
        return [np.zeros(0, np.float32) for _ in pieces]

    def _chunk(self, audio: Samples) -> Iterator[Payload]:
        if len(audio):
            yield audio_chunk(audio, self._sample_rate)
