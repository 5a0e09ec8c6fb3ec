"""frontend -> tts_engine ==> collector -> vocoder, laid out as Higgs TTS is. Imports no torch."""

from __future__ import annotations

from typing import Any, ClassVar

from sgl_omni.config.schema import PipelineConfig

_STAGES = "benchmarks.tts.stages"


class RandomTtsPipelineConfig(PipelineConfig):
    """A TTS model of real size with random weights, drawn again from one seed at each start."""

    architectures: ClassVar[tuple[str, ...]] = ("RandomTts",)
    shareable_architectures: ClassVar[tuple[str, ...]] = ("RandomTts",)
    engine_stages: ClassVar[tuple[str, ...]] = ("tts_engine",)
    default_stages: ClassVar[dict[str, dict[str, Any]]] = {
        "frontend": {
            "factory_path": f"{_STAGES}.create_frontend",
            "factory": {"prompt_tokens": 156, "columns": 8, "codebook": 1026},
            "process": "frontend",
            "next": "tts_engine",
        },
        "tts_engine": {
            "factory_path": f"{_STAGES}.create_engine",
            "factory": {"shape": "higgs-4b"},
            "process": "tts_engine",
            "gpu": 0,
            "gpu_memory_fraction": 0.5,
            "engine": {"max_total_tokens": 65536, "max_running_requests": 128, "cuda_graph_max_bs": 128},
            "next": "collector",
            "stream_to": ["collector"],
        },
        "collector": {
            "factory_path": f"{_STAGES}.create_collector",
            "process": "vocoder",
            "next": "vocoder",
        },
        "vocoder": {
            "factory_path": f"{_STAGES}.create_vocoder",
            "process": "vocoder",
            "gpu": 0,
            "gpu_memory_fraction": 0.2,
            "terminal": True,
        },
    }
