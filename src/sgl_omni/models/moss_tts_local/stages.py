"""The factories of MOSS-TTS-Local's stages. Their signatures are what planning checks; they do not run yet."""

from __future__ import annotations

from typing import Any

from sgl_omni.models.moss_tts_local.pipeline import MossTTSLocalPipelineConfig
from sgl_omni.runtime.stage import EngineStage, Stage

_not_yet = MossTTSLocalPipelineConfig.not_runnable


def create_preprocessing(model_path: str, gpu_id: int | None = None, device: str = "cpu") -> Stage:
    """Text to prompt tokens, a reference voice to codec frames; on the host, or on a GPU where one is given."""
    raise _not_yet()


def create_engine(
    model_path: str, gpu_id: int | None = None, device: str = "cpu", engine: dict[str, Any] | None = None
) -> EngineStage:
    """Prompt to codec frames: a temporal transformer per frame, a local one over its codebooks."""
    raise _not_yet()


def create_vocoder(model_path: str, gpu_id: int | None = None, device: str = "cpu") -> Stage:
    """Codec frames to audio."""
    raise _not_yet()
