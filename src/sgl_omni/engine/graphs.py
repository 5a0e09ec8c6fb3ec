"""CUDA graphs of whole steps, one for each number of rows in a list of buckets."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch


def can_capture(device: torch.device) -> bool:
    return device.type == "cuda"


StepOfRows = Callable[[int], None]


def decode_buckets(most: int) -> list[int]:
    """Row counts to capture for steps of up to so many requests of one row each."""
    return [*(n for n in (1, 2, 4, *range(8, 64, 8), *range(64, most, 16)) if n < most), most]


def prompt_buckets(most: int) -> list[int]:
    """Row counts to capture for steps that prompts take part in, up to so many rows."""
    return [*(n for n in (*range(64, 512, 64), *range(512, most, 128)) if n < most), most]


class StepGraphs:
    """Captures ``step(rows)`` for every bucket, the largest first, so that all share one memory pool."""

    def __init__(self, step: StepOfRows, buckets: Sequence[int], beside: StepGraphs | None = None) -> None:
        """Takes as long as ``capture_seconds`` says, and ``bytes`` of torch's memory on the device. The step must read
        and write the same tensors each time. ``beside``: others that never run at the same time, nor leave anything in
        memory of their own, share theirs."""
        self.buckets = sorted(buckets)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        started = time.perf_counter()
        reserved = torch.cuda.memory_reserved()
        pool = None if beside is None else beside.pool
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        for rows in reversed(self.buckets):
            with torch.cuda.stream(stream):
                step(rows)  # compiles and sets up what may not happen during a capture
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                step(rows)
            pool = graph.pool()
            self._graphs[rows] = graph
        self.pool = pool
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.bytes = torch.cuda.memory_reserved() - reserved
        self.capture_seconds = time.perf_counter() - started

    def bucket_for(self, rows: int) -> int | None:
        """The smallest bucket that holds so many rows."""
        at = bisect_left(self.buckets, rows)
        return self.buckets[at] if at < len(self.buckets) else None

    def replay(self, bucket: int) -> None:
        self._graphs[bucket].replay()
