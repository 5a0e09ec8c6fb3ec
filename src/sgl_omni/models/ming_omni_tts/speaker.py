"""A recording of a voice to the speaker's vector, by the CAM++ model that lies in the checkpoint as an ONNX file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sgl_omni.audio.kept import LastMade
from sgl_omni.errors import InvalidRequest, NotFinite, StartupError
from sgl_omni.models.ming_omni_tts.spec import SPEAKER_RATE, SPEAKER_SIZE

_BANDS = 80
_FRAME, _HOP, _FFT = 400, 160, 512
_LOWEST = 20.0
_PREEMPHASIS = 0.97

_TRIAL_FRAMES = 200
_KEPT_SPEAKERS = 4096
"""A vector takes less than a kilobyte."""


class KaldiFeatures:
    """Samples to what speakers are told by: logarithms of mel bands, as Kaldi computes them without dither."""

    def __init__(self) -> None:
        from transformers.audio_utils import mel_filter_bank, window_function

        filters = mel_filter_bank(
            num_frequency_bins=_FFT // 2 + 1,
            num_mel_filters=_BANDS,
            min_frequency=_LOWEST,
            max_frequency=SPEAKER_RATE / 2,
            sampling_rate=SPEAKER_RATE,
            mel_scale="kaldi",
            triangularize_in_mel_space=True,
        )
        self._filters = torch.from_numpy(filters).float()
        self._window = torch.from_numpy(window_function(_FRAME, "povey", periodic=False)).float()

    def __call__(self, samples: Tensor) -> Tensor:
        """float32 [samples] at 16 kHz, full scale 1 -> float32 [frames, 80], each band's mean over the frames
        subtracted. Samples at the end that fill no frame are left out; fewer than a frame's are an error of torch."""
        frames = samples.unfold(0, _FRAME, _HOP)
        frames = frames - frames.mean(1, keepdim=True)
        before = torch.cat([frames[:, :1], frames[:, :-1]], 1)
        spectrum = torch.fft.rfft((frames - _PREEMPHASIS * before) * self._window, _FFT)
        bands = torch.view_as_real(spectrum).square().sum(-1) @ self._filters
        features = bands.clamp(min=torch.finfo(torch.float32).eps).log()
        return features - features.mean(0)


class SpeakerEncoder:
    """Runs on the CPU. Vectors are kept for the next request with the same recording."""

    def __init__(self, session: Any) -> None:
        """``session`` is onnxruntime's."""
        self._session = session
        self._input = session.get_inputs()[0].name
        self._features = KaldiFeatures()
        self._kept: LastMade[NDArray[np.float32]] = LastMade(_KEPT_SPEAKERS)

    @classmethod
    def load(cls, file: Path, num_threads: int) -> SpeakerEncoder:
        """Raises ``StartupError`` that names the file where it is damaged or no model of this kind, or where
        onnxruntime is here and cannot be imported."""
        try:
            import onnxruntime
        except ImportError as error:
            raise StartupError(f"{file} needs onnxruntime, which is here and cannot be imported: {error}") from error

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # cores belong to other stages too
        try:
            session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
            encoder = cls(session)
            found = encoder._run(torch.zeros(_TRIAL_FRAMES, _BANDS))
        except Exception as error:  # onnxruntime's errors have no class in common
            raise StartupError(f"{file} is no model of speakers: {' '.join(str(error).split())}") from error
        if found.shape != (SPEAKER_SIZE,):
            raise StartupError(f"{file} is no model of speakers: it makes {found.size} numbers, not {SPEAKER_SIZE}")
        if not np.isfinite(found).all():
            raise StartupError(f"{file} is damaged: it makes numbers that are not finite")
        return encoder

    def vector(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """float32 [samples] at 16 kHz -> [192]. Raises ``InvalidRequest`` for a recording too short to tell a voice by,
        and ``NotFinite`` where a longer one makes no numbers."""
        return self._kept.get(samples, lambda: self.encoded(samples))

    def encoded(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """The same, without keeping it."""
        found = self._run(self._features(torch.as_tensor(samples))) if len(samples) >= _FRAME else None
        if found is not None and np.isfinite(found).all():
            return found
        if found is not None and len(samples) >= _FRAME + _TRIAL_FRAMES * _HOP:
            raise NotFinite("the numbers of the reference's speaker are")
        seconds = len(samples) / SPEAKER_RATE
        told = f"the reference lasts {seconds:.3f} s, too short to tell a voice by"
        raise InvalidRequest(told, "references[0].audio")

    def _run(self, features: Tensor) -> NDArray[np.float32]:
        found: NDArray[np.float32] = self._session.run(None, {self._input: features[None].numpy()})[0]
        return found.flatten()
