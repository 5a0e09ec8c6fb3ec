"""The vocoder stage: codes of a request in, audio out, chunk by chunk; many requests are decoded together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from sgl_omni.audio.chunk import audio_chunk, clipped
from sgl_omni.audio.gathering import Gathering
from sgl_omni.models.higgs_audio_v2.codec_decoder import CodecDecoder
from sgl_omni.models.higgs_tts.cuts import cut_after
from sgl_omni.runtime.stage import Payload, Request, StreamStage

if TYPE_CHECKING:
    from sgl_omni.audio.stretch import TimeStretch

Samples = NDArray[np.float32]


@dataclass(slots=True)
class VocoderState:
    """The codes [frames, codebooks] so far, and how many frames are decoded."""

    codes: NDArray[np.int16]
    start: int = 0
    stretch: TimeStretch | None = None
    opened: bool = False


class HiggsVocoder(StreamStage[VocoderState]):
    """Takes chunks ``{"codes": [n, codebooks]}``, with ``speed`` where it is not 1, and yields
    ``{"audio", "sample_rate"}``.

    A chunk is decoded with all the frames around it that its samples depend on, so the joins are those of decoding
    everything at once, but for the rounding of sums in another order. Up to ``max_batch`` chunks of several requests
    are decoded together, on a CPU those of one length; with 1, samples are the same bits in every company.
    """

    def __init__(self, decoder: CodecDecoder, num_threads: int = 1, max_batch: int = 1) -> None:
        self._decoder = decoder
        self._num_threads = num_threads
        self._before, self._after = decoder.spec.context
        self._on_gpu = decoder.device.type == "cuda"
        kind = len if not decoder.takes_any_lengths else lambda window: 0
        self._windows: Gathering[NDArray[np.int16], Samples] = Gathering(self._decode_all, max_batch, kind)
        self.concurrency = max_batch

    def open(self, request: Request) -> VocoderState:
        self._windows.join()
        return VocoderState(np.zeros((0, self._decoder.spec.num_codebooks), np.int16))

    def feed(self, state: VocoderState, chunk: Payload) -> Iterable[Payload]:
        if not state.opened:
            state.opened = True
            state.stretch = self._stretch(chunk.get("speed", 1.0))
        state.codes = np.concatenate([state.codes, chunk["codes"]])
        yield from self._decode(state, len(state.codes) - self._after)

    def flush(self, state: VocoderState) -> Iterable[Payload]:
        yield from self._decode(state, len(state.codes), last=True)
        if state.stretch:
            yield from self._emit(state.stretch.flush())

    def result(self, state: VocoderState, payload: Payload) -> Payload:
        return payload

    def close(self, state: VocoderState) -> None:
        self._windows.leave()

    def _decode(self, state: VocoderState, ready: int, last: bool = False) -> Iterator[Payload]:
        """Chunks that end at frame ``ready`` at the latest; with ``last`` the one that ``ready`` cuts short too."""
        hop = self._decoder.spec.hop
        while (end := cut_after(state.start)) <= ready or (last and state.start < ready):
            end = min(end, len(state.codes))
            first = max(0, state.start - self._before)
            audio = self._windows(state.codes[first : end + self._after])
            audio = audio[(state.start - first) * hop : (end - first) * hop]
            state.start = end
            yield from self._emit(state.stretch.feed(audio) if state.stretch else audio)

    def _emit(self, audio: Samples) -> Iterator[Payload]:
        if len(audio):
            yield audio_chunk(clipped(audio), self._decoder.spec.sample_rate)

    def _stretch(self, speed: float) -> TimeStretch | None:
        if speed == 1.0:
            return None
        from sgl_omni.audio.stretch import TimeStretch

        return TimeStretch(speed, self._decoder.spec.sample_rate)

    def _decode_all(self, windows: list[NDArray[np.int16]]) -> list[Samples]:
        """Windows [frames, codebooks] -> float32 [frames * hop] of each."""
        if not self._on_gpu:  # OpenMP keeps the count per thread
            torch.set_num_threads(self._num_threads)
        return self._decoder.decode_pieces(windows)
