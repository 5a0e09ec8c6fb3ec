"""The vocoder stage: codes of a request in, audio out, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from sgl_omni.audio.chunk import audio_chunk
from sgl_omni.models.demo_voice.chunking import ready_chunks
from sgl_omni.models.demo_voice.codec import CodecDecoder
from sgl_omni.runtime.stage import Payload, Request, StreamStage

if TYPE_CHECKING:
    from sgl_omni.audio.stretch import TimeStretch

# With the 0.2 s of silence that the model itself leaves between two pieces this makes a third of a second,
# as between two sentences read aloud.
PAUSE_SECONDS = 0.12


@dataclass(slots=True)
class VocoderState:
    """The codes of the piece in progress, and how far it is decoded."""

    codes: np.ndarray
    start: int = 0
    spoken_pieces: int = 0
    stretch: TimeStretch | None = None
    opened: bool = False


class DemoVocoder(StreamStage[VocoderState]):
    """Takes chunks ``{"codes": [n, 4], "piece_end": bool, "speed": float}`` and yields ``{"audio", "sample_rate"}``.

    Cuts depend on the frame index alone (see ``chunking``), so a request's audio does not depend on how its
    codes were grouped on arrival.
    """

    def __init__(self, codec: CodecDecoder, num_threads: int = 1) -> None:
        self._codec = codec
        self._num_threads = num_threads
        self._pause = np.zeros(round(PAUSE_SECONDS * codec.spec.sample_rate), dtype=np.float32)

    def open(self, request: Request) -> VocoderState:
        return VocoderState(codes=self._no_codes())

    def feed(self, state: VocoderState, chunk: Payload) -> Iterable[Payload]:
        # OpenMP keeps the count per thread, and the results of a matrix product may depend on it.
        torch.set_num_threads(self._num_threads)
        if not state.opened:
            state.opened = True
            state.stretch = self._stretch(chunk.get("speed", 1.0))
        state.codes = np.concatenate([state.codes, chunk["codes"]])
        for audio in self._decode_ready(state, chunk["piece_end"]):
            yield from self._emit(state.stretch.feed(audio) if state.stretch else audio)

    def flush(self, state: VocoderState) -> Iterable[Payload]:
        if state.stretch:
            yield from self._emit(state.stretch.flush())

    def result(self, state: VocoderState, payload: Payload) -> Payload:
        return payload

    def _decode_ready(self, state: VocoderState, complete: bool) -> Iterator[np.ndarray]:
        right_context = self._codec.spec.right_context
        for start, end in ready_chunks(state.start, len(state.codes), right_context, complete):
            audio = self._codec.decode_chunk(state.codes, start, end)
            state.start = end
            yield np.concatenate([self._pause, audio]) if start == 0 and state.spoken_pieces else audio
        if complete:
            state.spoken_pieces += 1 if len(state.codes) else 0
            state.codes, state.start = self._no_codes(), 0

    def _emit(self, audio: np.ndarray) -> Iterator[Payload]:
        if len(audio):
            yield audio_chunk(audio, self._codec.spec.sample_rate)

    def _no_codes(self) -> np.ndarray:
        return np.zeros((0, self._codec.spec.num_codebooks), dtype=np.int16)

    def _stretch(self, speed: float) -> TimeStretch | None:
        if speed == 1.0:
            return None
        from sgl_omni.audio.stretch import TimeStretch

        return TimeStretch(speed, self._codec.spec.sample_rate)
