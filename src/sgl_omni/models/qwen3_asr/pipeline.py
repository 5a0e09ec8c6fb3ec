"""Qwen3-ASR as a pipeline: preprocessing -> audio_encoder -> asr_engine ==> text. Imports no torch."""

from __future__ import annotations

from itertools import chain
from typing import Any, ClassVar

from sgl_omni.config.schema import PipelineConfig
from sgl_omni.config.tasks import Tasks, TranscriptionTask
from sgl_omni.engine.decoder_config import DecoderConfig
from sgl_omni.engine.headers import FLOATS
from sgl_omni.engine.shapes import causal_shapes
from sgl_omni.models.folder import check_tensors, check_weights, read_json
from sgl_omni.models.qwen3_asr.spec import ARCHITECTURE, AsrSpec
from sgl_omni.models.qwen3_omni.tower_shapes import COMPUTED, audio_shapes
from sgl_omni.models.tokens import check_tokens

_STAGES = "sgl_omni.models.qwen3_asr.stages"

MAX_SECONDS = 2 * 3600.0
"""Mel frames of two hours are 0.4 GB of host memory, which is enough for one request."""


class Qwen3AsrPipelineConfig(PipelineConfig):
    """Qwen3-ASR: speech in 30 languages to text, with names and terms as context."""

    model_ids: ClassVar[tuple[str, ...]] = (
        "Qwen/Qwen3-ASR-0.6B",
        "Qwen/Qwen3-ASR-1.7B",
        "Qwen/Qwen3-ASR-0.6B-hf",
        "Qwen/Qwen3-ASR-1.7B-hf",
    )
    architectures: ClassVar[tuple[str, ...]] = (ARCHITECTURE,)
    shareable_architectures: ClassVar[tuple[str, ...]] = (ARCHITECTURE,)
    engine_stages: ClassVar[tuple[str, ...]] = ("asr_engine",)
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
            "gpu_memory_fraction": 0.1,
            "next": "asr_engine",
        },
        "asr_engine": {
            "factory_path": f"{_STAGES}.create_engine",
            "process": "asr",
            "gpu": 0,
            "gpu_memory_fraction": 0.4,
            "next": "text",
            "stream_to": ["text"],
        },
        "text": {
            "factory_path": f"{_STAGES}.create_text",
            "process": "text",
            "terminal": True,
        },
    }

    @classmethod
    def tasks(cls, model_path: str) -> Tasks:
        """Raises ``InvalidRequest`` that names what the folder lacks."""
        from sgl_omni.models.qwen3_asr.prompt import SPECIALS  # here, as it imports numpy

        spec = AsrSpec.load(model_path)
        check_tensors(
            spec.folder,
            lambda: chain(
                causal_shapes(DecoderConfig.parse({**spec.text, "model_type": "qwen3"}), spec.layout.decoder, None),
                audio_shapes(spec.audio, spec.layout.tower, spec.layout.elsewhere),
            ),
            parts=[spec.layout.tower],
            ignore=[*COMPUTED, f"{spec.layout.head}.weight"],
            entries=check_weights(spec.folder, FLOATS),
        )
        at = spec.layout.config
        audio = {f"{at}audio_token_id": "<|audio_pad|>"}
        check_tokens(spec.folder, read_json(spec.folder), f"{at}text_config.vocab_size", SPECIALS, audio)
        return Tasks(transcription=TranscriptionTask(languages=tuple(spec.languages), max_seconds=MAX_SECONDS))
