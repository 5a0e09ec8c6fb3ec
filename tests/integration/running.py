"""What the tests that run real processes have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil

from sgl_omni.runtime.pipeline import Pipeline

HERE = str(Path(__file__).parent)

Start = Callable[..., Awaitable[Pipeline]]


def children() -> set[int]:
    return {p.pid for p in psutil.Process().children(recursive=True)}


async def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Waits until `condition` holds."""
    end = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < end, "the condition did not come true in time"
        await asyncio.sleep(0.02)
