"""A file of audio to windows: mel frames for the tower and a prompt for the decoder each. Imports no torch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgl_omni.audio.decode import decode_audio
from sgl_omni.audio.windows import cut_at_quiet_places
from sgl_omni.errors import InvalidRequest, StartupError
from sgl_omni.models.qwen3_asr.prompt import PromptWriter
from sgl_omni.models.qwen3_asr.spec import AsrSpec
from sgl_omni.models.qwen3_omni.positions import audio_tokens
from sgl_omni.models.qwen3_omni.preprocess import EncoderInput
from sgl_omni.runtime.stage import Payload, Request
from sgl_omni.text.tokenizer import TextTokenizer

OPTIONS = ("language", "temperature", "seed", "max_new_tokens")

_LEAST_SECONDS = 0.5
"""What is shorter is filled up with silence, as in training."""


class Preprocessor:
    """``__call__`` is the stage's function.

    It makes ``mels`` float32 [bins, frames] and ``mel_lengths`` int64 [windows]; ``windows``, each with ``prompt_ids``
    int64 [length], ``audio_from``, ``tags`` int64 [rows of audio], ``start`` and ``end`` in seconds; ``context_tokens``
    of the caller's prompt, ``duration``, and the request's options.
    """

    def __init__(self, spec: AsrSpec, *, window_seconds: float, max_seconds: float) -> None:
        """Raises ``StartupError`` for a tokenizer that is not this model's."""
        from transformers import WhisperFeatureExtractor

        if window_seconds < 1:
            raise StartupError(f"window_seconds is {window_seconds:g}; a window has at least 1 s")
        tokenizer = TextTokenizer.load(spec.folder)
        self._spec = spec
        self._extractor = WhisperFeatureExtractor(**spec.mel)
        self._prompts = PromptWriter(tokenizer, spec.audio_id)
        self._window_seconds = window_seconds
        self._max_seconds = max_seconds

    def __call__(self, payload: Payload, request: Request) -> Payload:
        audio = payload.get("audio")
        if not isinstance(audio, (bytes, memoryview)):
            raise InvalidRequest("the audio is missing", "file")
        rate = int(self._extractor.sampling_rate)
        samples = decode_audio(audio, rate, param="file", max_seconds=self._max_seconds)
        context = self._prompts.context(payload.get("prompt") or "")
        language = self._language(payload)
        mels, windows = [], []
        for start, end in cut_at_quiet_places(samples, rate, self._window_seconds):
            if request.aborted:
                return {}
            heard = self.mel(samples[start:end])
            rows = audio_tokens(heard.shape[1], self._spec.window)
            prompt = self._prompts.write(context, rows, language)
            medium = EncoderInput()
            medium.note(rows, heard)
            mels.append(heard)
            windows.append(
                {
                    "prompt_ids": prompt.ids,
                    "audio_from": prompt.audio_from,
                    "tags": medium.tags,
                    "start": start / rate,
                    "end": end / rate,
                }
            )
        return {
            **{key: payload[key] for key in OPTIONS if payload.get(key) is not None},
            "mels": np.concatenate(mels, 1),
            "mel_lengths": np.asarray([mel.shape[1] for mel in mels], dtype=np.int64),
            "windows": windows,
            "context_tokens": len(context),
            "duration": len(samples) / rate,
        }

    def mel(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """Samples of one window -> log-mel [bins, frames]."""
        extractor: Any = self._extractor
        least = round(_LEAST_SECONDS * extractor.sampling_rate)
        filled = np.pad(samples, (0, max(0, least - len(samples))))
        made = extractor(
            filled, sampling_rate=extractor.sampling_rate, padding=True, truncation=False, return_attention_mask=True
        )
        known = np.asarray(made["attention_mask"][0], dtype=bool)
        frames: NDArray[np.float32] = np.asarray(made["input_features"][0], dtype=np.float32)[:, known]
        return frames

    def _language(self, payload: Payload) -> str | None:
        code, known = payload.get("language"), self._spec.languages
        if code is not None and code not in known:
            raise InvalidRequest(f"language {code!r} is not one of {', '.join(known)}", "language")
        return None if code is None else known[code]
