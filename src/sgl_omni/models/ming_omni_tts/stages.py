"""The factories of Ming-Omni-TTS's stages. Their signatures are what planning checks; they do not run yet."""

from __future__ import annotations

from typing import Any

from sgl_omni.models.ming_omni_tts.pipeline import MingOmniTTSPipelineConfig
from sgl_omni.runtime.stage import EngineStage, FunctionStage, Stage

_not_yet = MingOmniTTSPipelineConfig.not_runnable


def create_preprocessing(model_path: str) -> FunctionStage:
    """Text, style and reference audio to prompt tokens and samples, on the host."""
    raise _not_yet()


def create_reference_encoder(model_path: str, gpu_id: int | None = None, device: str = "cpu") -> Stage:
    """Reference audio to the speaker's embedding and the latents of the prompt."""
    raise _not_yet()


def create_engine(
    model_path: str, gpu_id: int | None = None, device: str = "cpu", engine: dict[str, Any] | None = None
) -> EngineStage:
    """Prompt to latent patches and, patch by patch, to audio."""
    raise _not_yet()
