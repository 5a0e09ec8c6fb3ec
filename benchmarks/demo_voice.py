"""The demo voice's engine against the same loop written plainly with transformers' classes, on the CPU.

Sixteen requests of one to nineteen words, eight at a time, greedy, the same weights and threads. Three ways,
interleaved in each round: ``engine``, as the pipeline runs it; ``plain``, a loop of ``model(...)`` calls with a
``DynamicCache`` for each request, one request after another; ``plain_batch``, padded batches of eight that run until
their longest has ended. All must yield the same codes. Prints one JSON object as its last line.

    python benchmarks/demo_voice.py --concurrency 8 --threads 2 --rounds 5 --json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from sgl_omni.engine.delay import DelayPattern
from sgl_omni.models.demo_voice.engine import DemoVoiceEngine
from sgl_omni.models.demo_voice.model import prompt_rows
from sgl_omni.models.demo_voice.spec import PACKAGED_WEIGHTS, VoiceSpec

TEXTS = [
    "yes.",
    "the old bridge was closed for repairs.",
    "thank you, i will call again.",
    "a cold wind came down from the hills and the children ran home before the rain began.",
    "no, not today.",
    "he read the letter twice before he spoke, and then he folded it and put it in his coat.",
    "the market opens early on saturday.",
    "rain fell on the roof all night long, and in the morning the river stood above its banks.",
    "good morning.",
    "she left the keys on the kitchen table.",
    "the train to the coast leaves at nine from the second platform, and there is another at noon.",
    "we planted three apple trees last spring.",
    "wait here.",
    "the museum is open every day but monday, and on the first friday of the month it stays open late.",
    "turn left at the church.",
    "it was a quiet street with small gardens.",
]
Codes = list[list[int]]


class Plain:
    """The decoder in transformers' Mistral classes, whose shapes are free enough for it."""

    def __init__(self, folder: Path) -> None:
        from transformers import MistralConfig, MistralModel

        self.spec = spec = VoiceSpec.load(folder)
        config = MistralConfig(
            vocab_size=4 * spec.column_vocab_size,
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            num_hidden_layers=spec.num_layers,
            num_attention_heads=spec.num_heads,
            num_key_value_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            rms_norm_eps=spec.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
            max_position_embeddings=spec.max_positions,
            sliding_window=None,
        )
        tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
        self.head = tensors.pop("lm_head.weight")
        self.model = MistralModel(config).eval()
        self.model.load_state_dict({name.removeprefix("model."): t for name, t in tensors.items()})
        self.offsets = torch.arange(spec.num_codebooks) * spec.column_vocab_size
        self.pattern = DelayPattern.staircase(spec.num_codebooks, spec.eos_id, spec.pad_id)
        self.mask = torch.full((spec.num_codebooks, spec.head_vocab_size), float("-inf"))
        self.mask[:, : spec.codebook_size] = 0.0
        self.mask[0, spec.eos_id] = 0.0

    @torch.inference_mode()
    def speak(self, prompts: list[Codes]) -> list[Codes]:
        """Frames of each prompt; all run in one batch, padded on the left, until the last has ended."""
        from transformers import DynamicCache

        longest, n = max(map(len, prompts)), len(prompts)
        ids = torch.zeros(n, longest, self.spec.num_codebooks, dtype=torch.int64)
        seen = torch.zeros(n, longest, dtype=torch.int64)
        for i, prompt in enumerate(prompts):
            ids[i, longest - len(prompt) :] = torch.tensor(prompt)
            seen[i, longest - len(prompt) :] = 1
        cache = DynamicCache()
        rows: list[Codes] = [[] for _ in prompts]
        ends: list[int | None] = [None] * n
        while True:
            positions = (seen.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            chosen = self._step(ids, seen if n > 1 else None, positions, cache)
            for i, row in enumerate(chosen.tolist()):
                step = len(rows[i])
                if ends[i] is None and (row[0] == self.spec.eos_id or step >= self.spec.max_frames):
                    ends[i] = step
                self.pattern.fill(row, step, ends[i])
                rows[i].append(row)
            lasts = [end is not None and len(rows[i]) >= end + self.pattern.longest for i, end in enumerate(ends)]
            if all(lasts):
                return [self.pattern.frames(rows[i], 0, end or 0).tolist() for i, end in enumerate(ends)]
            ids = torch.tensor([row[-1] for row in rows])[:, None]
            seen = torch.cat([seen, seen.new_ones(n, 1)], 1)

    def _step(self, ids: Tensor, seen: Tensor | None, positions: Tensor, cache: Any) -> Tensor:
        x = self.model.embed_tokens(ids + self.offsets).sum(2)
        out = self.model(
            inputs_embeds=x, attention_mask=seen, position_ids=positions, past_key_values=cache, use_cache=True
        )
        logits = torch.nn.functional.linear(out.last_hidden_state[:, -1], self.head)
        return (logits.view(len(ids), *self.mask.shape) + self.mask).argmax(-1)


def run_engine(engine: DemoVoiceEngine, texts: list[str]) -> list[Codes]:
    for i, text in enumerate(texts):
        request = {"pieces": [text], "voice": 0, "temperature": 0.0, "top_k": 1, "max_frames": 4096}
        engine.add(str(i), request)
    codes: dict[str, list[np.ndarray[Any, Any]]] = {}
    while engine.has_work:
        for output in engine.step():
            codes.setdefault(output.request_id, []).extend(chunk["codes"] for chunk in output.chunks)
    return [np.concatenate(codes[str(i)]).tolist() for i in range(len(texts))]


def batched(prompts: list[Codes], size: int) -> Iterator[list[Codes]]:
    for start in range(0, len(prompts), size):
        yield prompts[start : start + size]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="only the JSON object")
    args = parser.parse_args()
    texts = TEXTS
    torch.set_num_threads(args.threads)
    engine = DemoVoiceEngine.load(PACKAGED_WEIGHTS, max_running_requests=args.concurrency, num_threads=args.threads)
    plain = Plain(PACKAGED_WEIGHTS)
    prompts = [prompt_rows(text, 0, plain.spec) for text in texts]
    ways = {
        "engine": lambda: run_engine(engine, texts),
        "plain": lambda: [plain.speak([prompt])[0] for prompt in prompts],
        "plain_batch": lambda: [codes for batch in batched(prompts, args.concurrency) for codes in plain.speak(batch)],
    }
    expected = ways["engine"]()
    rounds = []
    for _ in range(args.rounds):
        row: dict[str, Any] = {}
        for name, way in ways.items():
            started = time.perf_counter()
            codes = way()
            frames = sum(map(len, codes))
            row[name] = {"frames_per_s": frames / (time.perf_counter() - started), "equal": codes == expected}
        row["engine_to_plain"] = row["engine"]["frames_per_s"] / row["plain"]["frames_per_s"]
        row["engine_to_plain_batch"] = row["engine"]["frames_per_s"] / row["plain_batch"]["frames_per_s"]
        rounds.append(row)
        if not args.json:
            print(json.dumps(row), file=sys.stderr, flush=True)
    result = {"benchmark": "demo-voice", "concurrency": args.concurrency, "threads": args.threads}
    print(json.dumps({**result, "cores": len(os.sched_getaffinity(0)), "torch": torch.__version__, "rounds": rounds}))


if __name__ == "__main__":
    main()
