"""The factories of Qwen3-TTS's stages. Their signatures are what planning checks; they do not run yet."""

from __future__ import annotations

from typing import Any

from sgl_omni.models.qwen3_tts.pipeline import Qwen3TTSPipelineConfig
from sgl_omni.runtime.stage import EngineStage, Stage

_not_yet = Qwen3TTSPipelineConfig.not_runnable


def create_preprocessing(model_path: str, gpu_id: int | None = None, device: str = "cpu") -> Stage:
    """Text, a voice and its instruction to a prepared request, kept for the engine of the same process."""
    raise _not_yet()


def create_engine(
    model_path: str, gpu_id: int | None = None, device: str = "cpu", engine: dict[str, Any] | None = None
) -> EngineStage:
    """A prepared request to codec frames: the talker and its code predictor."""
    raise _not_yet()


def create_vocoder(model_path: str, gpu_id: int | None = None, device: str = "cpu") -> Stage:
    """Codec frames to audio."""
    raise _not_yet()
