"""Hidden states that an engine hands on, against those of transformers' own forward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sgl_omni.engine.engine import AutoregressiveEngine, EngineSettings
from sgl_omni.engine.model import CausalModel
from sgl_omni.engine.task import InputSpec, TokenTask
from sgl_omni.errors import InvalidRequest, StartupError

LENGTHS = (5, 17, 33, 9)
OUTPUTS = 16
TOLERANCE = 2e-5


def engine_for(model: CausalModel, device_rows: bool = False, **settings: Any) -> AutoregressiveEngine:
    inputs = InputSpec(vocab_sizes=(131,), hidden_size=32)
    task = TokenTask(inputs, kept_layers=model.kept_layers)
    options = EngineSettings(**{"page_size": 1, **settings})
    return AutoregressiveEngine.build(model, task, options, max_positions=128, device_rows=device_rows)


BOTH_RUNNERS = pytest.mark.parametrize("device_rows", [False, True], ids=["at-once", "ahead"])


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 131, (n,), generator=generator).tolist() for n in LENGTHS]


@BOTH_RUNNERS
@pytest.mark.parametrize("pool", [400, 60])
@pytest.mark.parametrize("chunk", [7, 2048])
def test_each_row_comes_once_with_its_tokens(
    tiny_qwen3: Any, churn: Any, pool: int, chunk: int, device_rows: bool
) -> None:
    model = CausalModel.load(tiny_qwen3.folder, kept_layers=[2, 0])
    engine = engine_for(model, device_rows, max_total_tokens=pool, chunked_prefill_tokens=chunk)
    asked: dict[str, list[int]] = {"last": [-1], "layers": [0, 2, -1]}
    payloads = {
        f"{i} {name}": {"prompt_ids": prompt, "max_new_tokens": OUTPUTS, "hidden_states": layers}
        for i, prompt in enumerate(prompts())
        for name, layers in asked.items()
    }
    seen = churn(engine, payloads, f"{pool} {chunk}")
    assert (engine.stats()["retractions"] > 0) == (pool < 400)
    for name, payload in payloads.items():
        tokens = seen[name].result["token_ids"]
        prompt: list[int] = payload["prompt_ids"]
        assert [t for part in seen[name].chunks for t in part["token_ids"]] == tokens
        with torch.no_grad():
            reference = tiny_qwen3.reference(torch.tensor([prompt + tokens[:-1]]), output_hidden_states=True)
        expected = torch.stack([reference.hidden_states[i][0] for i in payload["hidden_states"]], 1)
        rows = seen[name].joined("hidden_states")
        assert rows.shape == expected.shape
        assert (rows - expected).abs().max() / expected.abs().max() < TOLERANCE
        assert len(seen[name].chunks[0]["hidden_states"]) == len(prompt)
        assert all(len(part["hidden_states"]) == 1 for part in seen[name].chunks[1:])
        assert reference.logits[0, len(prompt) - 1 :].argmax(-1).tolist() == tokens


@BOTH_RUNNERS
def test_a_prefix_that_is_known_is_run_again_for_its_hidden_states(
    tiny_qwen3: Any, churn: Any, device_rows: bool
) -> None:
    engine = engine_for(CausalModel.load(tiny_qwen3.folder), device_rows, max_total_tokens=400)
    payload = {"prompt_ids": prompts()[2], "max_new_tokens": 3}
    seen = churn(engine, {"plain": payload}, "")
    seen |= churn(engine, {"hidden": {**payload, "hidden_states": [-1]}}, "")
    assert seen["hidden"].result == seen["plain"].result
    assert len(seen["hidden"].joined("hidden_states")) == 33 + 2


@pytest.mark.parametrize("layers", [[1], [-1, 5], [], "last", [None]])
def test_a_layer_that_is_not_kept_is_refused(tiny_qwen3: Any, layers: Any) -> None:
    engine = engine_for(CausalModel.load(tiny_qwen3.folder, kept_layers=[2]), max_total_tokens=64)
    with pytest.raises(InvalidRequest, match=r"hidden.state"):
        engine.add("bad", {"prompt_ids": [1], "hidden_states": layers})


def test_a_layer_that_does_not_exist_is_refused_at_the_start(tiny_qwen3: Any) -> None:
    with pytest.raises(StartupError, match=r"layers 0\.\.2, not 3"):
        CausalModel.load(tiny_qwen3.folder, kept_layers=[3])
