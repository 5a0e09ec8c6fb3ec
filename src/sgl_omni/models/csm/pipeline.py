"""CSM as a pipeline: preprocessing -> tts_engine ==> vocoder. Imports no torch."""

from __future__ import annotations

from typing import Any, ClassVar

from sgl_omni.config.schema import PipelineConfig
from sgl_omni.config.tasks import SpeechTask, Tasks
from sgl_omni.models.csm.files import ARCHITECTURE, MAX_REFERENCE_SECONDS, MAX_REFERENCES, SPEAKERS, checked

_STAGES = "sgl_omni.models.csm.stages"


class CsmPipelineConfig(PipelineConfig):
    """CSM on one GPU: preprocessing on the host, engine and vocoder each in a Process of its own."""

    model_ids: ClassVar[tuple[str, ...]] = ("sesame/csm-1b",)
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
                voices=SPEAKERS,
                default_voice=SPEAKERS[0],
                sample_rate=config["codec_config"].get("sampling_rate", 24000),
                max_references=MAX_REFERENCES,
                max_reference_seconds=MAX_REFERENCE_SECONDS,
                needs_reference_text=True,
            )
        )
