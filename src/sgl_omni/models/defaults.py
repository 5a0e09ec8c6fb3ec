"""How large stages are where nothing says so. Imports torch only when it is asked for an engine's settings."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sgl_omni.errors import StartupError

if TYPE_CHECKING:
    from sgl_omni.engine.engine import EngineSettings

CPU_TOKENS = 4096
"""The KV pool on a CPU."""
GPU_STREAMS = 32
"""Streams that a vocoder on a GPU decodes together."""
CONTEXT_BYTES = 600 * 10**6
"""Of a process that has made a CUDA context and loaded its kernels."""
_POOL_SIZES = ("max_total_tokens", "kv_cache_bytes", "mem_fraction_static", "budget_bytes")


def engine_settings(engine: dict[str, Any] | None, device: str, budget_bytes: int | None) -> EngineSettings:
    """What a stage's ``engine`` asks for; on a CPU a pool of ``CPU_TOKENS`` where neither it nor a budget says more."""
    from sgl_omni.engine.engine import EngineSettings

    settings = EngineSettings.parse(engine or {}, budget_bytes=budget_bytes)
    if device == "cpu" and not any(getattr(settings, key) for key in _POOL_SIZES):
        return replace(settings, max_total_tokens=CPU_TOKENS)
    return settings


def most_streams(max_batch: int | None, device: str) -> int:
    """Streams that a vocoder decodes together: ``max_batch``, else ``GPU_STREAMS`` on a GPU and 1 elsewhere.

    With 1, a stream's audio is the same bits whatever else is spoken. Raises ``StartupError`` for less.
    """
    if max_batch is None:
        return GPU_STREAMS if device.startswith("cuda") else 1
    if max_batch < 1:
        raise StartupError(f"max_batch must be 1 or more, not {max_batch}")
    return max_batch
