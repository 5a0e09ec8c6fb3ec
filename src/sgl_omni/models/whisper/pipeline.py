"""Whisper as a pipeline: preprocessing -> audio_encoder -> asr_engine ==> text. Imports no torch."""

from __future__ import annotations

from typing import Any, ClassVar

from sgl_omni.config.schema import PipelineConfig
from sgl_omni.config.tasks import Tasks, TranscriptionTask
from sgl_omni.models.whisper.spec import ARCHITECTURE, WhisperSpec, check_vocabulary, resolve_folder

_STAGES = "sgl_omni.models.whisper.stages"
_SIZES = ("tiny", "tiny.en", "base", "base.en", "small", "small.en", "medium", "medium.en")
_LARGE = ("large", "large-v2", "large-v3", "large-v3-turbo")

MAX_SECONDS = 2 * 3600.0
"""The states of two hours are 0.9 GB of host memory for the largest model, which is enough for one request."""


class WhisperPipelineConfig(PipelineConfig):
    """Whisper: speech in up to 99 languages to text, and to English text."""

    model_ids: ClassVar[tuple[str, ...]] = tuple(f"openai/whisper-{size}" for size in (*_SIZES, *_LARGE))
    architectures: ClassVar[tuple[str, ...]] = (ARCHITECTURE,)
    shareable_architectures: ClassVar[tuple[str, ...]] = (ARCHITECTURE,)
    engine_stages: ClassVar[tuple[str, ...]] = ("asr_engine",)
    process_local_edges: ClassVar[tuple[tuple[str, str], ...]] = ()
    default_stages: ClassVar[dict[str, dict[str, Any]]] = {
        "preprocessing": {
            "factory_path": f"{_STAGES}.create_preprocessing",
            "process": "preprocessing",
            "next": "audio_encoder",
        },
        "audio_encoder": {
            "factory_path": f"{_STAGES}.create_audio_encoder",
            "process": "asr",
            "gpu": 0,
            "gpu_memory_fraction": 0.05,
            "next": "asr_engine",
        },
        "asr_engine": {
            "factory_path": f"{_STAGES}.create_engine",
            "process": "asr",
            "gpu": 0,
            "gpu_memory_fraction": 0.25,
            "next": "text",
            "stream_to": ["text"],
            "engine": {"max_running_requests": 16},
        },
        "text": {
            "factory_path": f"{_STAGES}.create_text",
            "process": "text",
            "terminal": True,
        },
    }

    @classmethod
    def tasks(cls, model_path: str) -> Tasks:
        folder = resolve_folder(model_path)
        spec = WhisperSpec.load(folder)
        check_vocabulary(folder, spec)
        return Tasks(
            transcription=TranscriptionTask(
                languages=spec.codes,
                translates="translate" in spec.tasks,
                timestamps=True,
                max_seconds=MAX_SECONDS,
            )
        )
