"""A look at a Ming-Omni-TTS checkpoint before anything starts. Imports no torch."""

from __future__ import annotations

from typing import Any

from sgl_omni.engine.shapes import Named
from sgl_omni.errors import InvalidRequest
from sgl_omni.models.folder import check_folder, check_tensors, find_folder
from sgl_omni.models.ming_omni_tts.spec import MingSpec, engine_shapes, vae_shapes

ARCHITECTURE = "BailingMMNativeForConditionalGeneration"
_FIELDS = (
    "llm_config.hidden_size",
    "ditar_config.patch_size",
    "ditar_config.hidden_size",
    "aggregator_config.hidden_size",
    "audio_tokenizer_config.sample_rate",
    "audio_tokenizer_config.enc_kwargs.latent_dim",
    "audio_tokenizer_config.enc_kwargs.backbone",
    "audio_tokenizer_config.dec_kwargs.backbone",
    "audio_tokenizer_config.dec_kwargs.output_dim",
)


def checked(model_path: str) -> dict[str, Any]:
    """The model's config. Raises ``InvalidRequest`` that names the file or field that is missing or not supported."""
    folder = find_folder(model_path)
    config = check_folder(folder, (ARCHITECTURE,), fields=_FIELDS)
    kind = config["llm_config"].get("model_type", "qwen2")
    if config.get("model_type") != "dense" or kind != "qwen2":
        raise InvalidRequest(
            f"{folder / 'config.json'}: model_type is {config.get('model_type')!r} with a language model {kind!r}; "
            "only 'dense' with 'qwen2' runs, as in Ming-omni-tts-0.5B",
            param="model_path",
        )
    if config["audio_tokenizer_config"].get("semantic_module_kwargs") is not None:
        raise InvalidRequest(
            f"{folder / 'config.json'}: audio_tokenizer_config.semantic_module_kwargs is not supported",
            param="model_path",
        )
    check_tensors(folder, lambda: _shapes(config))
    return config


def _shapes(config: dict[str, Any]) -> Named:
    spec = MingSpec.parse(config)
    yield from engine_shapes(spec)
    yield from vae_shapes(spec.vae)
