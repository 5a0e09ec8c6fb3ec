"""Whisper's audio encoder: transformers' own layers with the encoder's part of a checkpoint in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sgl_omni.engine.checkpoint import Checkpoint, Slot
from sgl_omni.engine.weights import OwnWeights, load_module
from sgl_omni.runtime.stage import Payload, Request


class WhisperEncoder:
    """Log-mel spectrograms to states, one window at a time."""

    def __init__(self, model: Any, device: torch.device, dtype: torch.dtype) -> None:
        self._model = model
        self._device = device
        self._dtype = dtype

    @classmethod
    def load(
        cls, folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> WhisperEncoder:
        """Reads the encoder of a checkpoint, and not its decoder."""
        from transformers import WhisperConfig
        from transformers.models.whisper.modeling_whisper import WhisperEncoder as Model

        checkpoint = Checkpoint(folder)
        config = WhisperConfig.from_dict(checkpoint.config())
        config._attn_implementation = "sdpa"
        with torch.device("meta"):
            model = Model(config).eval()
        prefix = "model.encoder."
        load_module(
            model,
            OwnWeights(),
            lambda: checkpoint.load(
                [Slot(prefix + name, value, tuple(value.shape)) for name, value in model.named_parameters()],
                prefix=prefix,
            ),
            device=device,
            dtype=dtype,
            policy=None,
            fingerprint=checkpoint.fingerprint(),
        )
        return cls(model, torch.device(device), dtype)

    @torch.inference_mode()
    def encode(self, features: NDArray[np.float32]) -> Tensor:
        """features [mels, frames] -> states [frames / 2, width] in host memory, of the encoder's type."""
        mel = torch.from_numpy(np.ascontiguousarray(features)).to(self._device, self._dtype)
        states: Tensor = self._model(mel[None]).last_hidden_state[0]
        return states.cpu()

    def rehearse(self) -> None:
        """One window, which all are as long as."""
        config = self._model.config
        self.encode(np.zeros((config.num_mel_bins, 2 * config.max_source_positions), np.float32))


class WindowEncoding:
    """The stage's function: the windows of one request, one after another.

    A window is 1500 rows, enough for a GPU to be busy with, so windows are not batched: requests take turns instead,
    and a short one need not wait until the hours of another are through. States wait in host memory for their turn.
    """

    def __init__(self, encoder: WhisperEncoder) -> None:
        self._encoder = encoder

    def __call__(self, payload: Payload, request: Request) -> Payload:
        """Each window's ``features`` become ``encoder_states``; the rest stays."""
        windows = []
        for window in payload["windows"]:
            if request.aborted:
                return {}
            states = self._encoder.encode(window["features"])
            windows.append({"start": window["start"], "end": window["end"], "encoder_states": states})
        return {**payload, "windows": windows}
