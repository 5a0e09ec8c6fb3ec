"""Windows of codec frames from many threads, decoded together."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.int64]
Audio = NDArray[np.float32]
DecodeBatch = Callable[[Sequence[Codes]], Sequence[Audio]]


class WindowBatcher:
    """``decode`` is called by many threads and waits; one thread takes all that wait and decodes them at once."""

    def __init__(self, decode_batch: DecodeBatch, max_size: int) -> None:
        self._decode_batch = decode_batch
        self._max_size = max_size
        self._waiting: queue.SimpleQueue[tuple[Codes, Future[Audio]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="code2wav-batches", daemon=True).start()

    def decode(self, codes: Codes) -> Audio:
        """codes int64 [codebooks, frames] -> float32 [samples]. Raises what the batch's decoding raised."""
        future: Future[Audio] = Future()
        self._waiting.put((codes, future))
        return future.result()

    def _run(self) -> None:
        while True:
            batch = [self._waiting.get()]
            while len(batch) < self._max_size:
                try:
                    batch.append(self._waiting.get_nowait())
                except queue.Empty:
                    break
            try:
                results = self._decode_batch([codes for codes, _ in batch])
            except Exception as error:  # noqa: BLE001 - it belongs to those who wait for this batch
                for _, future in batch:
                    future.set_exception(error)
                continue
            for (_, future), audio in zip(batch, results, strict=True):
                future.set_result(audio)
