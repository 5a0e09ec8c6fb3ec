"""Qwen3-Omni as a pipeline: text, images, audio and video in, text and speech out. Imports no torch.

    preprocessing -> image_encoder, audio_encoder -> thinker ==> decode                 (text)
                 \\-----------------------------------^     \\==> talker_ar ==> code2wav  (speech)

The thinker is the fan-in: its ``merge_fn`` puts the encoders' embeddings into the prompt.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, ClassVar

from sgl_omni.config.schema import PipelineConfig
from sgl_omni.config.tasks import ChatTask, Tasks
from sgl_omni.models.folder import check_tensors, find_folder, read_json
from sgl_omni.models.qwen3_omni.prompt_spec import ARCHITECTURE, SAMPLE_RATE, PromptSpec
from sgl_omni.models.qwen3_omni.spec import engine_shapes
from sgl_omni.models.qwen3_omni.tower_shapes import COMPUTED, towers_shapes
from sgl_omni.models.tokens import check_chat, check_tokens

_STAGES = "sgl_omni.models.qwen3_omni.stages"
_PARTS = ("thinker.visual.", "thinker.audio_tower.", "code2wav.")
_VOCABULARY = "thinker_config.text_config.vocab_size"
_TOKENS = {
    "im_start_token_id": "<|im_start|>",
    "im_end_token_id": "<|im_end|>",
    "user_token_id": "user",
    "assistant_token_id": "assistant",
    **{f"thinker_config.{kind}_token_id": f"<|{kind}_pad|>" for kind in ("audio", "image", "video")},
}


class Qwen3OmniSpeechPipelineConfig(PipelineConfig):
    """Qwen3-Omni with speech output: encoders and thinker on GPU 0, the speech stages on GPU 1."""

    model_ids: ClassVar[tuple[str, ...]] = ("Qwen/Qwen3-Omni-30B-A3B-Instruct",)
    architectures: ClassVar[tuple[str, ...]] = (ARCHITECTURE,)
    shareable_architectures: ClassVar[tuple[str, ...]] = architectures
    engine_stages: ClassVar[tuple[str, ...]] = ("thinker", "talker_ar")
    default_stages: ClassVar[dict[str, dict[str, Any]]] = {
        "preprocessing": {
            "factory_path": f"{_STAGES}.create_preprocessing",
            "process": "preprocessing",
            "next": ["image_encoder", "audio_encoder", "thinker"],
            "route_fn": f"{_STAGES}.route_to_encoders",
        },
        "image_encoder": {
            "factory_path": f"{_STAGES}.create_image_encoder",
            "process": "image_encoder",
            "gpu": 0,
            "next": "thinker",
        },
        "audio_encoder": {
            "factory_path": f"{_STAGES}.create_audio_encoder",
            "process": "audio_encoder",
            "gpu": 0,
            "next": "thinker",
        },
        "thinker": {
            "factory_path": f"{_STAGES}.create_thinker",
            "process": "thinker",
            "gpu": 0,
            "wait_for": ["preprocessing", "image_encoder", "audio_encoder"],
            "merge_fn": f"{_STAGES}.merge_embeddings",
            "next": ["decode", "talker_ar"],
            "stream_to": ["decode", "talker_ar"],
        },
        "decode": {
            "factory_path": f"{_STAGES}.create_decode",
            "process": "decode",
            "terminal": True,
        },
        "talker_ar": {
            "factory_path": f"{_STAGES}.create_talker",
            "process": "talker_ar",
            "gpu": 1,
            "next": "code2wav",
            "stream_to": ["code2wav"],
        },
        "code2wav": {
            "factory_path": f"{_STAGES}.create_code2wav",
            "process": "code2wav",
            "gpu": 1,
            "terminal": True,
        },
    }
    # No fraction suits every card: 30 billion parameters in bfloat16 are most of 80 GB and under half of 141 GB.
    default_placement: ClassVar[dict[str, Any]] = {"require_memory_fraction_for_colocation": False}

    @classmethod
    def tasks(cls, model_path: str) -> Tasks:
        """Raises ``InvalidRequest`` that names what the folder lacks, speech included."""
        spec = PromptSpec.load(model_path)
        folder = find_folder(model_path)
        config = read_json(folder)
        check_tensors(
            folder,
            lambda: chain(engine_shapes(config), towers_shapes(config)),
            parts=_PARTS,
            ignore=[*COMPUTED, "thinker.lm_head.weight"],
        )
        vocabulary = check_tokens(folder, config, _VOCABULARY, ids=_TOKENS)
        check_chat(folder, vocabulary, spec.vocab_size, _VOCABULARY, is_needed=True)
        return Tasks(
            chat=ChatTask(
                text_output="decode",
                audio_output="code2wav",
                inputs=("text", "image", "audio", "video"),
                voices=spec.voices,
                default_voice=spec.default_voice,
                sample_rate=SAMPLE_RATE,
            )
        )
