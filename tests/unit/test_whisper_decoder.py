"""Whisper's decoder and its task against transformers' own class, on a tiny random checkpoint in real format."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sgl_omni.engine.attention import AttentionSpan, TorchAttention
from sgl_omni.engine.cross_attention import SourceAttend, SourcePool, SourceShape, attend_places
from sgl_omni.engine.engine import AutoregressiveEngine, EngineSettings
from sgl_omni.engine.kv_cache import KVCache, KVShape
from sgl_omni.engine.model import StepModel
from sgl_omni.engine.request import Chunk, Prompt, Request
from sgl_omni.errors import InvalidRequest, NotFinite, StartupError
from sgl_omni.models.whisper.decoder import WhisperDecoder
from sgl_omni.models.whisper.rules import next_times, next_times_rows
from sgl_omni.models.whisper.spec import WhisperSpec
from sgl_omni.models.whisper.task import WhisperTask, repeats_itself

pytest.importorskip("transformers")

import tiny_whisper as tiny

LOGITS_TOLERANCE = 2e-5
NO_HISTORY: tuple[int, ...] = ()


@dataclass(frozen=True)
class Whisper:
    """``states``: what transformers' encoder makes of ten noises; ``expected``: what each case says, by window."""

    folder: Path
    reference: Any
    decoder: WhisperDecoder
    states: list[torch.Tensor]
    payloads: dict[str, dict[str, Any]]
    expected: dict[str, list[list[int]]]


CASES: dict[str, tuple[Sequence[int], dict[str, Any]]] = {
    "text": ([3], {"language": "en"}),
    "times": ([4], {"language": "en", "timestamps": True}),
    "detected": ([2], {}),
    "detected with times": ([7], {"timestamps": True}),
    "translated": ([5], {"language": "de", "task": "translate", "timestamps": True}),
    "after a prompt": ([6], {"language": "fr", "history": [40, 41, 50, 60]}),
    "two windows": ([8, 3], {"language": "en", "timestamps": True}),
    "four windows, detected": ([6, 7, 5, 1], {}),
    "five windows, with times": ([5, 9, 7, 6, 3], {"timestamps": True}),
}


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Whisper:
    folder = tmp_path_factory.mktemp("whisper")
    reference = tiny.build(folder)
    extractor = tiny.extractor()
    states = []
    for seed in range(10):
        heard = extractor(tiny.noise(100 + seed, 1.0), sampling_rate=tiny.RATE, return_tensors="np")
        states.append(tiny.states_of(reference, heard.input_features[0]))
    payloads = {name: payload_of([states[i] for i in which], **options) for name, (which, options) in CASES.items()}
    expected = {
        name: tiny.transcribe(reference, [states[i] for i in which], **options)
        for name, (which, options) in CASES.items()
    }
    return Whisper(folder, reference, WhisperDecoder.load(folder), states, payloads, expected)


def payload_of(windows: Sequence[torch.Tensor], **options: Any) -> dict[str, Any]:
    """Each window is a second long."""
    listed = [{"encoder_states": states, "start": float(i), "end": i + 1.0} for i, states in enumerate(windows)]
    return {"windows": listed, **options}


def engine_for(decoder: WhisperDecoder, device_rows: bool = False, **settings: Any) -> AutoregressiveEngine:
    options = EngineSettings(**{"max_total_tokens": 400, "page_size": 1, **settings})
    task = WhisperTask(decoder.spec)
    return AutoregressiveEngine.build(
        decoder, task, options, max_positions=decoder.spec.max_positions, device_rows=device_rows
    )


def said(chunks: Sequence[dict[str, Any]]) -> list[list[int]]:
    """The tokens of each window."""
    windows: list[list[int]] = [[]]
    for chunk in chunks:
        windows[-1] += chunk["token_ids"]
        if chunk["ended"]:
            windows.append([])
    assert windows.pop() == []
    return windows


def without_ends(windows: Sequence[list[int]]) -> list[list[int]]:
    return [[token for token in window if token != tiny.EOS] for window in windows]


BOTH_RUNNERS = pytest.mark.parametrize("device_rows", [False, True], ids=["at-once", "ahead"])


def test_the_cases_differ_and_some_end_by_themselves(whisper: Whisper) -> None:
    windows = [window for case in whisper.expected.values() for window in case]
    assert len({str(window) for window in windows}) > len(windows) - 4
    ended = sum(window[-1] == tiny.EOS for window in windows)
    assert len(windows) / 4 < ended < len(windows)
    assert len({tiny.detect_language(whisper.reference, states) for states in whisper.states}) > 1


def test_the_rules_matter(whisper: Whisper, churn: Any) -> None:
    free = WhisperDecoder.load(whisper.folder)
    free.spec = replace(free.spec, suppressed=(), suppressed_first=())
    seen = churn(engine_for(free), whisper.payloads, "")
    assert {name: said(one.chunks) for name, one in seen.items()} != {
        name: without_ends(windows) for name, windows in whisper.expected.items()
    }


@BOTH_RUNNERS
@pytest.mark.parametrize(("pool", "chunk", "running"), [(400, 2048, 64), (100, 3, 64), (64, 2048, 3)])
def test_greedy_tokens_equal_generate(
    whisper: Whisper, churn: Any, pool: int, chunk: int, running: int, device_rows: bool
) -> None:
    engine = engine_for(
        whisper.decoder, device_rows, max_total_tokens=pool, chunked_prefill_tokens=chunk, max_running_requests=running
    )
    seen = churn(engine, whisper.payloads, f"{pool} {chunk} {running}")
    for name, windows in whisper.expected.items():
        assert said(seen[name].chunks) == without_ends(windows), name
    assert engine.stats()["source_places_used"] == 0
    assert engine.stats()["retractions"] > 0 or pool > 64


def test_results_tell_language_tokens_and_whether_a_limit_cut(whisper: Whisper, churn: Any) -> None:
    seen = churn(engine_for(whisper.decoder), whisper.payloads, "")
    codes = {tiny.IDS[f"<|{code}|>"]: code for code in tiny.LANGUAGES}
    for name, (which, options) in CASES.items():
        result, windows = seen[name].result, whisper.expected[name]
        detected = "language" not in options
        heard = codes[tiny.detect_language(whisper.reference, whisper.states[which[0]])]
        assert result["language"] == (heard if detected else options["language"])
        assert result["output_tokens"] == sum(map(len, windows)) + detected
        told = len(whisper.payloads[name].get("history") or ())
        heard = sum(math.ceil(round((w["end"] - w["start"]) / 0.02, 6)) for w in whisper.payloads[name]["windows"])
        assert (result["input_tokens"], result["input_audio_tokens"]) == (heard + told, heard)
        assert result["finish_reason"] == ("stop" if all(w[-1] == tiny.EOS for w in windows) else "length")
        assert result["duration"] == len(which)


def test_a_limit_is_for_all_windows_together(whisper: Whisper, churn: Any) -> None:
    whole = without_ends(whisper.expected["five windows, with times"])
    lengths = [len(window) for window in whole]
    for most in (1, lengths[0] - 1, lengths[0], lengths[0] + 1, sum(lengths) - 1):
        payload = {**whisper.payloads["five windows, with times"], "max_new_tokens": most}
        seen = churn(engine_for(whisper.decoder), {"a": payload}, "")["a"]
        cut = said(seen.chunks)
        assert [token for window in cut for token in window] == [t for window in whole for t in window][:most]
        assert seen.result["finish_reason"] == "length"


@BOTH_RUNNERS
def test_a_seed_gives_the_same_whatever_else_runs_and_the_language_is_not_drawn(
    whisper: Whisper, churn: Any, device_rows: bool
) -> None:
    payloads = {
        f"{name} {seed}": {**payload, "temperature": 0.9, "seed": seed}
        for name, payload in whisper.payloads.items()
        if name in ("text", "detected", "two windows")
        for seed in (1, 2)
    }
    together = churn(engine_for(whisper.decoder, device_rows, max_total_tokens=200), payloads, "drawn")
    alone = {name: churn(engine_for(whisper.decoder), {name: one}, "")[name] for name, one in payloads.items()}
    for name, one in together.items():
        assert said(one.chunks) == said(alone[name].chunks)
    heard = tiny.detect_language(whisper.reference, whisper.states[2])
    for seed in (1, 2):
        assert tiny.IDS[f"<|{together[f'detected {seed}'].result['language']}|>"] == heard
    drawn = {str(said(together[f"text {seed}"].chunks)) for seed in (1, 2)}
    assert len(drawn) == 2


@BOTH_RUNNERS
def test_a_window_takes_the_place_of_the_one_before(whisper: Whisper, device_rows: bool) -> None:
    written: list[int] = []

    class Recording(WhisperDecoder):
        def source_kv(self, source: torch.Tensor) -> torch.Tensor:
            written.append(len(source))
            return super().source_kv(source)

    engine = engine_for(Recording.load(whisper.folder), device_rows, max_total_tokens=80, max_running_requests=4)
    for name, payload in whisper.payloads.items():
        engine.add(name, payload)
    assert engine.stats()["source_places_used"] == 0
    most = 0.0
    while engine.has_work:
        engine.step()
        most = max(most, engine.stats()["source_places_used"])
    assert engine.stats()["retractions"] > 0
    assert written == [tiny.FRAMES] * sum(map(len, whisper.expected.values()))
    assert 1 < most <= 4


def test_the_same_prompt_over_other_audio_is_computed_anew(whisper: Whisper, churn: Any) -> None:
    engine = engine_for(whisper.decoder)
    for states in whisper.states[:3]:
        payload = payload_of([states], language="en", history=[50, 51, 52, 53])
        expected = tiny.transcribe(whisper.reference, [states], language="en", history=[50, 51, 52, 53])
        assert said(churn(engine, {"a": payload}, "")["a"].chunks) == without_ends(expected)
    assert engine.stats()["reused_tokens"] == 0


@BOTH_RUNNERS
def test_shorter_sources_stand_beside_whole_ones(whisper: Whisper, churn: Any, device_rows: bool) -> None:
    cut = {f"{i} {frames}": whisper.states[i][:frames] for i in range(4) for frames in (1, 17, tiny.FRAMES)}
    payloads = {name: payload_of([states], language="en") for name, states in cut.items()}
    seen = churn(engine_for(whisper.decoder, device_rows, max_total_tokens=80), payloads, "")
    for name, states in cut.items():
        expected = tiny.transcribe(whisper.reference, [states], language="en")
        assert said(seen[name].chunks) == without_ends(expected)


def test_what_times_remember_is_the_same_for_rows_and_for_requests() -> None:
    rng = random.Random(0)
    for _ in range(50):
        host, rows = -1, torch.tensor([-1])
        for step in range(12):
            token = rng.choice([5, 99, 100, 101, 150])
            seen = (host >> 2) if host > 0 else 0
            host, rows = next_times(host, token, 100), next_times_rows(rows, torch.tensor([token]), 100)
            assert rows.tolist() == [host]
            assert host >> 2 == (token - 99 if token >= 100 else seen)
            assert bool(host & 1) == (token >= 100)
            assert bool(host & 2) or step > 0


def test_going_round_in_circles_is_noticed() -> None:
    rng = random.Random(1)
    assert not repeats_itself([rng.randrange(50000) for _ in range(200)])
    assert repeats_itself([7, 8, 9, 10] * 50)
    assert not repeats_itself([7, 8, 9])


def test_logits_are_within_tolerance(whisper: Whisper) -> None:
    states, generator = whisper.states[4], torch.Generator().manual_seed(4)
    ids = [tiny.START, *torch.randint(len(tiny.IDS), (30,), generator=generator).tolist()]
    with torch.no_grad():
        expected = whisper.reference(encoder_outputs=(states[None],), decoder_input_ids=torch.tensor([ids])).logits[0]
    decoder = whisper.decoder
    cache = KVCache(decoder.kv_shape, num_pages=20, page_size=4)
    pages = random.Random(0).sample(range(20), 20)
    request = Request("a", Prompt(torch.tensor(ids)[:, None]), 1, source=states)
    pool = SourcePool(decoder.source_shape, 2)
    pool.enter(request, decoder.source_kv(states))
    for start, stop in [(0, 13), (13, 14), (14, len(ids))]:
        own = TorchAttention().begin(cache, [AttentionSpan(start, stop, pages)])
        attend = SourceAttend(pool, own, [Chunk(request, start, stop)])
        x = decoder.embed_ids(torch.tensor(ids[start:stop])[:, None])
        logits = decoder.logits(decoder(x, torch.arange(start, stop)[None], attend))[:, 0]
        assert (logits - expected[start:stop]).abs().max() / expected.abs().max() < LOGITS_TOLERANCE


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_attention_by_places_equals_that_of_each_alone(kv_heads: int) -> None:
    torch.manual_seed(0)
    shape = KVShape(2, kv_heads, 8)
    pool = SourcePool(SourceShape(shape, 11), 5)
    requests = [Request(str(n), Prompt(torch.zeros(1, 1)), 1, source=torch.zeros(n, 4)) for n in (11, 3, 7)]
    for request in requests:
        assert request.source is not None
        pool.enter(request, torch.randn(2, 2, len(request.source), kv_heads, 8))
    pool.leave(requests.pop(1))
    q = torch.randn(2, 4, 8)

    def own(*args: Any, **options: Any) -> torch.Tensor:
        raise AssertionError("not asked for")

    attend = SourceAttend(pool, own, [Chunk(request, 0, 1) for request in requests])
    places = torch.tensor([request.place for request in requests])
    for layer in range(2):
        by_places = attend_places(q, *pool.layer(layer), places, pool.lengths)
        assert torch.allclose(attend.cross(layer, q), by_places, atol=1e-6)
        padded = attend.cross(layer, torch.cat([q, q]))
        assert torch.equal(padded[2:], torch.zeros_like(q))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no audio": ({"windows": []}, "there is no audio"),
    "no frame": (payload_of([torch.zeros(0, tiny.WIDTH)]), "1 to 50 frames, not 0"),
    "too many frames": (payload_of([torch.zeros(tiny.FRAMES + 1, tiny.WIDTH)]), "1 to 50 frames, not 51"),
    "frames of another width": (payload_of([torch.zeros(3, 8)]), "32"),
    "no tokens": (payload_of([torch.zeros(3, tiny.WIDTH)], max_new_tokens=0), "1 or more, not 0"),
    "another language": (payload_of([torch.zeros(3, tiny.WIDTH)], language="ja"), "'ja' is not one of de, en, fr"),
    "another task": (payload_of([torch.zeros(3, tiny.WIDTH)], task="sing"), "'sing' is not one of this model's"),
    "an unknown id": (payload_of([torch.zeros(3, tiny.WIDTH)], history=[9999]), "ids that the model does not know"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_heard_is_refused(whisper: Whisper, case: str) -> None:
    payload, message = REFUSED[case]
    engine = engine_for(whisper.decoder)
    with pytest.raises(InvalidRequest, match=message):
        engine.add("bad", payload)
    assert not engine.has_work


def test_an_encoder_that_makes_no_numbers_is_not_the_callers_fault(whisper: Whisper) -> None:
    with pytest.raises(NotFinite, match="encoder_states are not all finite: the model's weights may be damaged"):
        engine_for(whisper.decoder).add("bad", payload_of([torch.full((3, tiny.WIDTH), math.nan)]))


def test_a_pool_too_small_for_what_may_come_is_refused(whisper: Whisper) -> None:
    engine = engine_for(whisper.decoder, max_total_tokens=30)
    with pytest.raises(InvalidRequest, match="the KV pool has 30"):
        engine.add("a", whisper.payloads["two windows"])


def test_another_model_is_refused(whisper: Whisper) -> None:
    config = json.loads((whisper.folder / "config.json").read_text())
    generation = json.loads((whisper.folder / "generation_config.json").read_text())
    with pytest.raises(StartupError, match="model type 'llama' is not whisper"):
        WhisperSpec.parse({**config, "model_type": "llama"}, generation)
    with pytest.raises(StartupError, match="activation_function 'relu' is not supported"):
        WhisperSpec.parse({**config, "activation_function": "relu"}, generation)
    with pytest.raises(StartupError, match=r"generation_config.json lacks the field no_timestamps_token_id"):
        WhisperSpec.parse(config, {})
    with pytest.raises(StartupError, match=r"generation_config.json lacks the fields lang_to_id"):
        WhisperSpec.parse(config, {**generation, "lang_to_id": None})
    with pytest.raises(InvalidRequest, match=r"generation_config.json: suppress_tokens.0 is 5000, not an id below 318"):
        WhisperSpec.parse(config, {**generation, "suppress_tokens": [5000]})


def test_rules_without_a_counterpart_for_device_rows_are_refused_there(whisper: Whisper) -> None:
    class Ruled(WhisperDecoder):
        rule_rows = StepModel.rule_rows

    with pytest.raises(StartupError, match="rules of Ruled look at requests; give it rule_rows"):
        engine_for(Ruled.load(whisper.folder), device_rows=True)
    assert not whisper.decoder.asks_host
