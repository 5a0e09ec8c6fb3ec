"""The factories of the demo voice's stages. This module imports no torch, so that preprocessing starts fast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sgl_omni.errors import StartupError
from sgl_omni.models.demo_voice.preprocess import SpeechPreprocessor
from sgl_omni.models.demo_voice.spec import VoiceSpec, resolve_folder
from sgl_omni.runtime.stage import EngineStage, FunctionStage, StreamStage

if TYPE_CHECKING:
    from sgl_omni.engine.weights import WeightStore


def create_preprocessing(model_path: str) -> FunctionStage:
    """Text to normalised pieces and engine options."""
    return FunctionStage(SpeechPreprocessor(VoiceSpec.load(resolve_folder(model_path))))


def create_engine(
    model_path: str,
    gpu_id: int | None = None,
    device: str = "cpu",
    engine: dict[str, Any] | None = None,
    weights: WeightStore | None = None,
    max_running_requests: int = 16,
    group_rows: int = 8,
    num_threads: int = 1,
) -> EngineStage:
    """Pieces to codec frames.

    Of the engine settings, ``max_running_requests`` wins over the argument of that name, and the KV pool
    (``max_total_tokens`` or ``kv_cache_bytes``) bounds it. One thread is the default: two make one request
    8 % faster on two cores, but eight requests a third slower, because the vocoder wants the second core.
    """
    from sgl_omni.models.demo_voice.engine import DemoVoiceEngine

    folder = resolve_folder(model_path)
    return EngineStage(
        DemoVoiceEngine.load(
            folder,
            device,
            max_running_requests=_cache_rows(VoiceSpec.load(folder), engine or {}, max_running_requests),
            group_rows=group_rows,
            num_threads=num_threads,
            weights=weights,
        )
    )


def _cache_rows(spec: VoiceSpec, settings: dict[str, Any], max_running_requests: int) -> int:
    """Requests that the KV pool holds at once; each takes the room of the longest piece."""
    rows: int = settings.get("max_running_requests") or max_running_requests
    tokens: int | None = settings.get("max_total_tokens")
    if settings.get("kv_cache_bytes"):
        tokens = settings["kv_cache_bytes"] // spec.kv_bytes_per_token
    if tokens is None:
        return rows
    if tokens < spec.longest_sequence:
        raise StartupError(
            f"demo voice: a KV pool of {tokens} tokens holds no request; give max_total_tokens of at least "
            f"{spec.longest_sequence}, or kv_cache_bytes of {spec.longest_sequence * spec.kv_bytes_per_token}"
        )
    return min(rows, tokens // spec.longest_sequence)


def create_vocoder(
    model_path: str, gpu_id: int | None = None, device: str = "cpu", num_threads: int = 1
) -> StreamStage[Any]:
    """Codec frames to audio, at the asked speed."""
    from sgl_omni.models.demo_voice.codec import CodecDecoder
    from sgl_omni.models.demo_voice.vocoder import DemoVocoder

    return DemoVocoder(CodecDecoder.load(resolve_folder(model_path), device), num_threads)
