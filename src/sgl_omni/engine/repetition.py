"""The repetition penalty: ids that a request has had become less likely."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sgl_omni.engine.request import Request


def penalise_requests(logits: Tensor, requests: Sequence[Request], *, prompts: bool = False) -> Tensor:
    """Logits [n, 1, vocabulary], those of ``seen_ids`` lowered by each request's penalty."""
    penalties = [request.sampling.repetition_penalty for request in requests]
    if all(penalty == 1 for penalty in penalties):
        return logits
    seen = seen_ids(requests, logits.shape[-1], logits.device, prompts=prompts)
    return penalise(logits[:, 0], seen, torch.tensor(penalties, device=logits.device))[:, None]


def penalise(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Logits [n, vocabulary] with those of ``seen`` ids, bool [n, vocabulary], lowered by ``penalty`` [n].

    Positive ones are divided by it, negative ones multiplied, in float32; 1 changes nothing.
    """
    exact, factor = logits.float(), penalty[:, None].float()
    return torch.where(seen, torch.where(exact < 0, exact * factor, exact / factor).to(logits.dtype), logits)


def seen_ids(
    requests: Sequence[Request], vocabulary: int, device: torch.device | str, *, prompts: bool = False
) -> Tensor:
    """Which ids each request has put out in column 0, or with ``prompts`` had in its prompt: bool [n, vocabulary]."""
    seen = torch.zeros(len(requests), vocabulary, dtype=torch.bool)
    for row, request in enumerate(requests):
        seen[row, [output[0] for output in request.outputs]] = True
        if prompts and request.prompt.ids is not None:
            seen[row, request.prompt.ids[:, 0]] = True
    return seen.to(device)
