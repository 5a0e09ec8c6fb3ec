"""Recordings of a voice to what the talker takes of them: the speaker's embedding, and the codec's frames."""

from __future__ import annotations

from math import ceil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sgl_omni.audio.decode import decode_audio
from sgl_omni.audio.features import check_features
from sgl_omni.audio.kept import LastMade
from sgl_omni.engine.checkpoint import Checkpoint, Slot, read_config
from sgl_omni.errors import InvalidRequest, StartupError
from sgl_omni.models.qwen3_tts.codec import fill
from sgl_omni.models.qwen3_tts.codec_shapes import ENCODER_FACTS, SPEAKER_DEFAULTS
from sgl_omni.models.qwen3_tts.facts import LEAST_SECONDS, MOST_SECONDS, SPEECH_TOKENIZER
from sgl_omni.models.qwen3_tts.preprocess import Voice

_KEPT_VOICES = 64
_AUDIO = "references[0].audio"
_MEL_SIZE, _HOP, _MEL_BANDS = 1024, 256, 128


class SpeakerEncoder:
    """Samples to an embedding: log-mel frames through an ECAPA-TDNN, in float32."""

    def __init__(self, network: nn.Module, sample_rate: int, device: torch.device | str) -> None:
        from transformers.audio_utils import mel_filter_bank

        self.sample_rate = sample_rate
        self._network = network
        filters = mel_filter_bank(
            num_frequency_bins=_MEL_SIZE // 2 + 1,
            num_mel_filters=_MEL_BANDS,
            min_frequency=0.0,
            max_frequency=sample_rate / 2,
            sampling_rate=sample_rate,
            norm="slaney",
            mel_scale="slaney",
        )
        self._filters = torch.from_numpy(filters.T).float().to(device)
        self._window = torch.hann_window(_MEL_SIZE, device=device)

    @classmethod
    def load(cls, folder: Path, device: torch.device | str = "cpu") -> SpeakerEncoder:
        """Of a whole checkpoint. Raises ``StartupError`` where it has none."""
        from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import ECAPA_TimeDelayNet

        checkpoint = Checkpoint(folder)
        given = checkpoint.config().get("speaker_encoder_config")
        if not isinstance(given, dict):
            raise StartupError(f"{folder / 'config.json'} lacks the field speaker_encoder_config")
        config: Any = SimpleNamespace(**{**SPEAKER_DEFAULTS, **given})
        network = ECAPA_TimeDelayNet(config).eval().requires_grad_(False)
        fill(network, checkpoint, "speaker_encoder.")  # before any of the device's memory is taken
        return cls(network.to(device), config.sample_rate, device)

    @torch.inference_mode()
    def __call__(self, samples: Tensor) -> Tensor:
        """float32 [samples] at ``sample_rate`` -> [hidden]."""
        found: Tensor = self._network(self._mel(samples).T[None])[0]
        return found

    def _mel(self, samples: Tensor) -> Tensor:
        """[bands, frames]."""
        edge = (_MEL_SIZE - _HOP) // 2
        padded = F.pad(samples[None], (edge, edge), mode="reflect")[0]
        bins = torch.stft(padded, _MEL_SIZE, _HOP, window=self._window, center=False, return_complex=True)
        magnitudes = (torch.view_as_real(bins).square().sum(-1) + 1e-9).sqrt()
        return (self._filters @ magnitudes).clamp(min=1e-5).log()


class CodecEncoder:
    """Samples to frames of codes: Mimi's encoder, of whose codes the first are used."""

    def __init__(self, model: Any, num_codes: int, sample_rate: int, samples_per_frame: int) -> None:
        self.sample_rate = sample_rate
        self._model = model
        # The last part before the nearest codes are looked for, which happens within transformers.
        for name, module in model.named_modules():
            if name.rpartition(".")[2] == "downsample":
                module.register_forward_hook(lambda module, given, found: check_features(found))
        self._num_codes = num_codes
        self._samples_per_frame = samples_per_frame

    @classmethod
    def load(cls, folder: Path) -> CodecEncoder:
        """Of a speech tokenizer's folder. Raises ``StartupError`` where its config lacks a field."""
        from transformers import MimiConfig, MimiModel

        config = read_config(folder)
        try:
            model: Any = MimiModel(MimiConfig(**config["encoder_config"]))
            facts = [config[key] for key in ENCODER_FACTS]
        except KeyError as error:
            raise StartupError(f"{folder / 'config.json'} lacks the field {error.args[0]}") from error
        for name in ("decoder", "decoder_transformer", "upsample"):
            if name in dict(model.named_children()):
                delattr(model, name)
        model = model.eval().requires_grad_(False)
        tensors = model.state_dict()
        slots = [Slot(f"encoder.{name_on_disk(n)}", tensor, tuple(tensor.shape)) for n, tensor in tensors.items()]
        Checkpoint(folder).load(slots, prefix="encoder.")
        return cls(model, *facts)

    def to(self, device: torch.device | str) -> CodecEncoder:
        self._model.to(device)
        return self

    @torch.inference_mode()
    def __call__(self, samples: Tensor) -> Tensor:
        """float32 [samples] at ``sample_rate`` -> int64 [frames, num_codes]."""
        codes: Tensor = self._model.encode(samples[None, None], num_quantizers=self._num_codes).audio_codes[0]
        return codes[:, : ceil(len(samples) / self._samples_per_frame)].T


def name_on_disk(name: str) -> str:
    """Newer transformers hold the parts of Mimi's encoder below one module, checkpoints beside each other."""
    for part, on_disk in (("encoder_seanet", "encoder"), ("encoder_transformer",) * 2, ("downsample",) * 2):
        if name.startswith(f"encoder.{part}."):
            return on_disk + name.removeprefix(f"encoder.{part}")
    return name


class References:
    """Implements ``preprocess.VoiceReader``. What was taken of a recording is kept for the next request with it."""

    def __init__(self, speaker: SpeakerEncoder, codec: CodecEncoder, device: torch.device | str) -> None:
        self._speaker = speaker
        self._codec = codec
        self._device = device
        self._kept: LastMade[Voice] = LastMade(_KEPT_VOICES)

    @classmethod
    def load(cls, folder: Path, device: torch.device | str = "cpu") -> References:
        codec = CodecEncoder.load(folder / SPEECH_TOKENIZER)  # on the host, before the other takes the device's memory
        return cls(SpeakerEncoder.load(folder, device), codec.to(device), device)

    def read(self, audio: bytes | memoryview, *, with_codes: bool) -> Voice:
        return self._kept.get(audio, lambda: self.encoded(audio, with_codes), kind=with_codes)

    def encoded(self, audio: bytes | memoryview, with_codes: bool) -> Voice:
        """What ``read`` returns, without keeping it."""
        speaker = self._speaker(self._samples(audio, self._speaker.sample_rate)).float().cpu().numpy()
        if not with_codes:
            return Voice(speaker, None)
        codes = self._codec(self._samples(audio, self._codec.sample_rate))
        return Voice(speaker, codes.cpu().numpy().astype(np.int16))

    def _samples(self, audio: bytes | memoryview, rate: int) -> Tensor:
        samples = decode_audio(audio, rate, param=_AUDIO, max_seconds=MOST_SECONDS)
        if len(samples) < LEAST_SECONDS * rate:
            raise InvalidRequest(
                f"the recording lasts {len(samples) / rate:.2f} s; at least {LEAST_SECONDS} s are needed", _AUDIO
            )
        return torch.from_numpy(samples).to(self._device)
