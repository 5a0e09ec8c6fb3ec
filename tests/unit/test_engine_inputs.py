"""Inputs that arrive over time: same tokens as when all is there at once, and nothing runs before its input."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from engine_fixtures import EVERY_RUNNER

from sgl_omni.engine.engine import AutoregressiveEngine, EngineSettings
from sgl_omni.engine.inputs import ArrivingInput, added_rows
from sgl_omni.engine.model import CausalModel
from sgl_omni.engine.request import Prompt, Request
from sgl_omni.engine.row_memory import AddedRows
from sgl_omni.engine.task import InputSpec, TokenTask
from sgl_omni.errors import InvalidRequest, NotFinite

LENGTHS = (5, 17, 33, 9, 2)
ADDED = (3, 9, 0, 14, 20)
OUTPUTS = 14


class Counting(CausalModel):
    rows_run = 0

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attend: Any) -> torch.Tensor:
        self.rows_run += len(x)
        return super().forward(x, positions, attend)


def engine_for(model: CausalModel, device_rows: bool = False, **settings: Any) -> AutoregressiveEngine:
    task = TokenTask(InputSpec(vocab_sizes=(131,), hidden_size=32))
    options = EngineSettings(**{"page_size": 1, "max_total_tokens": 400, **settings})
    return AutoregressiveEngine.build(model, task, options, max_positions=128, device_rows=device_rows)


@pytest.fixture(scope="module")
def cases(tiny_qwen3: Any, one_thread: None) -> list[tuple[list[int], torch.Tensor, list[int]]]:
    """Prompt, rows to be added, and what transformers' model says to them, step by step."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for length, count in zip(LENGTHS, ADDED, strict=True):
        prompt = torch.randint(0, 131, (length,), generator=generator)
        added = torch.randn(count, 32, generator=generator) * 0.5
        made.append((prompt.tolist(), added, by_hand(tiny_qwen3.reference, prompt, added)))
    return made


@torch.no_grad()
def by_hand(reference: Any, prompt: torch.Tensor, added: torch.Tensor) -> list[int]:
    embedding = reference.get_input_embeddings()
    x, tokens = embedding(prompt), []
    for step in range(OUTPUTS):
        tokens.append(int(reference(inputs_embeds=x[None]).logits[0, -1].argmax()))
        row = embedding(torch.tensor(tokens[-1:]))
        x = torch.cat([x, row + added[step] if step < len(added) else row])
    return tokens


def test_what_is_added_changes_the_tokens(tiny_qwen3: Any, cases: Any) -> None:
    for prompt, added, tokens in cases:
        plain = by_hand(tiny_qwen3.reference, torch.tensor(prompt), added[:0])
        assert (plain == tokens) == (len(added) == 0)


@EVERY_RUNNER
def test_all_at_once(tiny_qwen3: Any, cases: Any, churn: Any, device_rows: bool) -> None:
    engine = engine_for(CausalModel.load(tiny_qwen3.folder), device_rows, max_total_tokens=60)
    payloads = {
        str(i): {"prompt_ids": prompt, "added_embeddings": added, "max_new_tokens": OUTPUTS}
        for i, (prompt, added, _) in enumerate(cases)
    }
    seen = churn(engine, payloads, "")
    assert engine.stats()["retractions"] > 0
    assert [seen[str(i)].result["token_ids"] for i in range(len(cases))] == [tokens for _, _, tokens in cases]


class Feeder:
    """Sends a request's input in pieces of random length, at random times."""

    def __init__(self, name: str, prompt: list[int], added: torch.Tensor, rng: random.Random) -> None:
        self.name = name
        cut = rng.randint(1, len(prompt))
        self.first = {
            "prompt_ids": prompt[:cut],
            "max_new_tokens": OUTPUTS,
            "input_open": True,
            "prompt_open": cut < len(prompt) or rng.random() < 0.5,
        }
        self.rest: list[dict[str, Any] | None] = []
        if self.first["prompt_open"]:
            middle = rng.randint(cut, len(prompt))
            self.rest += [{"prompt_ids": prompt[a:b]} for a, b in ((cut, middle), (middle, len(prompt))) if a < b]
            self.rest.append({"prompt_open": False})
        start = 0
        while start < len(added):
            stop = rng.randint(start + 1, len(added))
            self.rest.append({"added_embeddings": added[start:stop]})
            start = stop
        self.rest.append(None)

    def feed(self, engine: AutoregressiveEngine) -> None:
        piece = self.rest.pop(0)
        if piece is None:
            engine.finish_input(self.name)
        else:
            engine.extend(self.name, piece)


@EVERY_RUNNER
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("pool", [400, 60, 48])
@pytest.mark.parametrize("running", [2, 64])
def test_arriving_in_pieces(tiny_qwen3: Any, cases: Any, pool: int, running: int, seed: int, device_rows: bool) -> None:
    rng = random.Random(f"{pool} {running} {seed}")
    model = Counting.load(tiny_qwen3.folder)
    assert isinstance(model, Counting)
    engine = engine_for(
        model, device_rows, max_total_tokens=pool, max_running_requests=running, chunked_prefill_tokens=11
    )
    arriving = [Feeder(f"{i} {c}", p, a, rng) for i, (p, a, _) in enumerate(cases) for c in ("kept", "aborted")]
    rng.shuffle(arriving)
    feeding: list[Feeder] = []
    results: dict[str, list[int]] = {}
    idle = 0
    while arriving or feeding or engine.has_work:
        if arriving and rng.random() < 0.4:
            feeding.append(arriving.pop())
            engine.add(feeding[-1].name, feeding[-1].first)
        for feeder in list(feeding):
            if rng.random() < 0.3:
                feeder.feed(engine)
            if feeder.name.endswith("aborted") and rng.random() < 0.1:
                engine.abort(feeder.name)
                feeding.remove(feeder)
            elif not feeder.rest:
                feeding.remove(feeder)
        if engine.has_work:
            before = model.rows_run
            for output in engine.step():
                assert output.result is not None
                results[output.request_id] = output.result["token_ids"]
            # ``has_work`` promises progress; with device rows that may be to read what the step before launched.
            idle = 0 if model.rows_run > before else idle + 1
            assert idle <= bool(device_rows)
    assert [results[f"{i} kept"] for i in range(len(cases))] == [tokens for _, _, tokens in cases]
    stats = engine.stats()
    assert (stats["running"], stats["queued"], stats["kv_used_tokens"]) == (0, 0, 0)


def test_a_request_without_its_next_input_does_not_run_and_holds_up_nobody(tiny_qwen3: Any, cases: Any) -> None:
    engine = engine_for(CausalModel.load(tiny_qwen3.folder), max_total_tokens=48, max_running_requests=1)
    prompt, added, expected = cases[3]
    engine.add("fed", {"prompt_ids": prompt, "max_new_tokens": OUTPUTS, "input_open": True})
    engine.step()
    assert not engine.has_work  # the first output needs no addition; its successor does
    assert engine.stats()["running"] == 1
    engine.add("other", {"prompt_ids": cases[2][0], "max_new_tokens": OUTPUTS})
    other = None
    while engine.has_work:
        other = next(iter(engine.step()), None) or other
    assert other is not None and other.result is not None
    assert other.result["token_ids"] == cases[2][2]
    assert engine.stats()["retractions"] == 1
    engine.extend("fed", {"added_embeddings": added[:2]})
    for _ in range(2):
        engine.step()
    assert not engine.has_work
    assert engine.stats()["generated_rows"] == OUTPUTS + 3
    engine.extend("fed", {"added_embeddings": added[2:]})
    engine.finish_input("fed")
    while engine.has_work:
        outputs = engine.step()
    assert outputs[0].result is not None
    assert outputs[0].result["token_ids"] == expected


REFUSED: dict[str, tuple[dict[str, Any], list[dict[str, Any] | None], str]] = {
    "never open": ({}, [{"added_embeddings": torch.zeros(1, 32)}], "nothing can be added"),
    "never open, ended": ({}, [None], "complete from the start"),
    "after the end": ({"input_open": True}, [None, {"added_embeddings": torch.zeros(1, 32)}], "nothing can be added"),
    "prompt after its end": ({"input_open": True}, [{"prompt_ids": [1]}], "more of the prompt arrived after its end"),
    "rows before the prompt": ({"prompt_open": True}, [{"added_embeddings": torch.zeros(1, 32)}], "before the end"),
    "rows of another width": ({"input_open": True}, [{"added_embeddings": torch.zeros(1, 8)}], "32"),
    "rows that are no array": ({"input_open": True}, [{"added_embeddings": [[0.0] * 32]}], "must be an array"),
    "another kind of prompt": ({"prompt_open": True}, [{"prompt_embeddings": torch.zeros(1, 32)}], "all ids or all"),
    "too long for the pool": ({"prompt_open": True}, [{"prompt_ids": [1] * 60}], "the KV pool has 48"),
}


def test_input_that_is_no_numbers_ends_its_request_and_is_not_the_callers_fault(tiny_qwen3: Any) -> None:
    engine = engine_for(CausalModel.load(tiny_qwen3.folder), max_total_tokens=48)
    engine.add("bad", {"prompt_ids": [1, 2], "max_new_tokens": 5, "input_open": True})
    with pytest.raises(NotFinite, match="added_embeddings are not all finite"):
        engine.extend("bad", {"added_embeddings": torch.full((1, 32), math.nan)})
    assert not engine.has_work


@pytest.mark.parametrize("case", REFUSED)
def test_input_that_does_not_fit_ends_its_request_alone(tiny_qwen3: Any, cases: Any, case: str) -> None:
    first, pieces, message = REFUSED[case]
    engine = engine_for(CausalModel.load(tiny_qwen3.folder), max_total_tokens=48)
    engine.add("bad", {"prompt_ids": [1, 2], "max_new_tokens": 5, **first})
    engine.add("good", {"prompt_ids": cases[2][0], "max_new_tokens": OUTPUTS})

    def feed() -> None:
        for piece in pieces:
            engine.finish_input("bad") if piece is None else engine.extend("bad", piece)

    with pytest.raises(InvalidRequest, match=message):
        feed()
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert [output.request_id for output in outputs] == ["good"]
    assert outputs[0].result is not None
    assert outputs[0].result["token_ids"] == cases[2][2]
    engine.extend("bad", {"added_embeddings": torch.zeros(1, 32)})  # gone, so nobody minds
    assert engine.stats()["queued"] == engine.stats()["kv_used_tokens"] == 0


def test_rows_and_their_fallback() -> None:
    inputs = ArrivingInput(torch.tensor([9.0]))
    steps = torch.arange(4)
    assert added_rows(inputs.rows, inputs.count, steps).flatten().tolist() == [9, 9, 9, 9]
    inputs.append(torch.tensor([[1.0], [2.0]]))
    inputs.append(torch.tensor([[3.0]]))
    assert added_rows(inputs.rows, inputs.count, steps).flatten().tolist() == [1, 2, 3, 9]
    assert [inputs.is_ready(n) for n in (0, 3, 4)] == [True, True, False]
    inputs.ended = True
    assert inputs.is_ready(4)


def test_a_ring_of_few_places_is_filled_as_its_outputs_pass() -> None:
    ring = AddedRows(3, 4, torch.zeros(1, 2))
    inputs = ArrivingInput(torch.tensor([-1.0, -1.0]))
    inputs.append(torch.arange(20.0).view(10, 2))
    inputs.ended = True
    request = Request("a", Prompt(torch.zeros(3, 1)), 20, inputs=inputs)
    request.row = 1
    read = []
    for launched in range(14):
        request.launched = launched
        ring.follow(request, began=launched == 0)
        ring.flush()
        if launched:
            read.append(ring.of(torch.tensor([1, 0]), torch.tensor([launched - 1, launched - 1])).tolist())
    assert [row for row, _ in read] == [[2.0 * i, 2.0 * i + 1] for i in range(10)] + [[-1.0, -1.0]] * 3
    assert [row for _, row in read] == [[0.0, 0.0]] * 13
    other = Request("b", Prompt(torch.zeros(3, 1)), 20)
    other.row = 1
    ring.follow(other, began=True)
    ring.flush()
    assert ring.of(torch.tensor([1, 1]), torch.tensor([0, 5])).tolist() == [[0.0, 0.0]] * 2
