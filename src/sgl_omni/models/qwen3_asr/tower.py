"""The audio tower, which is Qwen3-Omni's: mel frames of windows to rows of their prompts."""

from __future__ import annotations

import torch

from sgl_omni.models.qwen3_asr.spec import AsrSpec
from sgl_omni.models.qwen3_omni.loading import load_part
from sgl_omni.models.qwen3_omni.towers import AudioEncoder
from sgl_omni.runtime.stage import Payload

_SHAPE = (
    "activation_function",
    "conv_chunksize",
    "d_model",
    "downsample_hidden_size",
    "encoder_attention_heads",
    "encoder_ffn_dim",
    "encoder_layers",
    "max_source_positions",
    "n_window",
    "n_window_infer",
    "num_mel_bins",
    "output_dim",
)


class WindowEncoder:
    """The stage's function: ``mels`` of each payload become ``embeddings`` [rows of all its windows, hidden]."""

    def __init__(self, encoder: AudioEncoder) -> None:
        self._encoder = encoder

    @classmethod
    def load(cls, spec: AsrSpec, device: str, dtype: torch.dtype, max_frames: int) -> WindowEncoder:
        """``max_frames`` of several windows in one pass. Raises ``CheckpointError`` that names tensors."""
        from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeAudioEncoderConfig
        from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder

        config = Qwen3OmniMoeAudioEncoderConfig(**{key: spec.audio[key] for key in _SHAPE if key in spec.audio})
        layout = spec.layout
        tower = load_part(
            Qwen3OmniMoeAudioEncoder, config, spec.folder, layout.tower, device, dtype, elsewhere=layout.elsewhere
        )
        return cls(AudioEncoder(tower, device, dtype, max_frames, whole_chunks=True))

    def rehearse(self) -> None:
        self._encoder.rehearse()

    def __call__(self, payloads: list[Payload]) -> list[Payload]:
        encoded = self._encoder(payloads)
        return [
            {**{key: value for key, value in payload.items() if key not in ("mels", "mel_lengths")}, **made}
            for payload, made in zip(payloads, encoded, strict=True)
        ]
