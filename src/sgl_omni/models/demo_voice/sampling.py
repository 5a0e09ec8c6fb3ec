"""Top-k sampling with a generator of the request's own."""

from __future__ import annotations

import torch
from torch import Tensor

# Below this, dividing logits by the temperature leaves nothing to choose (and in the end overflows).
LOWEST_TEMPERATURE = 0.01


class Sampler:
    """Draws one id a column. The draws depend on the seed and the logits, never on other requests."""

    def __init__(self, temperature: float, top_k: int, seed: int | None) -> None:
        """``top_k`` 0 or -1 leaves all ids. Without a seed the draws differ from request to request."""
        self._temperature = temperature
        self._top_k = top_k
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed & (2**63 - 1))

    def __call__(self, logits: Tensor) -> list[int]:
        """logits [columns, vocabulary] -> one id a column."""
        scaled = logits.cpu() / self._temperature
        kept = min(self._top_k, scaled.shape[-1]) if self._top_k > 0 else scaled.shape[-1]
        threshold = scaled.topk(kept, -1).values[:, -1:]
        probabilities = scaled.masked_fill(scaled < threshold, float("-inf")).softmax(-1)
        return torch.multinomial(probabilities, 1, generator=self._generator)[:, 0].tolist()
