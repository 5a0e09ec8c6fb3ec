"""The factories of Whisper's stages. This module imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sgl_omni.errors import StartupError
from sgl_omni.models.dtypes import dtype_of
from sgl_omni.models.whisper.pipeline import MAX_SECONDS
from sgl_omni.models.whisper.spec import WhisperSpec, resolve_folder
from sgl_omni.runtime.stage import EngineStage, FunctionStage, StreamStage

if TYPE_CHECKING:
    from sgl_omni.engine.weights import WeightStore

_ENCODED_AT_ONCE = 4
"""Requests whose windows take turns in the encoder."""


def create_preprocessing(model_path: str, max_seconds: float = MAX_SECONDS) -> FunctionStage:
    """A file of audio to windows of log-mel features."""
    from sgl_omni.models.whisper.preprocess import WhisperPreprocessor

    return FunctionStage(WhisperPreprocessor.load(resolve_folder(model_path), max_seconds), concurrency=2)


def create_audio_encoder(
    model_path: str, gpu_id: int | None = None, device: str = "cpu", dtype: str | None = None
) -> FunctionStage:
    """Log-mel features of each window to states."""
    from sgl_omni.models.whisper.encoder import WhisperEncoder, WindowEncoding

    encoder = WhisperEncoder.load(resolve_folder(model_path), device, dtype_of(dtype, device))
    return FunctionStage(WindowEncoding(encoder), concurrency=_ENCODED_AT_ONCE, rehearsal=encoder.rehearse)


def create_engine(
    model_path: str,
    gpu_id: int | None = None,
    device: str = "cpu",
    engine: dict[str, Any] | None = None,
    weights: WeightStore | None = None,
    budget_bytes: int | None = None,
) -> EngineStage:
    """States to tokens, window by window.

    The KV pool is as large as ``max_running_requests`` sequences of the greatest length unless the engine settings
    say otherwise; beside it lie keys and values of as many windows.
    """
    from sgl_omni.engine.engine import AutoregressiveEngine, EngineSettings
    from sgl_omni.models.whisper.decoder import WhisperDecoder
    from sgl_omni.models.whisper.task import WhisperTask

    folder = resolve_folder(model_path)
    spec, given = WhisperSpec.load(folder), engine or {}
    settings = EngineSettings.parse(given, max_running_requests=16, budget_bytes=budget_bytes)
    if not any(given.get(key) for key in ("max_total_tokens", "kv_cache_bytes", "mem_fraction_static")):
        tokens = settings.max_running_requests * spec.max_positions
        settings = EngineSettings.parse(given, max_running_requests=16, max_total_tokens=tokens)
    decoder = WhisperDecoder.load(folder, device, dtype_of(given.get("dtype"), device), weights=weights)
    built = AutoregressiveEngine.build(decoder, WhisperTask(spec), settings, max_positions=spec.max_positions)
    capacity = built.stats()["kv_capacity_tokens"]
    if capacity < spec.max_positions:
        raise StartupError(
            f"whisper: a KV pool of {capacity:.0f} tokens cannot hold a long sequence; give max_total_tokens of at "
            f"least {spec.max_positions}"
        )
    return EngineStage(built)


def create_text(model_path: str) -> StreamStage[Any]:
    """Tokens to text and segments."""
    from sgl_omni.models.whisper.text import WhisperText
    from sgl_omni.text.tokenizer import TextTokenizer

    folder = resolve_folder(model_path)
    return WhisperText(WhisperSpec.load(folder), TextTokenizer.load(folder))
