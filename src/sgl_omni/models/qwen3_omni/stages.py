"""The factories of Qwen3-Omni's stages. Their signatures are what planning checks; they do not run yet."""

from __future__ import annotations

from typing import Any

from sgl_omni.models.qwen3_omni.pipeline import Qwen3OmniSpeechPipelineConfig
from sgl_omni.runtime.stage import EngineStage, FunctionStage, Payload, Stage

_not_yet = Qwen3OmniSpeechPipelineConfig.not_runnable


def create_preprocessing(model_path: str) -> FunctionStage:
    """A conversation to prompt tokens, pixel patches and mel frames, on the host."""
    raise _not_yet()


def create_image_encoder(model_path: str, gpu_id: int | None = None, device: str = "cpu") -> Stage:
    """Pixel patches of images and video frames to embeddings."""
    raise _not_yet()


def create_audio_encoder(model_path: str, gpu_id: int | None = None, device: str = "cpu") -> Stage:
    """Mel frames to embeddings."""
    raise _not_yet()


def create_thinker(
    model_path: str,
    gpu_id: int | None = None,
    device: str = "cpu",
    engine: dict[str, Any] | None = None,
    tp_rank: int = 0,
    tp_size: int = 1,
    nccl_port: int | None = None,
) -> EngineStage:
    """The mixture-of-experts language model: prompt and embeddings to text tokens and hidden states."""
    raise _not_yet()


def create_decode(model_path: str) -> Stage:
    """Text tokens to text, on the host."""
    raise _not_yet()


def create_talker(
    model_path: str, gpu_id: int | None = None, device: str = "cpu", engine: dict[str, Any] | None = None
) -> EngineStage:
    """The thinker's hidden states, as they come, to codec frames."""
    raise _not_yet()


def create_code2wav(model_path: str, gpu_id: int | None = None, device: str = "cpu") -> Stage:
    """Codec frames to audio."""
    raise _not_yet()


def route_to_encoders(payload: Payload) -> list[str]:
    """The encoders whose input a request has, and the thinker."""
    raise _not_yet()


def merge_embeddings(inputs: dict[str, Payload]) -> Payload:
    """The prompt of the thinker with the encoders' embeddings in their places."""
    raise _not_yet()
