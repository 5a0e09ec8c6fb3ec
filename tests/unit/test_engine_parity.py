"""The engine against transformers' own classes, on tiny random checkpoints in real format."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from sgl_omni.engine.attention import AttentionSpan, TorchAttention
from sgl_omni.engine.checkpoint import Checkpoint
from sgl_omni.engine.decoder_config import DecoderConfig
from sgl_omni.engine.engine import AutoregressiveEngine, EngineSettings
from sgl_omni.engine.kv_cache import KVCache
from sgl_omni.engine.model import CausalModel
from sgl_omni.engine.task import InputSpec, TokenTask

pytestmark = pytest.mark.usefixtures("one_thread")

transformers = pytest.importorskip("transformers")

VOCABULARY = 131
LENGTHS = (5, 17, 33, 60, 8, 1, 40, 21)
OUTPUTS = 24
LOGITS_TOLERANCE = 2e-5

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.3,  # far from a tie between the two likeliest tokens
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "mistral-window": ("Mistral", {"sliding_window": 9, "head_dim": 16}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1}),
    "qwen2-moe-shared": ("Qwen2Moe", {**MOE, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-yarn": ("Qwen3", {"head_dim": 32, "rope_parameters": YARN_ROPE}),
    "qwen3-moe": ("Qwen3Moe", {**MOE, "head_dim": 16, "norm_topk_prob": True}),
}
THE_FOUR = ("llama", "qwen2", "qwen3", "qwen3-moe")


@dataclass(frozen=True)
class Family:
    folder: Path
    reference: Any
    model: CausalModel
    prompts: list[list[int]]
    expected: list[list[int]]
    """What ``generate`` makes of each prompt."""


@pytest.fixture(scope="module")
def families(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Family]:
    return {name: build(name, tmp_path_factory.mktemp(name)) for name in FAMILIES}


def build(name: str, folder: Path) -> Family:
    torch.manual_seed(sorted(FAMILIES).index(name))
    kind, options = FAMILIES[name]
    config = getattr(transformers, f"{kind}Config")(**SHAPE, **options)
    reference = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():  # biases and norms that do nothing would prove nothing
        for parameter_name, parameter in reference.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5)
    reference.save_pretrained(folder, max_shard_size="30KB")
    prompts = [torch.randint(0, VOCABULARY, (n,)).tolist() for n in LENGTHS]
    expected = [
        reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=OUTPUTS,
            do_sample=False,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    return Family(folder, reference, CausalModel.load(folder), prompts, expected)


def engine_for(model: CausalModel, device_rows: bool = False, **settings: Any) -> AutoregressiveEngine:
    inputs = InputSpec(vocab_sizes=(VOCABULARY,), hidden_size=model.config.hidden_size)
    task = TokenTask(inputs, eos_ids=model.config.eos_ids)
    options = EngineSettings(**{"max_total_tokens": 1024, "page_size": 4, **settings})
    return AutoregressiveEngine.build(
        model, task, options, max_positions=model.config.max_positions, device_rows=device_rows
    )


BOTH_RUNNERS = pytest.mark.parametrize("device_rows", [False, True], ids=["at-once", "ahead"])


def run(engine: AutoregressiveEngine, results: dict[str, list[int]] | None = None) -> dict[str, list[int]]:
    results = {} if results is None else results
    while engine.has_work:
        step(engine, results)
    return results


def step(engine: AutoregressiveEngine, results: dict[str, list[int]]) -> None:
    for output in engine.step():
        assert output.error is None
        if output.result is not None:
            results[output.request_id] = output.result["token_ids"]


@BOTH_RUNNERS
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_equal_generate(families: dict[str, Family], name: str, device_rows: bool) -> None:
    family = families[name]
    engine = engine_for(family.model, device_rows)
    for i, prompt in enumerate(family.prompts):
        engine.add(str(i), {"prompt_ids": prompt, "max_new_tokens": OUTPUTS})
    results = run(engine)
    assert [results[str(i)] for i in range(len(LENGTHS))] == family.expected
    assert len({tuple(tokens) for tokens in family.expected}) == len(LENGTHS)


@BOTH_RUNNERS
@pytest.mark.parametrize("pool", [400, 160, 84])
@pytest.mark.parametrize("chunk", [3, 16, 2048])
@pytest.mark.parametrize("name", THE_FOUR)
def test_tight_pools_chunked_prompts_random_arrivals_and_aborts_change_no_token(
    families: dict[str, Family], name: str, chunk: int, pool: int, device_rows: bool
) -> None:
    family = families[name]
    rng = random.Random(f"{name} {chunk} {pool}")
    engine = engine_for(
        family.model, device_rows, max_total_tokens=pool, page_size=rng.choice([1, 4]), chunked_prefill_tokens=chunk
    )
    arrivals = [(i, copy) for i in range(len(LENGTHS)) for copy in ("kept", "aborted")]
    rng.shuffle(arrivals)
    results: dict[str, list[int]] = {}
    doomed: list[str] = []
    while arrivals or engine.has_work:
        for _ in range(min(len(arrivals), rng.choice([0, 1, 3]))):
            i, copy = arrivals.pop()
            engine.add(f"{i} {copy}", {"prompt_ids": family.prompts[i], "max_new_tokens": OUTPUTS})
            doomed += [f"{i} {copy}"] * (copy == "aborted")
        if engine.has_work:
            step(engine, results)
        if doomed and rng.random() < 0.3:
            engine.abort(doomed.pop(rng.randrange(len(doomed))))
    assert [results[f"{i} kept"] for i in range(len(LENGTHS))] == family.expected
    stats = engine.stats()
    assert (stats["running"], stats["queued"], stats["kv_used_tokens"]) == (0, 0, 0)


@BOTH_RUNNERS
@pytest.mark.parametrize("page_size", [1, 4, 7])
@pytest.mark.parametrize("name", THE_FOUR)
def test_retracted_requests_resume_with_the_same_tokens(
    families: dict[str, Family], name: str, page_size: int, device_rows: bool
) -> None:
    family = families[name]
    engine = engine_for(family.model, device_rows, max_total_tokens=91, page_size=page_size)
    for i, prompt in enumerate(family.prompts):
        engine.add(str(i), {"prompt_ids": prompt, "max_new_tokens": OUTPUTS})
    results = run(engine)
    assert [results[str(i)] for i in range(len(LENGTHS))] == family.expected
    assert engine.stats()["retractions"] > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_within_tolerance(families: dict[str, Family], name: str) -> None:
    family = families[name]
    prompt = family.prompts[3]
    with torch.no_grad():
        expected = family.reference(torch.tensor([prompt])).logits[0]
    cache = KVCache(family.model.kv_shape, num_pages=20, page_size=4)
    pages = random.Random(0).sample(range(20), 20)
    for start, stop in [(0, 23), (23, 24), (24, 60)]:
        attend = TorchAttention().begin(cache, [AttentionSpan(start, stop, pages)])
        x = family.model.embed_ids(torch.tensor(prompt[start:stop])[:, None])
        hidden = family.model(x, torch.arange(start, stop)[None], attend)
        logits = family.model.logits(hidden)[:, 0]
        scale = expected.abs().max()
        assert (logits - expected[start:stop]).abs().max() / scale < LOGITS_TOLERANCE


def test_the_stop_token_ends_a_request(families: dict[str, Family]) -> None:
    family = families["qwen3"]
    stop = family.expected[0][7]
    model = family.model
    task = TokenTask(InputSpec(vocab_sizes=(VOCABULARY,), hidden_size=32), eos_ids=[stop])
    engine = AutoregressiveEngine.build(model, task, EngineSettings(max_total_tokens=256))
    engine.add("stops", {"prompt_ids": family.prompts[0], "max_new_tokens": OUTPUTS})
    engine.add("goes on", {"prompt_ids": family.prompts[0], "max_new_tokens": OUTPUTS, "ignore_eos": True})
    results = run(engine)
    assert results["stops"] == family.expected[0][: family.expected[0].index(stop) + 1]
    assert results["goes on"] == family.expected[0]


@BOTH_RUNNERS
def test_a_prompt_of_embeddings_equals_one_of_ids(families: dict[str, Family], device_rows: bool) -> None:
    family = families["qwen3"]
    engine = engine_for(family.model, device_rows, chunked_prefill_tokens=7, max_total_tokens=90)
    table = family.reference.get_input_embeddings().weight.detach()
    for i, prompt in enumerate(family.prompts):
        engine.add(str(i), {"prompt_embeddings": table[prompt], "max_new_tokens": OUTPUTS})
    results = run(engine)
    assert [results[str(i)] for i in range(len(LENGTHS))] == family.expected


@BOTH_RUNNERS
@pytest.mark.parametrize("kind", ["prompt_ids", "prompt_embeddings"])
def test_a_prefix_is_computed_once(families: dict[str, Family], kind: str, device_rows: bool) -> None:
    family = families["llama"]
    engine = engine_for(family.model, device_rows)
    table = family.reference.get_input_embeddings().weight.detach()
    voice, expected = family.prompts[3], family.expected[3]
    payload = {kind: voice if kind == "prompt_ids" else table[voice], "max_new_tokens": OUTPUTS}
    for name in ("first", "again"):
        engine.add(name, payload)
        assert run(engine)[name] == expected
    assert engine.stats()["reused_tokens"] == 56  # whole pages of 4 below the 60 rows, the last row left to run
    assert engine.stats()["kv_used_tokens"] == 0


def test_a_sharded_checkpoint_was_read(families: dict[str, Family]) -> None:
    files = sorted(path.name for path in families["qwen3-moe"].folder.glob("*.safetensors"))
    assert len(files) > 2
    config = DecoderConfig.parse(Checkpoint(families["qwen3-moe"].folder).config())
    assert config.moe is not None
    assert (config.moe.num_experts, config.moe.experts_per_token, config.qk_norm) == (4, 2, True)
