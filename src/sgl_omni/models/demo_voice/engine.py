"""The demo voice on the engine: one page of the KV cache a request, and the same bits in every batch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from sgl_omni.engine.attention import AttentionSpan, TorchAttention
from sgl_omni.engine.engine import AutoregressiveEngine
from sgl_omni.engine.interface import EngineOutput
from sgl_omni.engine.kv_cache import KVCache, PagePool
from sgl_omni.engine.runner import ModelRunner
from sgl_omni.engine.scheduler import Limits
from sgl_omni.engine.weights import WeightStore
from sgl_omni.models.demo_voice.generation import SpeechTask
from sgl_omni.models.demo_voice.model import VoiceDecoder, prompt_rows
from sgl_omni.models.demo_voice.spec import CodecSpec

logger = logging.getLogger(__name__)


class DemoVoiceEngine(AutoregressiveEngine):
    """Speaks up to ``max_running_requests`` requests at a time; more wait in order of arrival.

    The codes of a request are the same bits whether it runs alone or among others: the engine is in its
    batch-invariant mode, and a page holds the longest piece, so that no request is ever retracted.
    """

    def __init__(
        self,
        model: VoiceDecoder,
        *,
        right_context: int,
        max_running_requests: int = 16,
        group_rows: int = 8,
        num_threads: int = 1,
    ) -> None:
        """``right_context`` is the vocoder's: codes are handed on when its next chunk can be decoded."""
        torch.set_num_threads(num_threads)
        self._num_threads = num_threads
        spec = model.spec
        cache = KVCache(model.kv_shape, max_running_requests, spec.longest_sequence, model.device)
        pool = PagePool(max_running_requests, spec.longest_sequence, spec.kv_bytes_per_token)
        super().__init__(
            SpeechTask(spec, right_context),
            ModelRunner(model, cache, group_rows=_independent_group(model, group_rows)),
            pool,
            Limits(
                max_running_requests=max_running_requests,
                # A whole prompt, and then no other in the same step: about 20 ms on one core, so that a burst
                # of new requests does not halt those that are speaking.
                prefill_tokens=spec.max_text_length + 2,
                fixed_chunks=True,
                reuse_prefixes=False,
            ),
        )
        self._rows = pool

    @classmethod
    def load(
        cls,
        folder: Path,
        device: str = "cpu",
        *,
        max_running_requests: int = 16,
        group_rows: int = 8,
        num_threads: int = 1,
        weights: WeightStore | None = None,
    ) -> DemoVoiceEngine:
        return cls(
            VoiceDecoder.load(folder, device, weights),
            right_context=CodecSpec.load(folder).right_context,
            max_running_requests=max_running_requests,
            group_rows=group_rows,
            num_threads=num_threads,
        )

    def step(self) -> Sequence[EngineOutput]:
        # OpenMP keeps the count per thread, and the results of a matrix product may depend on it.
        torch.set_num_threads(self._num_threads)
        return super().step()

    def stats(self) -> dict[str, float]:
        return {**super().stats(), "free_rows": self._rows.available}


def _independent_group(model: VoiceDecoder, group_rows: int) -> int:
    """``group_rows``, or 1 where this machine's matrix products make rows of a group depend on each other."""
    if group_rows == 1 or rows_are_independent(model, group_rows):
        return group_rows
    logger.warning(
        "demo voice: at %d rows a row's result depends on the rows beside it on this machine; decoding runs one "
        "row at a time, which lowers throughput",
        group_rows,
    )
    return 1


@torch.inference_mode()
def rows_are_independent(model: VoiceDecoder, width: int) -> bool:
    """Whether one decode step gives a row the same bits alone and at every position of a full group."""
    texts = ["the bus arrived ten minutes late."] + [f"{'so ' * n}what?" for n in range(1, width)]
    voices, columns = len(model.spec.voices), model.spec.num_codebooks
    prompts = [torch.tensor(prompt_rows(text, i % voices, model.spec)) for i, text in enumerate(texts)]
    cache = KVCache(model.kv_shape, width, max(map(len, prompts)) + 1, model.device)
    attention = TorchAttention()

    def run(ids: torch.Tensor, spans: list[AttentionSpan], positions: list[int]) -> torch.Tensor:
        x = model.embed_ids(ids.to(model.device))
        return model.forward(x, torch.tensor([positions], device=model.device), attention.begin(cache, spans))

    for row, prompt in enumerate(prompts):
        run(prompt, [AttentionSpan(0, len(prompt), [row])], list(range(len(prompt))))

    def decode(rows: list[int]) -> torch.Tensor:
        idle = width - len(rows)
        ids = torch.tensor([[(7 + 4 * k) * row for k in range(columns)] for row in rows] + [[0] * columns] * idle)
        spans = [AttentionSpan(len(prompts[row]), len(prompts[row]) + 1, [row]) for row in rows]
        return model.logits(run(ids, spans, [span.start for span in spans] + [0] * idle))

    alone = decode([0])[0]
    others = list(range(1, width))
    return all(torch.equal(alone, decode([*others[:i], 0, *others[i:]])[i]) for i in range(width))
