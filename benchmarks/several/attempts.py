"""What was tried: each attempt is told when it ends, well or not, so that a run that is cut has said what it knew."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from sgl_omni.gpu.devices import usable_host
from sgl_omni.topology.host import Host, virtual_host

T = TypeVar("T")
Attempt = dict[str, Any]


class Attempts:
    """Runs and keeps them, in order. ``device``: "cpu" or "cuda"."""

    def __init__(self, device: str, out: Path | None = None, until: float | None = None) -> None:
        """``until``: seconds from now after which nothing is begun any more."""
        self.device = device
        self.all: list[Attempt] = []
        self._out = out
        self._begun = time.monotonic()
        self._until = until

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def host(self) -> Host:
        """Raises ``RuntimeError`` where GPUs are asked for and none can be used."""
        if not self.on_gpu:
            return virtual_host(cpu_count=os.cpu_count())
        host = usable_host()
        if host is None:
            raise RuntimeError("no GPU that this torch can use")
        return host

    async def run(self, section: str, what: Attempt, work: Callable[[], Awaitable[Attempt]], within: float) -> Attempt:
        """What the work found beside ``what`` it was, or the error that ended it; it gets ``within`` seconds."""
        found: Attempt = {"section": section, **what}
        at = time.monotonic()
        if self._until is not None and at - self._begun > self._until:
            found["error"] = "not begun: the time is over"
        else:
            try:
                found |= await asyncio.wait_for(work(), within)
            except Exception as error:  # noqa: BLE001 - an attempt that failed is a result
                found["error"] = f"{type(error).__name__}: {error}"[:3000]
        found["took_s"] = time.monotonic() - at
        self.all.append(found)
        print(json.dumps(found), flush=True)
        if self._out is not None:
            self._out.write_text(json.dumps(self.all, indent=1))
        return found


def in_a_process(function: Callable[..., T], *arguments: Any) -> T:
    """Calls it in a fresh process, with which its GPU memory and contexts end."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()
