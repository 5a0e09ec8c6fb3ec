"""Qwen3-TTS as a pipeline: preprocessing -> tts_engine ==> vocoder. Imports no torch."""

from __future__ import annotations

from typing import Any, ClassVar

from sgl_omni.config.schema import PipelineConfig
from sgl_omni.config.tasks import SpeechTask, Tasks
from sgl_omni.models.folder import check_tensors, check_weights, read_json
from sgl_omni.models.qwen3_tts.codec_shapes import check_decoder, check_encoders
from sgl_omni.models.qwen3_tts.facts import (
    ARCHITECTURE,
    BASE,
    LEAST_SECONDS,
    MOST_SECONDS,
    SPEECH_TOKENIZER,
    ModelFacts,
)
from sgl_omni.models.qwen3_tts.spec import TalkerSpec, talker_shapes
from sgl_omni.models.tokens import check_merged, check_tokens

_STAGES = "sgl_omni.models.qwen3_tts.stages"

_TOKENS = {"im_start_token_id": "<|im_start|>", "im_end_token_id": "<|im_end|>"}
"""The prompt has the tokens; a config need not name their ids."""
_ROLE = "assistant"


class Qwen3TTSPipelineConfig(PipelineConfig):
    """Qwen3-TTS on one GPU: preprocessing and engine in one Process, the vocoder in its own.

    A prepared request and the voice in it are handed to the engine as they are, and voices are kept where they were
    read, so that edge stays within a process.
    """

    model_ids: ClassVar[tuple[str, ...]] = (
        "Qwen/Qwen3-TTS-12Hz-1.7B-Base",
        "Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice",
        "Qwen/Qwen3-TTS-12Hz-1.7B-VoiceDesign",
        "Qwen/Qwen3-TTS-12Hz-0.6B-Base",
        "Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice",
    )
    architectures: ClassVar[tuple[str, ...]] = (ARCHITECTURE,)
    shareable_architectures: ClassVar[tuple[str, ...]] = (ARCHITECTURE,)
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

    @classmethod
    def tasks(cls, model_path: str) -> Tasks:
        """Looks at the whole folder, so that what is wrong with it is known before a process starts."""
        facts = ModelFacts.load(model_path)
        clones = facts.kind == BASE
        config = read_json(facts.folder)
        entries = check_weights(facts.folder)
        check_tensors(
            facts.folder,
            lambda: talker_shapes(TalkerSpec.parse(config)),
            parts=["speaker_encoder."] * clones,
            ignore=["speaker_encoder.*"],
            entries=entries,
        )
        known = {field: token for field, token in _TOKENS.items() if field in config}
        needed = (*_TOKENS.values(), _ROLE)
        vocabulary = check_tokens(facts.folder, config, "talker_config.text_vocab_size", needed, known)
        check_merged(facts.folder, vocabulary, _ROLE)
        of_speech = check_weights(facts.folder / SPEECH_TOKENIZER)
        check_decoder(facts.folder, of_speech)
        if clones:
            check_encoders(facts.folder, of_speech, entries)
        voices = tuple(facts.speakers)
        return Tasks(
            speech=SpeechTask(
                voices=voices,
                default_voice=voices[0] if voices else None,
                sample_rate=facts.sample_rate,
                max_references=1 if facts.kind == BASE else 0,
                least_reference_seconds=LEAST_SECONDS,
                max_reference_seconds=MOST_SECONDS,
                takes_instructions=facts.takes_instructions,
                languages=facts.spoken_languages,
            )
        )
