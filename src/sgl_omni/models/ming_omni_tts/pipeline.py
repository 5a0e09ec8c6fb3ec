"""Ming-Omni-TTS as a pipeline: preprocessing -> reference_encoder -> tts_engine ==> vocoder. Imports no torch.

All edges carry plain payloads (fields of the request; samples and latents as arrays), so each stage may run in a
process of its own.
"""

from __future__ import annotations

from typing import Any, ClassVar

from sgl_omni.config.schema import PipelineConfig
from sgl_omni.config.tasks import SpeechTask, Tasks
from sgl_omni.models.folder import find_folder
from sgl_omni.models.ming_omni_tts.files import ARCHITECTURE, MAX_REFERENCE_SECONDS, checked, why_no_speakers

_STAGES = "sgl_omni.models.ming_omni_tts.stages"


class MingOmniTTSPipelineConfig(PipelineConfig):
    """Ming-Omni-TTS on one GPU: four stages, each in its own Process."""

    model_ids: ClassVar[tuple[str, ...]] = ("inclusionAI/Ming-omni-tts-0.5B", "inclusionAI/Ming-omni-tts-16.8B-A3B")
    architectures: ClassVar[tuple[str, ...]] = (ARCHITECTURE,)
    shareable_architectures: ClassVar[tuple[str, ...]] = (ARCHITECTURE,)
    engine_stages: ClassVar[tuple[str, ...]] = ("tts_engine",)
    process_local_edges: ClassVar[tuple[tuple[str, str], ...]] = ()
    default_stages: ClassVar[dict[str, dict[str, Any]]] = {
        "preprocessing": {
            "factory_path": f"{_STAGES}.create_preprocessing",
            "process": "preprocessing",
            "next": "reference_encoder",
        },
        "reference_encoder": {
            "factory_path": f"{_STAGES}.create_reference_encoder",
            "process": "reference_encoder",
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
        """Raises ``InvalidRequest`` that names the file or field where the checkpoint lacks something."""
        config = checked(model_path)
        return Tasks(
            speech=SpeechTask(
                voices=(),
                default_voice=None,
                sample_rate=config["audio_tokenizer_config"]["sample_rate"],
                max_references=1,
                takes_instructions=True,
                max_reference_seconds=MAX_REFERENCE_SECONDS,
                needs_reference_text=why_no_speakers(find_folder(model_path)) is not None,
            )
        )
