"""Speed without pitch: waveform-similarity overlap-add (Verhelst and Roelands, 1993), as a stream."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float32]

SLOWEST, FASTEST = 0.25, 4.0
OVERLAP_SECONDS = 0.020
# The search spans 20 ms, so that a whole period of the lowest voice (50 Hz) lies within it.
SEARCH_SECONDS = 0.010


class TimeStretch:
    """Plays ``rate`` times as fast at the same pitch; ``n`` samples in give ``round(n / rate)`` out.

    Each step writes one overlap of output: the natural continuation of what was written last fades out while
    the input around the step's nominal place fades in, at the offset where the two look most alike. Steps
    start at fixed places of the input, so the output does not depend on how the input was cut.
    """

    def __init__(self, rate: float, sample_rate: int) -> None:
        if not SLOWEST <= rate <= FASTEST:
            raise ValueError(f"rate must lie between {SLOWEST} and {FASTEST}, not {rate}")
        self._rate = rate
        self._overlap = max(2, round(OVERLAP_SECONDS * sample_rate))
        self._search = max(1, round(SEARCH_SECONDS * sample_rate))
        phase = (np.arange(self._overlap, dtype=np.float32) + 0.5) / self._overlap
        self._fade_in = (0.5 - 0.5 * np.cos(np.pi * phase)).astype(np.float32)
        self._fade_out = 1.0 - self._fade_in
        self._input = np.zeros(0, dtype=np.float32)
        self._input_start = 0
        self._received = 0
        self._steps = 0
        self._continuation: Samples | None = None

    def feed(self, samples: Samples) -> Samples:
        """Takes samples ``[n]``; returns those that are ready, possibly none."""
        self._received += len(samples)
        self._append(np.asarray(samples, dtype=np.float32))
        return self._run()

    def flush(self) -> Samples:
        """Ends the stream; returns what is left."""
        written = self._steps * self._overlap
        left = round(self._received / self._rate) - written
        if left <= 0:
            return np.zeros(0, dtype=np.float32)
        last_step = self._steps + -(-left // self._overlap) - 1
        missing = self._needed_until(last_step) - (self._input_start + len(self._input))
        self._append(np.zeros(max(0, missing), dtype=np.float32))
        return self._run()[:left]

    def _append(self, samples: Samples) -> None:
        self._input = np.concatenate([self._input, samples])

    def _nominal(self, step: int) -> int:
        return round(step * self._overlap * self._rate)

    def _needed_until(self, step: int) -> int:
        return self._nominal(step) + self._search + 2 * self._overlap

    def _run(self) -> Samples:
        received = self._input_start + len(self._input)
        written = []
        while self._needed_until(self._steps) <= received:
            written.append(self._step())
        self._forget()
        return np.concatenate(written) if written else np.zeros(0, dtype=np.float32)

    def _step(self) -> Samples:
        start = self._best_start()
        middle, end = start + self._overlap, start + 2 * self._overlap
        if self._continuation is None:
            written = self._input[start:middle].copy()
        else:
            written = self._continuation * self._fade_out + self._input[start:middle] * self._fade_in
        self._continuation = self._input[middle:end].copy()
        self._steps += 1
        return written

    def _best_start(self) -> int:
        """Where in the buffer this step's segment begins."""
        nominal = self._nominal(self._steps) - self._input_start
        if self._continuation is None:
            return nominal
        first = max(0, nominal - self._search)
        candidates = self._input[first : nominal + self._search + self._overlap]
        likeness = np.correlate(candidates, self._continuation, mode="valid")
        squares = np.concatenate([[0.0], np.cumsum(np.square(candidates, dtype=np.float64))])
        energy = squares[self._overlap :] - squares[: -self._overlap]
        return first + int(np.argmax(likeness / np.sqrt(energy + 1e-9)))

    def _forget(self) -> None:
        """Drops the input that lies before the next step's search."""
        done = min(max(0, self._nominal(self._steps) - self._search - self._input_start), len(self._input))
        self._input = self._input[done:]
        self._input_start += done
