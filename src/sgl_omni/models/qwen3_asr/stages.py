"""The factories of Qwen3-ASR's stages. This module imports no torch, so that the host's stages start fast."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sgl_omni.models.dtypes import dtype_of
from sgl_omni.models.qwen3_asr.pipeline import MAX_SECONDS
from sgl_omni.models.qwen3_asr.spec import AsrSpec
from sgl_omni.runtime.stage import BatchStage, EngineStage, FunctionStage, StreamStage

if TYPE_CHECKING:
    from sgl_omni.engine.weights import WeightStore

_POOL_SIZES = ("max_total_tokens", "kv_cache_bytes", "mem_fraction_static")
_CPU_TOKENS = 8192
"""The KV pool on a CPU where the engine's settings do not say how large it is: five minutes of audio and its text."""


def create_preprocessing(
    model_path: str, max_seconds: float = MAX_SECONDS, window_seconds: float = 300.0, concurrency: int = 2
) -> FunctionStage:
    """A file of audio to mel frames and prompts; recordings longer than ``window_seconds`` are cut."""
    from sgl_omni.models.qwen3_asr.preprocess import Preprocessor

    preprocessor = Preprocessor(AsrSpec.load(model_path), window_seconds=window_seconds, max_seconds=max_seconds)
    return FunctionStage(preprocessor, concurrency=concurrency)


def create_audio_encoder(
    model_path: str,
    gpu_id: int | None = None,
    device: str = "cpu",
    dtype: str | None = None,
    max_batch: int = 16,
    max_frames: int = 30_000,
) -> BatchStage:
    """Mel frames to embeddings; ``max_frames`` of several windows in one pass."""
    from sgl_omni.models.qwen3_asr.tower import WindowEncoder

    encoder = WindowEncoder.load(AsrSpec.load(model_path), device, dtype_of(dtype, device), max_frames)
    return BatchStage(encoder, max_size=max_batch, rehearsal=encoder.rehearse)


def create_engine(
    model_path: str,
    gpu_id: int | None = None,
    device: str = "cpu",
    engine: dict[str, Any] | None = None,
    weights: WeightStore | None = None,
    budget_bytes: int | None = None,
) -> EngineStage:
    """Prompts and embeddings to tokens, window by window."""
    from sgl_omni.engine.engine import AutoregressiveEngine, EngineSettings
    from sgl_omni.engine.task import InputSpec
    from sgl_omni.models.qwen3_asr.decoder import load_decoder
    from sgl_omni.models.qwen3_asr.task import AsrTask

    spec, asked = AsrSpec.load(model_path), engine or {}
    settings = EngineSettings.parse(asked, budget_bytes=budget_bytes)
    if device == "cpu" and not any(getattr(settings, key) for key in _POOL_SIZES):
        settings = replace(settings, max_total_tokens=_CPU_TOKENS)
    model = load_decoder(spec, device, dtype_of(asked.get("dtype"), device), weights)
    config = model.config
    task = AsrTask(
        InputSpec(vocab_sizes=(config.vocab_size,), hidden_size=config.hidden_size),
        eos_ids=spec.eos_ids,
        pool_tokens=settings.pages(model.kv_shape, model.device) * settings.page_size,
        max_positions=config.max_positions,
    )
    return EngineStage(AutoregressiveEngine.build(model, task, settings, max_positions=config.max_positions))


def create_text(model_path: str) -> StreamStage[Any]:
    """Tokens to text."""
    from sgl_omni.models.qwen3_asr.text import AsrText
    from sgl_omni.text.tokenizer import TextTokenizer

    spec = AsrSpec.load(model_path)
    return AsrText(TextTokenizer.load(spec.folder), spec.languages)
