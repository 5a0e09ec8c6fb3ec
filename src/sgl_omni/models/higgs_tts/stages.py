"""The factories of Higgs TTS's stages. Their signatures are what planning checks; they do not run yet."""

from __future__ import annotations

from typing import Any

from sgl_omni.models.higgs_tts.pipeline import HiggsTtsPipelineConfig
from sgl_omni.runtime.stage import EngineStage, FunctionStage, Stage

_not_yet = HiggsTtsPipelineConfig.not_runnable


def create_preprocessing(model_path: str) -> FunctionStage:
    """Text and reference audio to prompt tokens and samples, on the host."""
    raise _not_yet()


def create_audio_encoder(model_path: str, gpu_id: int | None = None, device: str = "cpu") -> Stage:
    """A reference voice to codec frames."""
    raise _not_yet()


def create_engine(
    model_path: str, gpu_id: int | None = None, device: str = "cpu", engine: dict[str, Any] | None = None
) -> EngineStage:
    """Prompt to codec frames of eight codebooks, each delayed by one frame more than the one before."""
    raise _not_yet()


def create_vocoder(model_path: str, gpu_id: int | None = None, device: str = "cpu") -> Stage:
    """Codec frames to audio."""
    raise _not_yet()
