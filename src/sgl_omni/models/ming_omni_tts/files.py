"""A look at a Ming-Omni-TTS checkpoint before anything starts. Imports no torch."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sgl_omni.engine.shapes import Named
from sgl_omni.errors import InvalidRequest
from sgl_omni.models.folder import check_folder, check_tensors, find_folder, require
from sgl_omni.models.ming_omni_tts import prompt
from sgl_omni.models.ming_omni_tts.spec import MingSpec, engine_shapes, vae_shapes
from sgl_omni.models.tokens import check_tokens

ARCHITECTURE = "BailingMMNativeForConditionalGeneration"
MAX_REFERENCE_SECONDS = 60.0
DENSE, EXPERTS = "dense", "bailingmm"
"""What the config calls the models whose language model is Qwen2, and BailingMoe."""

SPEAKER_MODEL = "campplus.onnx"

_LANGUAGE_MODELS = {DENSE: "qwen2", EXPERTS: "bailing_moe"}
_EXPERT_FIELDS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "intermediate_size")
_OTHER_EXPERTS = ("use_qk_norm", "n_group", "score_function", "moe_router_enable_expert_bias", "use_sliding_window")
"""Of later models of that name; the one here has none of it."""

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
    config = check_folder(folder, (ARCHITECTURE,), weights=(), fields=_FIELDS)
    file, language_model = folder / "config.json", config["llm_config"]
    kind, known = language_model.get("model_type", "qwen2"), _LANGUAGE_MODELS.get(config.get("model_type", ""))
    if kind != known:
        pairs = " or ".join(f"{name!r} with {model!r}" for name, model in _LANGUAGE_MODELS.items())
        raise InvalidRequest(
            f"{file}: model_type is {config.get('model_type')!r} with a language model {kind!r}, not {pairs}",
            param="model_path",
        )
    if known == _LANGUAGE_MODELS[EXPERTS]:
        _check_experts(folder, language_model)
    if config["audio_tokenizer_config"].get("semantic_module_kwargs") is not None:
        raise InvalidRequest(
            f"{file}: audio_tokenizer_config.semantic_module_kwargs is not supported",
            param="model_path",
        )
    check_tensors(folder, lambda: _shapes(config))
    marks = prompt.EXPERTS if config["model_type"] == EXPERTS else prompt.DENSE
    check_tokens(folder, config, "llm_config.vocab_size", marks.tokens)
    return config


def why_no_speakers(folder: Path) -> str | None:
    """Why references are heard without the speaker's vector; None where they are heard with it."""
    if not (folder / SPEAKER_MODEL).is_file():
        return f"{folder} holds no {SPEAKER_MODEL}"
    if find_spec("onnxruntime") is None:
        return f"{folder / SPEAKER_MODEL} needs onnxruntime: pip install 'sgl-omni[ming]'"
    return None


def _check_experts(folder: Path, language_model: dict[str, Any]) -> None:
    file = folder / "config.json"
    for field in _EXPERT_FIELDS:
        require({"llm_config": language_model}, f"llm_config.{field}", file)
    other = [field for field in _OTHER_EXPERTS if language_model.get(field) not in (None, False, 0, "softmax")]
    if other:
        raise InvalidRequest(
            f"{file}: llm_config.{other[0]} {language_model[other[0]]!r} is not supported", param="model_path"
        )
    if not (folder / "tokenizer.json").is_file():
        raise InvalidRequest(f"{folder} holds no tokenizer.json", param="model_path")


def _shapes(config: dict[str, Any]) -> Named:
    spec = MingSpec.parse(config)
    yield from engine_shapes(spec)
    yield from vae_shapes(spec.vae)
