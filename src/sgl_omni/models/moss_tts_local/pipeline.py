"""MOSS-TTS-Local as a pipeline: preprocessing -> tts_engine ==> vocoder. Imports no torch."""

from __future__ import annotations

from typing import Any, ClassVar

from sgl_omni.config.schema import PipelineConfig
from sgl_omni.config.tasks import SpeechTask, Tasks
from sgl_omni.models.moss_tts_local.files import ARCHITECTURE, MAX_REFERENCE_SECONDS, checked
from sgl_omni.models.moss_tts_local.languages import CHOICES

_STAGES = "sgl_omni.models.moss_tts_local.stages"


class MossTTSLocalPipelineConfig(PipelineConfig):
    """MOSS-TTS-Local on one GPU: preprocessing on the host, the engine in `pipeline`, and the vocoder."""

    model_ids: ClassVar[tuple[str, ...]] = (
        "OpenMOSS-Team/MOSS-TTS-Local-Transformer-v1.5",
        "OpenMOSS-Team/MOSS-TTS-Local-Transformer",
    )
    architectures: ClassVar[tuple[str, ...]] = (ARCHITECTURE,)
    shareable_architectures: ClassVar[tuple[str, ...]] = (ARCHITECTURE,)
    engine_stages: ClassVar[tuple[str, ...]] = ("tts_engine",)
    process_local_edges: ClassVar[tuple[tuple[str, str], ...]] = ()
    default_stages: ClassVar[dict[str, dict[str, Any]]] = {
        "preprocessing": {
            "factory_path": f"{_STAGES}.create_preprocessing",
            "process": "preprocessing",
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
        """Raises ``InvalidRequest`` that names the file or field where the checkpoint lacks something."""
        config = checked(model_path)
        return Tasks(
            speech=SpeechTask(
                voices=(),
                default_voice=None,
                sample_rate=config["sampling_rate"],
                max_references=1,
                max_reference_seconds=MAX_REFERENCE_SECONDS,
                takes_instructions=True,
                languages=CHOICES,
            )
        )
