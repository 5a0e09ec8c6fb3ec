"""Plain language models as a pipeline: preprocessing -> llm ==> decode. Imports no torch."""

from __future__ import annotations

from typing import Any, ClassVar

from sgl_omni.config.schema import PipelineConfig
from sgl_omni.config.tasks import ChatTask, Tasks
from sgl_omni.engine.decoder_config import DecoderConfig
from sgl_omni.engine.headers import FLOATS
from sgl_omni.engine.shapes import causal_shapes
from sgl_omni.models.folder import check_folder, check_tensors, check_weights, find_folder
from sgl_omni.models.text_llm.generation import GenerationDefaults
from sgl_omni.models.tokens import check_chat, check_tokens

_STAGES = "sgl_omni.models.text_llm.stages"
_FIELDS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "rms_norm_eps",
    "vocab_size",
)


class TextLLMPipelineConfig(PipelineConfig):
    """A language model of the Qwen, Llama or Mistral kind, text in and text out, on one GPU or several ranks."""

    model_ids: ClassVar[tuple[str, ...]] = (
        "Qwen/Qwen3-0.6B",
        "Qwen/Qwen3-1.7B",
        "Qwen/Qwen3-4B",
        "Qwen/Qwen3-8B",
        "Qwen/Qwen3-14B",
        "Qwen/Qwen3-32B",
        "Qwen/Qwen3-30B-A3B",
    )
    architectures: ClassVar[tuple[str, ...]] = (
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen2ForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
    )
    shareable_architectures: ClassVar[tuple[str, ...]] = architectures
    engine_stages: ClassVar[tuple[str, ...]] = ("llm",)
    default_stages: ClassVar[dict[str, dict[str, Any]]] = {
        "preprocessing": {
            "factory_path": f"{_STAGES}.create_preprocessing",
            "process": "preprocessing",
            "next": "llm",
        },
        "llm": {
            "factory_path": f"{_STAGES}.create_llm",
            "process": "llm",
            "gpu": 0,
            "gpu_memory_fraction": 0.85,
            "next": "decode",
            "stream_to": ["decode"],
        },
        "decode": {
            "factory_path": f"{_STAGES}.create_decode",
            "process": "decode",
            "terminal": True,
        },
    }

    @classmethod
    def tasks(cls, model_path: str) -> Tasks:
        folder = find_folder(model_path)
        config = check_folder(folder, cls.architectures, weights=(), fields=_FIELDS)
        GenerationDefaults.load(folder, config["vocab_size"])
        check_tensors(
            folder,
            lambda: causal_shapes(DecoderConfig.parse(config), "model.", "lm_head"),
            ignore=["*.rotary_emb.inv_freq", "lm_head.weight"],
            entries=check_weights(folder, FLOATS),
        )
        check_chat(folder, check_tokens(folder, config, "vocab_size"), config["vocab_size"], "vocab_size")
        return Tasks(chat=ChatTask(text_output="decode", completes_text=True))
