"""The demo voice as a pipeline: preprocessing -> tts_engine -> vocoder. Imports no torch."""

from __future__ import annotations

from typing import Any, ClassVar

from sgl_omni.config.schema import PipelineConfig
from sgl_omni.config.tasks import SpeechTask, Tasks
from sgl_omni.models.demo_voice.spec import MODEL_ID, CodecSpec, VoiceSpec, codec_shapes, resolve_folder, tensor_shapes
from sgl_omni.models.folder import check_architecture, check_tensors, read_json

_STAGES = "sgl_omni.models.demo_voice.stages"


class DemoVoicePipelineConfig(PipelineConfig):
    """A small English text-to-speech model that ships with the package and runs on a laptop."""

    model_ids: ClassVar[tuple[str, ...]] = (MODEL_ID,)
    architectures: ClassVar[tuple[str, ...]] = ("DemoVoiceForConditionalGeneration",)
    shareable_architectures: ClassVar[tuple[str, ...]] = ("DemoVoiceForConditionalGeneration",)
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
            "process": "tts_engine",
            "gpu": 0,
            "gpu_memory_fraction": 0.30,
            "next": "vocoder",
            "stream_to": ["vocoder"],
            "engine": {"max_running_requests": 16},
        },
        "vocoder": {
            "factory_path": f"{_STAGES}.create_vocoder",
            "process": "vocoder",
            "gpu": 0,
            "gpu_memory_fraction": 0.15,
            "terminal": True,
        },
    }

    @classmethod
    def resolve_model_path(cls, model_path: str) -> str:
        """The packaged weights for ``demo-voice``; a folder for itself. Raises ``InvalidRequest`` otherwise."""
        return str(resolve_folder(model_path))

    @classmethod
    def tasks(cls, model_path: str) -> Tasks:
        """Raises ``InvalidRequest`` that names the file, field or tensor that is missing or does not fit."""
        folder = resolve_folder(model_path)
        config, spec = read_json(folder), VoiceSpec.load(folder)
        check_architecture(config, folder / "config.json", cls.architectures)
        codec = CodecSpec.load(folder)
        check_tensors(folder, lambda: tensor_shapes(spec, config), ignore=())
        check_tensors(
            folder / "codec", lambda: codec_shapes(codec), parts=["quantizer.codebooks", "decoder."], ignore=()
        )
        return Tasks(
            speech=SpeechTask(voices=spec.voices, default_voice=spec.default_voice, sample_rate=spec.sample_rate)
        )
