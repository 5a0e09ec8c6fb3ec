"""The vocoder: codec frames of a request as they come, to audio, in windows that overlap to the left."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sgl_omni.audio.chunk import audio_chunk
from sgl_omni.audio.gathering import Gathering
from sgl_omni.engine.platform import for_kernels
from sgl_omni.errors import StartupError
from sgl_omni.models.qwen3_omni.loading import load_part, whole_config
from sgl_omni.models.qwen3_omni.prompt_spec import SAMPLE_RATE
from sgl_omni.runtime.stage import Payload, Request, StreamStage

if TYPE_CHECKING:
    from sgl_omni.models.qwen3_tts.waveform_kernels import WaveformKernels

Codes = NDArray[np.int64]
Audio = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """Where audio is cut, by the frame's index alone: ``first`` frames, then twice as many each, to ``most``.

    ``context`` frames before a piece are decoded with it.
    """

    first: int = 4
    most: int = 24
    context: int = 25

    def __post_init__(self) -> None:
        if not 1 <= self.first <= self.most or self.context < 1:
            raise StartupError(
                f"first_frames {self.first} must be 1 or more and at most chunk_frames {self.most}, and "
                f"context_frames {self.context} 1 or more"
            )

    def following(self, start: int, length: int) -> int:
        """The end of the piece from ``start`` on, where the one before it had ``length`` frames (0: there is none)."""
        return start + (min(2 * length, self.most) if length else self.first)


class Vocoder:
    """Transformers' own Code2Wav, on a GPU by kernels behind its transformer. A window of n frames gives n frames'
    samples, less ``lookahead`` of the last.

    These lean on the frame that follows, so they come with the next window, or never after the last.
    """

    def __init__(self, folder: Path, device: str, dtype: torch.dtype) -> None:
        from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

        config = whole_config(folder).code2wav_config
        self._model = load_part(Qwen3OmniMoeCode2Wav, config, folder, "code2wav.", device, dtype)
        self._device = device
        self._kernels = _kernels(self._model) if for_kernels(self._model.code_embedding.weight) else None
        self.codebooks = int(config.num_quantizers)
        self.samples_per_frame = int(self._model.total_upsample)
        two = self.decode([np.zeros((self.codebooks, 2), dtype=np.int64)])[0]
        self.lookahead = 2 * self.samples_per_frame - len(two)

    @torch.inference_mode()
    def decode(self, windows: Sequence[Codes]) -> list[Audio]:
        """Codes int64 [codebooks, frames] of several windows -> float32 [samples] of each, as if it were alone.

        The shorter ones get frames after their end, which change nothing before the last ``lookahead`` samples.
        """
        longest = max(window.shape[1] for window in windows)
        padded = np.zeros((len(windows), self.codebooks, longest), dtype=np.int64)
        for row, window in zip(padded, windows, strict=True):
            row[:, : window.shape[1]] = window
        frames = [window.shape[1] for window in windows]
        made = self._waveform(torch.from_numpy(padded).to(self._device), frames).float().cpu().numpy()
        spare = [(longest - window.shape[1]) * self.samples_per_frame for window in windows]
        return [audio[: len(audio) - count] for audio, count in zip(made, spare, strict=True)]

    def _waveform(self, codes: Tensor, frames: Sequence[int]) -> Tensor:
        """codes int64 [batch, codebooks, most frames] -> [batch, samples]"""
        model, kernels = self._model, self._kernels
        if kernels is None:
            found: Tensor = model(codes)[:, 0]
            return found
        hidden = model.code_embedding(codes + model.code_offset).mean(1)
        hidden = model.pre_transformer(inputs_embeds=hidden).last_hidden_state
        made = kernels(hidden, torch.tensor(frames, dtype=torch.int32, device=codes.device))
        return made[:, : made.shape[1] - kernels.lookahead].clamp(-1, 1)


def _kernels(model: Any) -> WaveformKernels:
    from sgl_omni.models.qwen3_tts.waveform_kernels import WaveformKernels

    return WaveformKernels(model.upsample, model.decoder, streams=False)


@dataclass(slots=True)
class SpokenState:
    """Codes so far [frames, codebooks], and how far they are audio."""

    codes: NDArray[np.int64]
    start: int = 0
    length: int = 0
    """Frames of the last piece."""
    sent: int = 0
    """Samples that were handed on."""


class Code2Wav(StreamStage[SpokenState]):
    """Takes chunks ``{"codes": [n, codebooks]}`` and yields ``{"audio", "sample_rate"}``.

    Samples lie where decoding all frames at once would put them, and depend on the frames before them alone, as far as
    a window reaches back; so they are the same whenever the codes come.
    """

    def __init__(self, vocoder: Vocoder, cuts: Cuts, max_batch: int = 32) -> None:
        self.concurrency = max_batch
        self._vocoder = vocoder
        self._cuts = cuts
        self._decode: Gathering[Codes, Audio] = Gathering(vocoder.decode, max_batch)

    def open(self, request: Request) -> SpokenState:
        self._decode.join()
        return SpokenState(np.zeros((0, self._vocoder.codebooks), dtype=np.int64))

    def feed(self, state: SpokenState, chunk: Payload) -> Iterable[Payload]:
        state.codes = np.concatenate([state.codes, np.asarray(chunk["codes"], dtype=np.int64)])
        while (end := self._cuts.following(state.start, state.length)) <= len(state.codes):
            yield from self._piece(state, end)

    def flush(self, state: SpokenState) -> Iterable[Payload]:
        if state.start < len(state.codes):
            yield from self._piece(state, len(state.codes))

    def result(self, state: SpokenState, payload: Payload) -> Payload:
        return payload

    def close(self, state: SpokenState) -> None:
        self._decode.leave()

    def _piece(self, state: SpokenState, end: int) -> Iterator[Payload]:
        """Decodes up to frame ``end`` with what lies before, and yields the samples that are new."""
        first = max(0, state.start - self._cuts.context)
        audio = self._decode(np.ascontiguousarray(state.codes[first:end].T))
        new = audio[state.sent - first * self._vocoder.samples_per_frame :]
        state.start, state.length = end, end - state.start
        state.sent += len(new)
        if len(new):
            yield audio_chunk(new, SAMPLE_RATE)
