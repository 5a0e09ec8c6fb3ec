"""The factories of the demo voice's stages. This module imports no torch, so that preprocessing starts fast."""

from __future__ import annotations

from typing import Any

from sgl_omni.models.demo_voice.preprocess import SpeechPreprocessor
from sgl_omni.models.demo_voice.spec import VoiceSpec, resolve_folder
from sgl_omni.runtime.stage import EngineStage, FunctionStage, StreamStage


def create_preprocessing(model_path: str) -> FunctionStage:
    """Text to normalised pieces and engine options."""
    return FunctionStage(SpeechPreprocessor(VoiceSpec.load(resolve_folder(model_path))))


def create_engine(
    model_path: str,
    gpu_id: int | None = None,
    device: str = "cpu",
    engine: dict[str, Any] | None = None,
    max_running_requests: int = 16,
    group_rows: int = 8,
    num_threads: int = 1,
) -> EngineStage:
    """Pieces to codec frames.

    ``engine["max_running_requests"]``, where set, wins over the argument. One thread is the default: with
    two, a step takes 12 % less time but the vocoder's process loses the second core of a small machine.
    """
    from sgl_omni.models.demo_voice.engine import DemoVoiceEngine

    rows = (engine or {}).get("max_running_requests") or max_running_requests
    return EngineStage(
        DemoVoiceEngine.load(
            resolve_folder(model_path),
            device,
            max_running_requests=rows,
            group_rows=group_rows,
            num_threads=num_threads,
        )
    )


def create_vocoder(
    model_path: str, gpu_id: int | None = None, device: str = "cpu", num_threads: int = 1
) -> StreamStage[Any]:
    """Codec frames to audio, at the asked speed."""
    from sgl_omni.models.demo_voice.codec import CodecDecoder
    from sgl_omni.models.demo_voice.vocoder import DemoVocoder

    return DemoVocoder(CodecDecoder.load(resolve_folder(model_path), device), num_threads)
