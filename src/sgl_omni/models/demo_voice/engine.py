"""Continuous batching of speech requests over one decoder, with a plain batched decode loop."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from sgl_omni.engine.interface import EngineOutput, Payload
from sgl_omni.models.demo_voice.generation import Generation, SpeechRequest
from sgl_omni.models.demo_voice.model import KVCache, VoiceDecoder, prompt_rows
from sgl_omni.models.demo_voice.spec import CodecSpec

logger = logging.getLogger(__name__)

# Prompt rows that one step may run before it decodes: about 20 ms on one core, so that a burst of new
# requests does not halt those that are speaking.
PREFILL_TOKENS_PER_STEP = 192


class DemoVoiceEngine:
    """Speaks up to ``max_running_requests`` requests at a time; more wait in order of arrival.

    The codes of a request are the same bits whether it runs alone or among others: a prompt runs alone, a
    decode step runs in groups of exactly ``group_rows`` rows, and each row attends over its own length only.
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
        self._model = model
        self._right_context = right_context
        self._num_threads = num_threads
        self._group_rows = _independent_group(model, group_rows)
        self._cache = KVCache(model.spec, max_running_requests, model.spec.longest_sequence, model.device)
        self._capacity = max_running_requests * model.spec.longest_sequence
        self._free_rows = list(range(max_running_requests))
        self._queue: deque[SpeechRequest] = deque()
        self._running: list[Generation] = []

    @classmethod
    def load(
        cls,
        folder: Path,
        device: str = "cpu",
        *,
        max_running_requests: int = 16,
        group_rows: int = 8,
        num_threads: int = 1,
    ) -> DemoVoiceEngine:
        return cls(
            VoiceDecoder.load(folder, device),
            right_context=CodecSpec.load(folder).right_context,
            max_running_requests=max_running_requests,
            group_rows=group_rows,
            num_threads=num_threads,
        )

    @property
    def has_work(self) -> bool:
        return bool(self._queue or self._running)

    def add(self, request_id: str, payload: Payload) -> None:
        self._queue.append(SpeechRequest.parse(request_id, payload, self._model.spec))

    def abort(self, request_id: str) -> None:
        self._queue = deque(request for request in self._queue if request.id != request_id)
        for generation in [g for g in self._running if g.request.id == request_id]:
            self._release(generation)

    def step(self) -> Sequence[EngineOutput]:
        # OpenMP keeps the count per thread, and the results of a matrix product may depend on it.
        torch.set_num_threads(self._num_threads)
        self._admit()
        speaking = [g for g in self._running if not g.needs_prefill]
        outputs = [*self._prefill(), *self._decode(speaking)]
        for generation in [g for g in self._running if g.finished]:
            self._release(generation)
        return outputs

    def stats(self) -> dict[str, float]:
        return {
            "running": len(self._running),
            "queued": len(self._queue),
            "free_rows": len(self._free_rows),
            "kv_capacity_tokens": self._capacity,
        }

    def _admit(self) -> None:
        while self._queue and self._free_rows:
            request = self._queue.popleft()
            row = self._free_rows.pop()
            self._running.append(Generation(request, row, self._model.spec, self._right_context))

    def _release(self, generation: Generation) -> None:
        self._running.remove(generation)
        self._free_rows.append(generation.row)

    def _prefill(self) -> Iterator[EngineOutput]:
        """Runs the prompts of new pieces, one after another, until the step's share is used up."""
        budget = PREFILL_TOKENS_PER_STEP
        for generation in [g for g in self._running if g.needs_prefill]:
            if budget <= 0:
                return
            prompt = generation.begin_piece()
            budget -= len(prompt)
            yield from _choose([generation], self._model.prefill(self._cache, generation.row, prompt))

    def _decode(self, generations: list[Generation]) -> Iterator[EngineOutput]:
        for start in range(0, len(generations), self._group_rows):
            group = generations[start : start + self._group_rows]
            logits = self._model.decode(
                self._cache,
                rows=[g.row for g in group],
                positions=[g.position for g in group],
                ids=[g.next_ids for g in group],
                width=self._group_rows,
            )
            for generation in group:
                generation.position += 1
            yield from _choose(group, logits)


@torch.inference_mode()
def _choose(generations: list[Generation], logits: torch.Tensor) -> list[EngineOutput]:
    """Picks each generation's next ids from its logits [codebooks, vocabulary] and hands them to it."""
    best: list[list[int]] = logits.argmax(-1).tolist()
    outputs = [
        generation.take(generation.sampler(logits[i]) if generation.sampler else best[i])
        for i, generation in enumerate(generations)
    ]
    return [output for output in outputs if output is not None]


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


def rows_are_independent(model: VoiceDecoder, width: int) -> bool:
    """Whether one decode step gives a row the same bits alone and at every position of a full group."""
    texts = ["the bus arrived ten minutes late."] + [f"{'so ' * n}what?" for n in range(1, width)]
    voices = len(model.spec.voices)
    prompts = [prompt_rows(text, i % voices, model.spec) for i, text in enumerate(texts)]
    cache = KVCache(model.spec, width, max(map(len, prompts)) + 1, model.device)
    for row, prompt in enumerate(prompts):
        model.prefill(cache, row, prompt)

    def decode(rows: list[int]) -> torch.Tensor:
        ids = [[7 * row, 11 * row, 13 * row, 17 * row][: model.spec.num_codebooks] for row in rows]
        return model.decode(cache, rows, [len(prompts[row]) for row in rows], ids, width)

    alone = decode([0])[0]
    others = list(range(1, width))
    return all(torch.equal(alone, decode([*others[:i], 0, *others[i:]])[i]) for i in range(width))
