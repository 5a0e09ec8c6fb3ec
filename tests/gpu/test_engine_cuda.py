"""The engine on a GPU: its kernels against plain torch, and its tokens against transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_kernels import (
    CONVOLUTIONS,
    check_add_norm,
    check_added,
    check_attention,
    check_bits,
    check_causal,
    check_convolution,
    check_fixed_places,
    check_moe,
    check_penalty,
    check_places,
    check_sampling,
    check_silu_mul,
    check_state,
    difference,
)
from test_engine_parity import OUTPUTS, VOCABULARY, Family, build, run, step
from test_engine_requests import frames_of

from sgl_omni.engine.engine import AutoregressiveEngine, EngineSettings
from sgl_omni.engine.kernels import linear
from sgl_omni.engine.model import CausalModel
from sgl_omni.engine.task import InputSpec, TokenTask

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
NAMES = ("llama", "qwen2", "qwen3", "mistral-window", "qwen3-moe", "qwen2-moe-shared")
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


@pytest.mark.parametrize(
    ("dtype", "heads"),
    [(torch.float32, (6, 2, 24)), (torch.bfloat16, (32, 8, 128)), (torch.bfloat16, (14, 2, 64))],
    ids=str,
)
@pytest.mark.parametrize("tiled", [False, True])
def test_paged_attention(dtype: torch.dtype, heads: tuple[int, int, int], tiled: bool) -> None:
    for window in (None, 9):
        for splits in (None, 1, 5):
            off = check_attention("cuda", dtype, window=window, tiled=tiled, splits=splits, heads=heads)
            assert off < TOLERANCE[dtype], (window, splits)


@pytest.mark.parametrize("rows", [1, 2, 16, 24, 32, 40, 64])
@pytest.mark.parametrize(("outputs", "inputs"), [(2560, 4096), (6144, 2560), (1024, 512), (384, 576)])
def test_products_of_few_rows(rows: int, outputs: int, inputs: int) -> None:
    """Against float64: as near as the library's own product is, whose sums are rounded as often."""
    torch.manual_seed(0)
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(2 * outputs, inputs, device="cuda", dtype=torch.bfloat16) * 0.05
    assert linear.is_few_rows(x, weight)
    exact = x.double() @ weight.double().T
    assert difference(linear.partial_linear(x, weight).sum(0), exact) < 1e-5
    gate, up = exact.chunk(2, -1)
    assert difference(linear.gated_linear(x, weight), torch.nn.functional.silu(gate) * up) < 2e-2


def test_a_product_in_two_halves() -> None:
    x = torch.randn(100, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(2560, 4096, device="cuda", dtype=torch.bfloat16) * 0.05
    assert linear.is_split_well(x, weight)
    assert difference(linear.halved_linear(x, weight).sum(0), x.double() @ weight.double().T) < 1e-5


def test_both_ends_of_a_step() -> None:
    check_state("cuda")
    check_bits("cuda")


@DTYPES
def test_what_has_arrived_is_added(dtype: torch.dtype) -> None:
    assert check_added("cuda", dtype) < TOLERANCE[dtype]


@DTYPES
@pytest.mark.parametrize("splits", [1, 3])
def test_attention_over_an_encoders_output(dtype: torch.dtype, splits: int) -> None:
    assert check_places("cuda", dtype, splits) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("dtype", "heads", "options"),
    [
        (torch.float32, (6, 2, 24), {}),
        (torch.float32, (4, 4, 8), {"has_norms": False, "neighbours": True}),
        (torch.bfloat16, (16, 8, 128), {"parts": 2, "length": 16}),
        (torch.bfloat16, (8, 2, 128), {"has_norms": False, "parts": 4, "length": 40}),
        (torch.bfloat16, (20, 20, 128), {"has_norms": False, "neighbours": True, "length": 16}),
    ],
    ids=str,
)
def test_attention_over_fixed_places(dtype: torch.dtype, heads: tuple[int, int, int], options: dict[str, Any]) -> None:
    assert check_fixed_places("cuda", dtype, heads, **options) < TOLERANCE[dtype]


def test_frames_equal_those_of_the_cpu() -> None:
    """Greedy and random requests, delays, limits and ends, through graphs and a pool that overflows."""
    settings = {"max_total_tokens": 120, "page_size": 2, "chunked_prefill_tokens": 2}
    assert frames_of(True, abort=False, device="cuda", **settings) == frames_of(False, abort=False, **settings)


@DTYPES
@pytest.mark.parametrize("width", [96, 100, 2560, 9728])
def test_elementwise(dtype: torch.dtype, width: int) -> None:
    assert check_add_norm("cuda", dtype, width) < TOLERANCE[dtype]
    assert check_silu_mul("cuda", dtype, width) < TOLERANCE[dtype]


@DTYPES
@pytest.mark.parametrize("rows", [1, 7, 64, 300])
@pytest.mark.parametrize("hidden", [72, 2048])
def test_experts(dtype: torch.dtype, rows: int, hidden: int) -> None:
    within = TOLERANCE[dtype] * max(1, hidden / 512)  # the reference rounds its sums in another order
    for experts, choices in ((4, 1), (16, 2), (64, 8)):
        off = check_moe("cuda", dtype, rows=rows, experts=experts, choices=choices, hidden=hidden)
        assert off < within, (experts, choices)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.float16, 1e-2)], ids=str)
@pytest.mark.parametrize("which", range(len(CONVOLUTIONS)))
def test_convolutions(dtype: torch.dtype, most: float, which: int) -> None:
    module, inputs, length = CONVOLUTIONS[which]
    assert check_convolution("cuda", dtype, module, inputs, length) < most


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.float16, 1e-2)], ids=str)
def test_convolutions_that_begin_with_their_past(dtype: torch.dtype, most: float) -> None:
    assert check_causal("cuda", dtype) < most


@DTYPES
@pytest.mark.parametrize("vocabulary", [50, 1026, 5000, 51866, 151936])
def test_sampling(vocabulary: int, dtype: torch.dtype) -> None:
    chosen, expected = check_sampling("cuda", vocabulary, dtype)
    assert (chosen != expected).sum() <= 1  # a sum that rounds otherwise may move one id over the edge


@DTYPES
def test_penalties_of_repetition(dtype: torch.dtype) -> None:
    check_penalty("cuda", 151936, dtype)


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Family]:
    return {name: build(name, tmp_path_factory.mktemp(name)) for name in NAMES}


def cuda_engine(folder: Path, **settings: object) -> AutoregressiveEngine:
    model = CausalModel.load(folder, "cuda")
    task = TokenTask(InputSpec(vocab_sizes=(VOCABULARY,), hidden_size=model.config.hidden_size))
    options = EngineSettings.parse({"max_total_tokens": 1024, "page_size": 4, **settings})
    return AutoregressiveEngine.build(model, task, options, max_positions=model.config.max_positions)


@pytest.mark.parametrize("graphs", [0, 8])
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_equal_generate(families: dict[str, Family], name: str, graphs: int) -> None:
    family = families[name]
    engine = cuda_engine(family.folder, cuda_graph_max_bs=graphs, max_running_requests=8)
    for i, prompt in enumerate(family.prompts):
        engine.add(str(i), {"prompt_ids": prompt, "max_new_tokens": OUTPUTS})
    results = run(engine)
    assert [results[str(i)] for i in range(len(family.prompts))] == family.expected


@pytest.mark.parametrize("chunk", [5, 64, 2048])
@pytest.mark.parametrize("pool", [84, 160, 400])
def test_tight_pools_random_arrivals_and_aborts_change_no_token(
    families: dict[str, Family], pool: int, chunk: int
) -> None:
    family, rng = families["qwen3"], random.Random(pool + chunk)
    engine = cuda_engine(family.folder, max_total_tokens=pool, chunked_prefill_tokens=chunk, max_running_requests=8)
    arrivals = [(i, copy) for i in range(len(family.prompts)) for copy in ("kept", "aborted")] * 3
    arrivals = [(i, f"{copy} {n}") for n, (i, copy) in enumerate(arrivals)]
    rng.shuffle(arrivals)
    names = [(i, copy) for i, copy in arrivals if copy.startswith("kept")]
    results: dict[str, list[int]] = {}
    doomed: list[str] = []
    while arrivals or engine.has_work:
        for _ in range(min(len(arrivals), rng.choice([0, 1, 3]))):
            i, copy = arrivals.pop()
            engine.add(f"{i} {copy}", {"prompt_ids": family.prompts[i], "max_new_tokens": OUTPUTS})
            doomed += [f"{i} {copy}"] * copy.startswith("aborted")
        if engine.has_work:
            step(engine, results)
        if doomed and rng.random() < 0.3:
            engine.abort(doomed.pop(rng.randrange(len(doomed))))
    assert [results[f"{i} {copy}"] for i, copy in names] == [family.expected[i] for i, _ in names]
    assert engine.stats()["kv_used_tokens"] == 0
