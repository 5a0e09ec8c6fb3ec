"""What an engine refuses, for that request alone, and what its stage sees."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from sgl_omni.engine.decoder_config import DecoderConfig
from sgl_omni.engine.delay import DelayPattern
from sgl_omni.engine.engine import AutoregressiveEngine, EngineSettings
from sgl_omni.engine.interface import Engine, EngineOutput
from sgl_omni.engine.model import CausalModel, StepModel, embed_rows
from sgl_omni.engine.output_rows import OutputRows
from sgl_omni.engine.request import Chunk, Request
from sgl_omni.engine.rope_config import RopeConfig
from sgl_omni.engine.sampler import seed_key
from sgl_omni.engine.task import FrameTask, HandOver, InputSpec, TokenTask
from sgl_omni.errors import InvalidRequest, NotFinite, StartupError

pytestmark = pytest.mark.usefixtures("one_thread")

COLUMNS, CODES, EOS, PAD = 3, 10, 10, 11


def tiny_model(columns: int = 1, vocabulary: int = 12) -> CausalModel:
    torch.manual_seed(1)
    config = DecoderConfig(
        hidden_size=16,
        intermediate_size=24,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        norm_eps=1e-6,
        rope=RopeConfig(theta=10000.0),
        windows=(None, None),
        sparse=(False, False),
        vocab_size=vocabulary,
    )
    offsets = [column * vocabulary for column in range(columns)]
    model = CausalModel(config, columns=columns, column_offsets=offsets, embedding_rows=columns * vocabulary)
    for name, parameter in model.named_parameters():
        parameter.data.uniform_(0.5, 1.5) if "norm" in name else parameter.data.normal_(0, 0.4)
    return model


def token_engine() -> AutoregressiveEngine:
    task = TokenTask(InputSpec(vocab_sizes=(12,), hidden_size=16))
    return AutoregressiveEngine.build(tiny_model(), task, EngineSettings(max_total_tokens=64, page_size=4))


def frame_engine(model: StepModel | None = None, **settings: Any) -> AutoregressiveEngine:
    task = FrameTask(InputSpec(vocab_sizes=(12,) * COLUMNS, hidden_size=16), DelayPattern.staircase(COLUMNS, EOS, PAD))
    options = EngineSettings(**{"max_total_tokens": 64, "page_size": 4, **settings})
    return AutoregressiveEngine.build(model or tiny_model(COLUMNS), task, options)


def run(engine: Engine) -> dict[str, tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Chunks and result by request."""
    chunks: dict[str, list[dict[str, Any]]] = {}
    results: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {}
    while engine.has_work:
        for output in engine.step():
            chunks.setdefault(output.request_id, []).extend(output.chunks)
            if output.result is not None:
                results[output.request_id] = (chunks[output.request_id], output.result)
    return results


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "larger than the pool": ({"prompt_ids": [1] * 60, "max_new_tokens": 6}, "the KV pool has 64"),
    "empty prompt": ({"prompt_ids": []}, "the prompt is empty"),
    "no prompt": ({}, "either ids or embeddings"),
    "two prompts": ({"prompt_ids": [1], "prompt_embeddings": torch.zeros(1, 16)}, "either ids or embeddings"),
    "empty embeddings": ({"prompt_embeddings": torch.zeros(0, 16)}, "at least one row"),
    "embeddings of another width": ({"prompt_embeddings": torch.zeros(3, 8)}, "16"),
    "id too large": ({"prompt_ids": [1, 12]}, "id 12 is not one of 0..11"),
    "id below zero": ({"prompt_ids": [1, -1]}, "id -1 is not one of 0..11"),
    "ids that are no numbers": ({"prompt_ids": ["a"]}, "whole numbers"),
    "ids of unequal rows": ({"prompt_ids": [[1], [1, 2]]}, "whole numbers"),
    "several columns for a model of one": ({"prompt_ids": [[1, 2]]}, r"\[length, 1\]"),
    "NaN temperature": ({"prompt_ids": [1], "temperature": math.nan}, "temperature must be 0 or more"),
    "infinite temperature": ({"prompt_ids": [1], "temperature": math.inf}, "temperature must be 0 or more"),
    "temperature beyond any number": ({"prompt_ids": [1], "temperature": 10**400}, "too large"),
    "id beyond any number": ({"prompt_ids": [2**64]}, "whole numbers"),
    "negative temperature": ({"prompt_ids": [1], "temperature": -1.0}, "temperature must be 0 or more"),
    "negative length": ({"prompt_ids": [1], "max_new_tokens": -5}, "at least one output"),
    "length of zero": ({"prompt_ids": [1], "max_new_tokens": 0}, "at least one output"),
    "length that is no number": ({"prompt_ids": [1], "max_new_tokens": "5"}, "must be a whole number"),
    "negative top_k": ({"prompt_ids": [1], "top_k": -2}, "top_k"),
    "top_p of zero": ({"prompt_ids": [1], "top_p": 0.0}, "top_p"),
    "NaN top_p": ({"prompt_ids": [1], "top_p": math.nan}, "top_p"),
    "seed that is no number": ({"prompt_ids": [1], "seed": 1.5}, "seed must be a whole number"),
    "negative positions": ({"prompt_ids": [1], "positions": [[-1]]}, "positions must be 0 or more"),
    "positions of another length": ({"prompt_ids": [1], "positions": [[0, 1]]}, r"\[axes, length\]"),
    "positions of other axes": ({"prompt_ids": [1], "positions": [[0], [0]]}, "1 axes"),
}


@pytest.mark.parametrize("ids", [[], [12], [[1, 2]], ["a"]])
def test_ids_are_refused_by_the_name_that_the_caller_has_for_them(ids: Any) -> None:
    for said, param in (({}, "prompt_ids"), ({"prompt_field": "prompt"}, "prompt")):
        with pytest.raises(InvalidRequest) as refused:
            token_engine().add("bad", {"prompt_ids": ids, **said})
        assert refused.value.param == param


@pytest.mark.parametrize("rows", [torch.full((2, 16), math.nan), np.full((2, 16), 1e300)])
def test_embeddings_that_are_no_numbers_are_not_the_callers_fault(rows: Any) -> None:
    engine = token_engine()
    with pytest.raises(NotFinite, match="the prompt's embeddings are not all finite"):
        engine.add("bad", {"prompt_embeddings": rows})
    assert not engine.has_work


@pytest.mark.parametrize("device_rows", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_request_whose_logits_are_no_numbers_fails_and_its_neighbours_go_on(bad: float, device_rows: bool) -> None:
    task = TokenTask(InputSpec(vocab_sizes=(12,), hidden_size=16))
    model = tiny_model()
    settings = EngineSettings(max_total_tokens=64, page_size=4)
    engine = AutoregressiveEngine.build(model, task, settings, device_rows=device_rows)
    prompt = {"prompt_embeddings": torch.full((3, 16), 0.5), "max_new_tokens": 4}
    engine.add("good", prompt)
    ((_, expected),) = run(engine).values()
    with torch.no_grad():
        model.embedding.weight[5] = bad
    engine.add("good", prompt)
    engine.add("bad", {"prompt_ids": [1, 2, 5], "max_new_tokens": 4})
    outputs: list[EngineOutput] = []
    while engine.has_work:
        outputs += engine.step()
    assert [(each.request_id, str(each.error)) for each in outputs if each.error is not None] == [
        ("bad", "the logits are not all finite: the model's weights may be damaged")
    ]
    assert [(each.request_id, each.result) for each in outputs if each.result is not None] == [("good", expected)]
    assert engine.stats()["kv_used_tokens"] == 0
    engine.add("bad", {"prompt_ids": [1, 2, 5] * 19, "max_new_tokens": 4})
    assert run(engine) == {}
    for name in ("on pages", "that it had"):
        engine.add(name, prompt)
    assert [result for _, result in run(engine).values()] == [expected, expected]


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_never_be_served_is_refused_for_that_request_alone(case: str) -> None:
    payload, message = REFUSED[case]
    engine = token_engine()
    engine.add("good", {"prompt_ids": [1, 2, 3], "max_new_tokens": 5})
    with pytest.raises(InvalidRequest, match=message):
        engine.add("bad", payload)
    results = run(engine)
    assert list(results) == ["good"]
    assert results["good"][1]["output_tokens"] == 5
    assert engine.stats()["kv_used_tokens"] == 0


@pytest.mark.parametrize(
    "rows",
    [
        np.ones((2, 16), dtype=object),
        torch.ones(2, 16, device="meta"),
        np.ones((2, 15), dtype=np.float32),
    ],
    ids=["objects", "no storage", "width"],
)
def test_embeddings_that_cannot_be_used_are_refused(rows: Any) -> None:
    engine = token_engine()
    with pytest.raises(InvalidRequest):
        engine.add("a", {"prompt_embeddings": rows, "max_new_tokens": 2})
    assert not engine.has_work


@pytest.mark.parametrize("device_rows", [False, True])
def test_arrays_of_any_layout_and_any_temperature_are_served(device_rows: bool) -> None:
    task = TokenTask(InputSpec(vocab_sizes=(12,), hidden_size=16))
    engine = AutoregressiveEngine.build(
        tiny_model(), task, EngineSettings(max_total_tokens=64, page_size=4), device_rows=device_rows
    )
    rows = np.random.default_rng(0).standard_normal((3, 16)).astype(">f4")
    for name, given in {"plain": rows.astype(np.float32), "odd": rows, "turned": rows[::-1][::-1]}.items():
        engine.add(name, {"prompt_embeddings": given, "max_new_tokens": 4})
    engine.add("hot", {"prompt_ids": [1], "max_new_tokens": 4, "temperature": 1e300, "seed": 1})
    results = run(engine)
    tokens = {name: result["token_ids"] for name, (_, result) in results.items()}
    assert tokens["plain"] == tokens["odd"] == tokens["turned"]
    assert len(tokens["hot"]) == 4


def test_an_id_is_taken_once_at_a_time() -> None:
    engine = token_engine()
    engine.add("a", {"prompt_ids": [1, 2], "max_new_tokens": 2})
    with pytest.raises(InvalidRequest, match="'a' is here already"):
        engine.add("a", {"prompt_ids": [3], "max_new_tokens": 2})
    assert len(run(engine)["a"][1]["token_ids"]) == 2
    engine.add("a", {"prompt_ids": [3], "max_new_tokens": 1})
    assert len(run(engine)["a"][1]["token_ids"]) == 1


def test_tokens_are_streamed_where_that_is_asked_for() -> None:
    engine = token_engine()
    engine.add("streamed", {"prompt_ids": [1, 2], "max_new_tokens": 4, "stream": True})
    engine.add("whole", {"prompt_ids": [1, 2], "max_new_tokens": 4})
    results = run(engine)
    chunks, result = results["streamed"]
    assert [token for chunk in chunks for token in chunk["token_ids"]] == result["token_ids"]
    assert len(chunks) == 4
    assert results["whole"] == ([], result)
    assert (result["finish_reason"], result["input_tokens"], result["output_tokens"]) == ("length", 2, 4)


class Scripted(CausalModel):
    """Ends the audio at a given row."""

    ends_at = 5

    def rule(self, logits: torch.Tensor, requests: Any) -> torch.Tensor:
        logits = logits.clone()
        logits[..., CODES:] = -math.inf
        for row, request in enumerate(requests):
            if len(request.outputs) == self.ends_at:
                logits[row, 0, EOS] = math.inf
        return logits


def scripted(ends_at: int = 5) -> Scripted:
    model = tiny_model(COLUMNS)
    model.__class__ = Scripted
    assert isinstance(model, Scripted)
    model.ends_at = ends_at
    return model


def test_frames_of_summed_codebooks_come_out_of_their_delay_pattern() -> None:
    engine = frame_engine(scripted())
    engine.add("a", {"prompt_ids": [[1, 2, 3], [4, 5, 6]], "max_frames": 20})
    chunks, result = run(engine)["a"]
    codes = np.concatenate([chunk["codes"] for chunk in chunks])
    assert codes.shape == (5, COLUMNS)
    assert codes.max() < CODES
    assert [len(chunk["codes"]) for chunk in chunks] == [1] * 5  # each as soon as its last codebook is known
    assert result == {"finish_reason": "stop", "input_tokens": 2, "output_tokens": 5}


def test_the_frame_limit_cuts_audio() -> None:
    engine = frame_engine(scripted())
    engine.add("a", {"prompt_ids": [[1, 2, 3]], "max_frames": 4})
    chunks, result = run(engine)["a"]
    assert sum(len(chunk["codes"]) for chunk in chunks) == 4
    assert (result["finish_reason"], result["output_tokens"]) == ("length", 4)


def test_frames_are_the_same_alone_and_in_a_pool_that_overflows() -> None:
    prompts = [[[i, j, 1] for j in range(1 + i // 2)] for i in range(8)]
    alone = []
    for prompt in prompts:
        engine = frame_engine(scripted(8))
        engine.add("a", {"prompt_ids": prompt, "max_frames": 10})
        alone.append(run(engine)["a"])
    engine = frame_engine(scripted(8), max_total_tokens=24, page_size=1, chunked_prefill_tokens=2)
    for i, prompt in enumerate(prompts):
        engine.add(str(i), {"prompt_ids": prompt, "max_frames": 10})
    together = run(engine)
    assert engine.stats()["retractions"] > 0
    for i, (chunks, result) in enumerate(alone):
        expected = np.concatenate([chunk["codes"] for chunk in chunks])
        assert np.array_equal(np.concatenate([chunk["codes"] for chunk in together[str(i)][0]]), expected)
        assert together[str(i)][1] == result


def frames_of(
    device_rows: bool, abort: bool, device: str = "cpu", **settings: Any
) -> dict[str, tuple[list[list[int]], dict[str, Any]]]:
    """Chunks and result of twelve requests, greedy and random ones, with limits and ends at all kinds of rows."""
    model, pattern = tiny_model(COLUMNS).to(device), DelayPattern.staircase(COLUMNS, EOS, PAD)
    model.pattern = pattern
    inputs = InputSpec(vocab_sizes=(12,) * COLUMNS, hidden_size=16)
    options = EngineSettings(**{"max_total_tokens": 400, "page_size": 4, "max_running_requests": 5, **settings})
    task = FrameTask(inputs, pattern, hand_over=HandOver(2, 5))
    engine = AutoregressiveEngine.build(model, task, options, device_rows=device_rows)
    for i in range(12):
        prompt = [[(i + j) % 9, j % 9, 1] for j in range(1 + i % 4)]
        sampling = {"temperature": 0.9, "top_k": 6, "seed": i} if i % 2 else {}
        engine.add(str(i), {"prompt_ids": prompt, "max_frames": 1 + i, **sampling})
    first = [output for _ in range(9) for output in engine.step()]
    if abort:
        engine.abort("1")
        engine.abort("3")
    codes: dict[str, list[list[int]]] = {}
    results: dict[str, tuple[list[list[int]], dict[str, Any]]] = {}
    for output in chain(first, stepping(engine)):
        for chunk in output.chunks:
            codes.setdefault(output.request_id, []).append(chunk["codes"].tolist())
        if output.result is not None:
            results[output.request_id] = (codes.get(output.request_id, []), output.result)
    return results


def stepping(engine: Engine) -> Iterator[EngineOutput]:
    while engine.has_work:
        yield from engine.step()


@pytest.mark.parametrize("abort", [False, True])
@pytest.mark.parametrize("settings", [{}, {"max_total_tokens": 120, "page_size": 2, "chunked_prefill_tokens": 2}])
def test_frames_are_the_same_when_steps_are_launched_ahead(settings: dict[str, Any], abort: bool) -> None:
    at_once = frames_of(False, abort, **settings)
    ahead = frames_of(True, abort, **settings)
    common = at_once.keys() & ahead.keys()
    assert {str(i) for i in range(12) if i not in (1, 3)} <= common
    assert {name: ahead[name] for name in common} == {name: at_once[name] for name in common}
    assert {result["finish_reason"] for _, result in ahead.values()} == {"length", "stop"}


def test_a_pattern_that_the_model_does_not_know_is_refused() -> None:
    task = FrameTask(InputSpec(vocab_sizes=(12,) * COLUMNS, hidden_size=16), DelayPattern.staircase(COLUMNS, EOS, PAD))
    with pytest.raises(StartupError, match="delay pattern"):
        AutoregressiveEngine.build(tiny_model(COLUMNS), task, EngineSettings(max_total_tokens=64), device_rows=True)


class Talking(CausalModel):
    """A talker: one column is sampled, the others come from its hidden state; text is added to what it hears."""

    def embed(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        x = embed_rows(self, chunks)
        place = torch.tensor([i - c.request.prompt_length for c in chunks for i in range(c.start, c.stop)])
        return x + (place.clamp(min=-1) + 1)[:, None] * 0.05

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().logits(hidden)[:, :1, :CODES]

    def complete(self, rows: torch.Tensor, hidden: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
        others = super().logits(hidden)[:, 1:, :CODES].argmax(-1)
        return torch.cat([rows, (others + rows) % CODES], 1)


def talking_engine(**settings: Any) -> AutoregressiveEngine:
    model = tiny_model(COLUMNS)
    model.__class__ = Talking
    inputs = InputSpec(vocab_sizes=(12,) * COLUMNS, hidden_size=16)
    task = FrameTask(inputs, DelayPattern((0,) * COLUMNS, EOS, PAD))
    options = EngineSettings(**{"max_total_tokens": 64, "page_size": 1, **settings})
    return AutoregressiveEngine.build(model, task, options)


def test_a_talkers_own_inputs_and_predicted_columns_survive_retraction() -> None:
    prompts = [torch.randn(2 + i, 16, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    alone = []
    for prompt in prompts:
        engine = talking_engine()
        engine.add("a", {"prompt_embeddings": prompt, "max_frames": 9})
        alone.append(run(engine)["a"])
    engine = talking_engine(max_total_tokens=22, chunked_prefill_tokens=3)
    for i, prompt in enumerate(prompts):
        engine.add(str(i), {"prompt_embeddings": prompt, "max_frames": 9})
    together = run(engine)
    assert engine.stats()["retractions"] > 0
    for i, (chunks, result) in enumerate(alone):
        frames = np.concatenate([chunk["codes"] for chunk in chunks])
        assert frames.shape == (9, COLUMNS)
        assert result == together[str(i)][1] == {"finish_reason": "length", "input_tokens": 2 + i, "output_tokens": 9}
        assert np.array_equal(np.concatenate([chunk["codes"] for chunk in together[str(i)][0]]), frames)


def test_a_delay_pattern_fills_what_has_no_code() -> None:
    pattern = DelayPattern.staircase(3, EOS, PAD)
    rows = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 1, 1], [2, 2, 2]]
    for step, row in enumerate(rows):
        pattern.fill(row, step, end=2 if step >= 2 else None)
    assert rows == [[1, PAD, PAD], [4, 5, PAD], [EOS, 8, 9], [PAD, PAD, 1], [PAD, PAD, PAD]]
    assert [pattern.known_frames(n, None) for n in range(5)] == [0, 0, 0, 1, 2]
    assert pattern.known_frames(5, end=2) == 2
    assert pattern.frames(OutputRows(rows), 0, 2).tolist() == [[1, 5, 9], [4, 8, 1]]


@pytest.mark.parametrize("seed", [0, 2**63 + 5, -7])
def test_a_seed_gives_the_same_tokens_whatever_the_batch(seed: int) -> None:
    payload = {"prompt_ids": [1, 2, 3], "max_new_tokens": 12, "temperature": 0.9, "top_k": 8, "top_p": 0.95}
    engine = token_engine()
    engine.add("alone", {**payload, "seed": seed})
    alone = run(engine)["alone"][1]["token_ids"]
    for i in range(6):
        engine.add(f"other {i}", {**payload, "temperature": 0.3 * i, "seed": i})
    engine.add("among others", {**payload, "seed": seed})
    results = run(engine)
    assert engine.stats()["retractions"] > 0
    assert results["among others"][1]["token_ids"] == alone
    assert len({tuple(result["token_ids"]) for _, result in results.values()}) > 4


def test_extreme_options_disturb_nobody() -> None:
    engine = token_engine()
    engine.add("good", {"prompt_ids": [1, 2, 3], "max_new_tokens": 5})
    alone = run(engine)["good"][1]
    extreme = {"top_k": 10**30, "seed": -(10**30), "top_p": 1e-300}
    for i, temperature in enumerate([1e-300, 1e300]):
        engine.add(str(i), {"prompt_ids": [1], "max_new_tokens": 5, "temperature": temperature, **extreme})
    engine.add("good", {"prompt_ids": [1, 2, 3], "max_new_tokens": 5})
    results = run(engine)
    assert results["good"][1] == alone
    assert len(results) == 3


def test_without_a_seed_two_requests_differ() -> None:
    engine = token_engine()
    for name in ("a", "b"):
        engine.add(name, {"prompt_ids": [1], "max_new_tokens": 24, "temperature": 3.0})
    results = run(engine)
    assert results["a"][1]["token_ids"] != results["b"][1]["token_ids"]


def test_the_batch_invariant_mode_gives_the_same_bits_in_every_batch() -> None:
    seen: dict[int, list[bytes]] = {}

    class Recording(CausalModel):
        def rule(self, logits: torch.Tensor, requests: Any) -> torch.Tensor:
            for row, request in enumerate(requests):
                if request.prompt_length == 7:
                    seen.setdefault(len(request.outputs), []).append(logits[row].numpy().tobytes())
            return logits

    model = tiny_model()
    model.__class__ = Recording
    task = TokenTask(InputSpec(vocab_sizes=(12,), hidden_size=16))
    options = EngineSettings(max_total_tokens=400, group_rows=4, chunked_prefill_tokens=5)
    for others in (0, 2, 7):
        engine = AutoregressiveEngine.build(model, task, options)
        for i in range(others):
            engine.add(str(i), {"prompt_ids": [i] * (i + 1 + (i >= 6)), "max_new_tokens": 9})
        engine.add("watched", {"prompt_ids": [1, 2, 3, 4, 5, 6, 7], "max_new_tokens": 9})
        run(engine)
    assert sorted(seen) == list(range(9))
    assert all(len(bits) == 3 and len(set(bits)) == 1 for bits in seen.values())


def test_settings_come_from_the_stage_and_what_is_left_out_keeps_its_default() -> None:
    section = {"max_total_tokens": 512, "kv_cache_bytes": None, "max_running_requests": 4, "cuda_graph_max_bs": 8}
    settings = EngineSettings.parse(section, page_size=1)
    assert (settings.max_total_tokens, settings.page_size, settings.max_running_requests) == (512, 1, 4)
    with pytest.raises(StartupError, match="nothing says how large the KV pool is"):
        EngineSettings.parse({}).pages(tiny_model().kv_shape, torch.device("cpu"))


@pytest.mark.parametrize(
    "setting", [{"group_rows": 0}, {"group_rows": -1}, {"page_size": 1.5}, {"max_total_tokens": "96"}], ids=str
)
def test_settings_that_mean_nothing_are_named(setting: dict[str, Any]) -> None:
    (key,) = setting
    with pytest.raises(StartupError, match=f"engine.{key} must be a whole number"):
        EngineSettings.parse(setting)


def test_seeds_of_any_size_and_sign_draw_differently() -> None:
    seeds = [0, 1, -1, 2**63 - 1, 2**63, 2**63 + 1, 2**64, 2**64 + 1, -(2**63), 10**40]
    keys = [seed_key(seed) for seed in seeds]
    assert len(set(keys)) == len(seeds)
    assert all(0 <= key < 2**32 for key in keys)
