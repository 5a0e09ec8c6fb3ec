"""Rows that stand in a prompt instead of ids, and rows that are added between layers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from sgl_omni.engine.attention import AttentionSpan, TorchAttention
from sgl_omni.engine.engine import AutoregressiveEngine, EngineSettings
from sgl_omni.engine.inserted import LayerRows
from sgl_omni.engine.kv_cache import KVCache
from sgl_omni.engine.model import CausalModel
from sgl_omni.engine.request import Prompt
from sgl_omni.engine.task import InputSpec, TokenTask
from sgl_omni.errors import InvalidRequest, NotFinite

OUTPUTS, WIDTH, VOCABULARY = 10, 32, 131
SPEC = InputSpec(vocab_sizes=(VOCABULARY,), hidden_size=WIDTH, levels=2)
BOTH_RUNNERS = pytest.mark.parametrize("device_rows", [False, True], ids=["at-once", "ahead"])


@pytest.fixture(scope="module")
def model(tiny_qwen3: Any) -> CausalModel:
    return CausalModel.load(tiny_qwen3.folder)


def payload_of(seed: int, length: int = 17, places: int = 6, layered: int = 4, **changes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    at = torch.randperm(length, generator=generator)[:places].sort().values
    return {
        "prompt_ids": torch.randint(0, VOCABULARY, (length,), generator=generator),
        "inserted_at": at,
        "inserted_embeddings": torch.randn(places, WIDTH, generator=generator) * 0.5,
        "layered_at": at[:layered],
        "layered_embeddings": torch.randn(2, layered, WIDTH, generator=generator) * 10,
        "max_new_tokens": OUTPUTS,
        **changes,
    }


@torch.inference_mode()
def by_hand(model: CausalModel, payload: dict[str, Any]) -> list[int]:
    """All rows through the model again for each token; the rows that are not ids are put in here."""
    x = model.embed_ids(payload["prompt_ids"][:, None]).clone()
    x[payload["inserted_at"]] = payload["inserted_embeddings"]
    added = LayerRows(payload["layered_at"], payload["layered_embeddings"])
    tokens: list[int] = []
    for length in itertools.count(len(x)):
        cache = KVCache(model.kv_shape, num_pages=length, page_size=1)
        attend = TorchAttention().begin(cache, [AttentionSpan(0, length, list(range(length)))])
        hidden = model.forward_adding(x, torch.arange(length)[None], attend, added)
        tokens.append(int(model.logits(hidden[-1:]).argmax()))
        if len(tokens) == OUTPUTS:
            break
        x = torch.cat([x, model.embed_ids(torch.tensor([tokens[-1:]]))])
    return tokens


def engine_of(model: CausalModel, device_rows: bool, **settings: Any) -> AutoregressiveEngine:
    options = EngineSettings(**{"max_total_tokens": 512, "page_size": 4, **settings})
    return AutoregressiveEngine.build(model, TokenTask(SPEC), options, device_rows=device_rows)


@BOTH_RUNNERS
@pytest.mark.parametrize(("pool", "chunk"), [(512, 2048), (512, 3), (44, 5)])
def test_they_reach_the_model_however_the_prompt_is_cut(
    model: CausalModel, churn: Any, pool: int, chunk: int, device_rows: bool
) -> None:
    payloads = {str(i): payload_of(i, 13 + i) for i in range(4)}
    payloads["ids"] = {"prompt_ids": payloads["0"]["prompt_ids"], "max_new_tokens": OUTPUTS}
    engine = engine_of(model, device_rows, max_total_tokens=pool, chunked_prefill_tokens=chunk)
    seen = churn(engine, payloads, f"{pool} {chunk}")
    for name in "0123":
        assert seen[name].result["token_ids"] == by_hand(model, payloads[name])
    assert seen["ids"].result["token_ids"] != seen["0"].result["token_ids"]
    assert (engine.stats()["retractions"] > 0) == (pool < 512)


@BOTH_RUNNERS
def test_what_is_added_between_layers_matters(model: CausalModel, churn: Any, device_rows: bool) -> None:
    whole = payload_of(7)
    without = {k: v for k, v in whole.items() if not k.startswith("layered")}
    seen = churn(engine_of(model, device_rows), {"whole": whole, "without": without}, "")
    assert seen["whole"].result["token_ids"] != seen["without"].result["token_ids"]


@BOTH_RUNNERS
def test_a_page_is_found_again_by_all_that_stands_in_it(model: CausalModel, device_rows: bool) -> None:
    engine = engine_of(model, device_rows)
    first = payload_of(3, 24)
    other_rows = {**first, "inserted_embeddings": first["inserted_embeddings"] * 1.5}
    other_layers = {**first, "layered_embeddings": first["layered_embeddings"] * 1.5}
    reused = []
    for i, payload in enumerate([first, first, other_rows, other_layers]):
        before = engine.stats()["reused_tokens"]
        engine.add(str(i), payload)
        while engine.has_work:
            for output in engine.step():
                if output.result is not None:
                    assert output.result["token_ids"] == by_hand(model, payload)
        reused.append(engine.stats()["reused_tokens"] - before)
    shared = int(first["inserted_at"][0]) // 4 * 4  # pages before the first row that differs
    assert reused == [0, 20, shared, shared]


def test_tags_stand_for_the_rows_where_there_are_any() -> None:
    one, other = payload_of(1), payload_of(1)
    other["inserted_embeddings"] = other["inserted_embeddings"] * 2
    tags = torch.arange(6)
    keys = [SPEC.prompt({**payload, "inserted_tags": tags}).page_keys(17) for payload in (one, other)]
    assert keys[0] == keys[1] != SPEC.prompt(one).page_keys(17)
    assert keys[0] != SPEC.prompt({**one, "inserted_tags": tags + 1}).page_keys(17)


def test_rows_stay_of_their_type() -> None:
    payload = payload_of(0)
    for name in ("inserted_embeddings", "layered_embeddings"):
        payload[name] = payload[name].bfloat16()
    inserted = SPEC.prompt(payload).inserted
    assert inserted is not None
    assert inserted.rows.dtype == inserted.layered.dtype == torch.bfloat16
    assert SPEC.prompt(payload).page_keys(4) != SPEC.prompt(payload_of(0)).page_keys(4)


def test_keys_tell_prompts_apart_from_their_first_difference_on() -> None:
    plain, whole = SPEC.prompt({"prompt_ids": payload_of(1)["prompt_ids"]}), SPEC.prompt(payload_of(1))
    assert whole.page_keys(4) == SPEC.prompt(payload_of(1)).page_keys(4)
    assert plain.page_keys(17) != whole.page_keys(17)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inserted_at": [1, 2, 3, 4, 5]}, "one row a place"),
        ({"inserted_at": [5, 4, 3, 2, 1, 0]}, "ascend"),
        ({"inserted_at": [0, 1, 2, 3, 4, 17]}, "ascend within the prompt's 17 rows"),
        ({"layered_at": [-1, 1, 2, 3]}, "ascend"),
        ({"layered_embeddings": torch.zeros(1, 4, WIDTH)}, "must be of 2 layers, not 1"),
        ({"layered_embeddings": torch.zeros(2, 4, WIDTH + 1)}, "layered_embeddings must be floats"),
        ({"inserted_embeddings": [[0.0]]}, "must be an array"),
        ({"inserted_tags": [1, 2]}, "inserted_tags must be one a place"),
        ({"prompt_ids": None, "prompt_embeddings": torch.zeros(17, WIDTH)}, "inserted among ids"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        SPEC.prompt(payload_of(0, **changes))


def test_inserted_rows_that_are_no_numbers_are_not_the_callers_fault() -> None:
    with pytest.raises(NotFinite, match="inserted_embeddings are not all finite"):
        SPEC.prompt(payload_of(0, inserted_embeddings=torch.full((6, WIDTH), float("nan"))))


def test_a_prompt_that_is_open_takes_no_more_after_inserted_rows() -> None:
    whole, part = SPEC.prompt(payload_of(0)), SPEC.prompt({"prompt_ids": [1, 2]})
    assert not whole.is_like(part)
    assert not part.is_like(whole)
    assert Prompt.join([whole]) is whole
