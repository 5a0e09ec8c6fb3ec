"""A closed loop over one kind of request, and its figures."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import asdict
from typing import Any

import httpx
import numpy as np
from benchmarks.serving.asking import Answer, Ask, send


async def one_by_one(url: str, asks: dict[str, Ask], times: int, patience: float) -> list[dict[str, Any]]:
    """Each request ``times`` times, alone: the first of a kind may warm something up.

    ``patience``: seconds without a byte until a request has failed.
    """
    async with httpx.AsyncClient(base_url=url, timeout=patience) as client:
        return [asdict(await send(client, ask.nth(1000 + n))) for ask in asks.values() for n in range(1, times + 1)]


async def closed_loop(url: str, ask: Ask, concurrency: int, seconds: float, patience: float) -> dict[str, Any]:
    """``concurrency`` callers for ``seconds``; what they began by then is waited for.

    Each request has a text of its own. Figures are of those that ended, over the time until the last of them did.
    """
    answers: list[Answer] = []
    numbers = itertools.count(2000)
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=patience, limits=limits) as client:
        begun = time.perf_counter()

        async def caller() -> None:
            while time.perf_counter() - begun < seconds:
                answers.append(await send(client, ask.nth(next(numbers))))
                if answers[-1].error is not None:
                    await asyncio.sleep(0.2)

        await asyncio.gather(*(caller() for _ in range(concurrency)))
        took = time.perf_counter() - begun
    good = [answer for answer in answers if answer.error is None]
    return {
        "kind": ask.kind,
        "concurrency": concurrency,
        "seconds": took,
        "requests": len(good),
        "requests_per_s": len(good) / took,
        "audio_seconds_per_s": sum(answer.audio_s for answer in good) / took,
        "tokens_per_s": sum(answer.tokens for answer in good) / took,
        "latency_s": _spread([answer.seconds for answer in good]),
        "first_audio_s": _spread([answer.first_audio_s for answer in good]),
        "first_text_s": _spread([answer.first_text_s for answer in good]),
        "failed": len(answers) - len(good),
        "errors": sorted({answer.error for answer in answers if answer.error is not None})[:5],
    }


def _spread(values: list[float | None] | list[float]) -> dict[str, float] | None:
    found = [value for value in values if value is not None]
    if not found:
        return None
    p50, p90, most = np.percentile(found, (50, 90, 100))
    return {"p50": float(p50), "p90": float(p90), "max": float(most)}
