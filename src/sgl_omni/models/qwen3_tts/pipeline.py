"""Qwen3-TTS as a pipeline: preprocessing -> tts_engine ==> vocoder. Imports no torch."""

from __future__ import annotations

from typing import Any, ClassVar

from sgl_omni.config.schema import PipelineConfig

_STAGES = "sgl_omni.models.qwen3_tts.stages"


class Qwen3TTSPipelineConfig(PipelineConfig):
    """Qwen3-TTS on one GPU: preprocessing and engine in one Process, the vocoder in its own.

    Prepared requests wait in the memory of the process that made them, so their edge cannot leave it.
    """

    runnable: ClassVar[bool] = False
    model_ids: ClassVar[tuple[str, ...]] = (
        "Qwen/Qwen3-TTS-12Hz-1.7B-Base",
        "Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice",
        "Qwen/Qwen3-TTS-12Hz-1.7B-VoiceDesign",
        "Qwen/Qwen3-TTS-12Hz-0.6B-Base",
        "Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice",
    )
    architectures: ClassVar[tuple[str, ...]] = ("Qwen3TTSForConditionalGeneration",)
    engine_stages: ClassVar[tuple[str, ...]] = ("tts_engine",)
    process_local_edges: ClassVar[tuple[tuple[str, str], ...]] = (("preprocessing", "tts_engine"),)
    default_stages: ClassVar[dict[str, dict[str, Any]]] = {
        "preprocessing": {
            "factory_path": f"{_STAGES}.create_preprocessing",
            "process": "pipeline",
            "next": "tts_engine",
        },
        "tts_engine": {
            "factory_path": f"{_STAGES}.create_engine",
            "process": "pipeline",
            "gpu": 0,
            "gpu_memory_fraction": 0.85,
            "next": "vocoder",
            "stream_to": ["vocoder"],
        },
        "vocoder": {
            "factory_path": f"{_STAGES}.create_vocoder",
            "process": "vocoder",
            "gpu": 0,
            "gpu_memory_fraction": 0.05,
            "terminal": True,
        },
    }
