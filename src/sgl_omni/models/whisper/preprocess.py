"""A file of audio to windows of log-mel features, and the caller's text to tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgl_omni.audio.decode import decode_audio
from sgl_omni.audio.windows import cut_at_quiet_places
from sgl_omni.errors import InvalidRequest, StartupError
from sgl_omni.models.whisper.spec import WhisperSpec
from sgl_omni.runtime.stage import Payload, Request
from sgl_omni.text.tokenizer import TextTokenizer

OPTIONS = ("task", "timestamps", "language", "temperature", "seed", "max_new_tokens")


class WhisperPreprocessor:
    """The stage's function. ``extractor`` is transformers' ``WhisperFeatureExtractor``."""

    def __init__(self, spec: WhisperSpec, extractor: Any, tokenizer: TextTokenizer, max_seconds: float) -> None:
        self._spec = spec
        self._extractor = extractor
        self._tokenizer = tokenizer
        self._max_seconds = max_seconds

    @classmethod
    def load(cls, folder: Path, max_seconds: float) -> WhisperPreprocessor:
        from transformers import WhisperFeatureExtractor

        try:
            extractor = WhisperFeatureExtractor.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, TypeError) as error:
            raise StartupError(f"{folder / 'preprocessor_config.json'} cannot be read: {error}") from error
        return cls(WhisperSpec.load(folder), extractor, TextTokenizer.load(folder), max_seconds)

    def __call__(self, payload: Payload, request: Request) -> Payload:
        audio = payload.get("audio")
        if not isinstance(audio, (bytes, memoryview)):
            raise InvalidRequest("the audio is missing", "file")
        rate = self._extractor.sampling_rate
        samples = decode_audio(audio, rate, param="file", max_seconds=self._max_seconds)
        windows = []
        for start, end in cut_at_quiet_places(samples, rate, self._extractor.chunk_length):
            if request.aborted:
                return {}
            features = self.features(samples[start:end])
            windows.append({"features": features, "start": start / rate, "end": end / rate})
        given = {key: payload[key] for key in OPTIONS if payload.get(key) is not None}
        return {**given, "windows": windows, "history": self._history(payload), "duration": len(samples) / rate}

    def features(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """Samples of one window -> log-mel [mels, frames], silence after their end."""
        found = self._extractor(samples, sampling_rate=self._extractor.sampling_rate, return_tensors="np")
        features: NDArray[np.float32] = found.input_features[0]
        return features

    def _history(self, payload: Payload) -> list[int]:
        """The caller's prompt, as if it had been said before the audio; times that it spells are left out."""
        prompt = payload.get("prompt") or ""
        if not prompt.strip():
            return []
        tokens = self._tokenizer.encode_plain(" " + prompt.strip())
        return [token for token in tokens if token < self._spec.eos_id][-self._spec.longest_history :]
