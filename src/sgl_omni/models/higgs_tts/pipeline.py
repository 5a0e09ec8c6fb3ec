"""Higgs TTS 3 and Higgs Audio v2: preprocessing -> audio_encoder -> tts_engine ==> vocoder. Imports no torch."""

from __future__ import annotations

from typing import Any, ClassVar

from sgl_omni.config.schema import PipelineConfig
from sgl_omni.config.tasks import SpeechTask, Tasks

_STAGES = "sgl_omni.models.higgs_tts.stages"


class HiggsTtsPipelineConfig(PipelineConfig):
    """Higgs TTS on one GPU: a front-end Process, the engine in `pipeline`, and the vocoder."""

    model_ids: ClassVar[tuple[str, ...]] = (
        "bosonai/higgs-tts-3-4b",
        "bosonai/higgs-audio-v3-tts-4b",
        "bosonai/higgs-tts-2-3b-base",
        "bosonai/higgs-audio-v2-generation-3B-base",
    )
    architectures: ClassVar[tuple[str, ...]] = (
        "HiggsMultimodalQwen3ForConditionalGeneration",
        "HiggsAudioV2ForConditionalGeneration",
    )
    shareable_architectures: ClassVar[tuple[str, ...]] = architectures
    engine_stages: ClassVar[tuple[str, ...]] = ("tts_engine",)
    default_stages: ClassVar[dict[str, dict[str, Any]]] = {
        "preprocessing": {
            "factory_path": f"{_STAGES}.create_preprocessing",
            "process": "tts_frontend",
            "next": "audio_encoder",
        },
        "audio_encoder": {
            "factory_path": f"{_STAGES}.create_audio_encoder",
            "process": "tts_frontend",
            "gpu": 0,
            "gpu_memory_fraction": 0.05,
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

    @classmethod
    def tasks(cls, model_path: str) -> Tasks:
        from sgl_omni.models.higgs_tts.checkpoint import MAX_REFERENCE_SECONDS, HiggsCheckpoint
        from sgl_omni.models.higgs_tts.stages import max_references

        checkpoint = HiggsCheckpoint.load(model_path)
        checkpoint.check_tensors()
        checkpoint.check_tokens()
        return Tasks(
            speech=SpeechTask(
                voices=(),
                default_voice=None,
                sample_rate=checkpoint.codec.sample_rate,
                max_references=max_references(checkpoint),
                max_reference_seconds=MAX_REFERENCE_SECONDS,
                takes_instructions=checkpoint.is_v2,
            )
        )
