"""The engine against golden codes of the reference implementation, and against itself in every batch."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sgl_omni.errors import InvalidRequest, StartupError
from sgl_omni.models.demo_voice import engine as engine_module
from sgl_omni.models.demo_voice.engine import DemoVoiceEngine, rows_are_independent
from sgl_omni.models.demo_voice.model import VoiceDecoder, prompt_rows
from sgl_omni.models.demo_voice.spec import PACKAGED_WEIGHTS
from sgl_omni.models.demo_voice.stages import create_engine
from sgl_omni.runtime.stage import Payload

GOLDEN: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "demo_voice" / "codes.json").read_text(encoding="utf-8")
)
REFERENCE = Path(__file__).parents[3] / "shared" / "demo_voice" / "reference" / "model.py"
TEXTS = ["stop!", "what would you like?", "he ran across the field.", "good evening, ladies and gentlemen!", "yes."]


@pytest.fixture(scope="module")
def model() -> VoiceDecoder:
    torch.set_num_threads(1)
    return VoiceDecoder.load(PACKAGED_WEIGHTS)


@pytest.fixture
def engine(model: VoiceDecoder) -> DemoVoiceEngine:
    return DemoVoiceEngine(model, right_context=6)


def request(*pieces: str, **options: Any) -> Payload:
    defaults = {"voice": 1, "temperature": 0.0, "top_k": 50, "seed": None, "max_frames": 400}
    return {"pieces": list(pieces), **defaults, **options}


class Heard:
    """Collects what an engine says, by request."""

    def __init__(self) -> None:
        self.chunks: dict[str, list[Payload]] = {}
        self.results: dict[str, Payload] = {}

    def step(self, engine: DemoVoiceEngine) -> None:
        for output in engine.step():
            assert output.request_id not in self.results
            self.chunks.setdefault(output.request_id, []).extend(output.chunks)
            if output.result is not None:
                self.results[output.request_id] = output.result

    def finish(self, engine: DemoVoiceEngine) -> Heard:
        while engine.has_work:
            self.step(engine)
        return self

    def codes(self, request_id: str) -> list[list[int]]:
        return np.concatenate([chunk["codes"] for chunk in self.chunks[request_id]]).tolist()


def gauges(engine: DemoVoiceEngine) -> tuple[float, ...]:
    """Requests running, requests queued, rows free."""
    stats = engine.stats()
    return stats["running"], stats["queued"], stats["free_rows"]


def speak(engine: DemoVoiceEngine, payload: Payload) -> tuple[list[list[int]], Payload]:
    engine.add("only", payload)
    heard = Heard().finish(engine)
    return heard.codes("only"), heard.results["only"]


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda g: f"{g['piece'][:12]}-{g['temperature']}")
def test_codes_equal_the_golden_codes(engine: DemoVoiceEngine, golden: dict[str, Any]) -> None:
    codes, result = speak(
        engine,
        request(
            golden["piece"],
            voice=golden["voice"],
            temperature=golden["temperature"],
            seed=golden["seed"],
            max_frames=golden.get("max_frames", 400),
        ),
    )
    assert codes == golden["codes"]
    assert result == {
        "finish_reason": "length" if "max_frames" in golden else "stop",
        "input_tokens": len(golden["piece"]) + 2,
        "output_tokens": len(golden["codes"]),
    }


@pytest.mark.skipif(not REFERENCE.exists(), reason="the reference implementation is not beside this checkout")
def test_codes_equal_the_reference_implementation(engine: DemoVoiceEngine) -> None:
    spec = importlib.util.spec_from_file_location("demo_voice_reference", REFERENCE)
    assert spec is not None and spec.loader is not None
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    lm = reference.VoiceLM(json.loads((PACKAGED_WEIGHTS / "config.json").read_text())).eval()
    lm.load_state_dict({k: v.float() for k, v in load_file(PACKAGED_WEIGHTS / "model.safetensors").items()}, False)
    for voice, text in enumerate(TEXTS[:4]):
        (expected,) = reference.generate(lm, [text], [voice], 0.0)
        assert speak(engine, request(text, voice=voice))[0] == expected.T.tolist()


def test_a_character_row_of_the_prompt_holds_the_characters_that_follow(model: VoiceDecoder) -> None:
    assert prompt_rows("ab.", 2, model.spec) == [
        [1068, 1025, 1025, 1025],
        [1032, 1033, 1059, 1025],
        [1033, 1059, 1025, 1025],
        [1059, 1025, 1025, 1025],
        [1065, 1025, 1025, 1025],
    ]


def test_frames_are_handed_on_when_the_vocoder_can_use_them(engine: DemoVoiceEngine) -> None:
    engine.add("a", request(GOLDEN[1]["piece"], voice=GOLDEN[1]["voice"]))
    chunks = Heard().finish(engine).chunks["a"]
    # Chunks of audio end at frames 4, 8, 16, 32 and 64; each needs 6 frames more. The last of 65 come at the end.
    assert [len(chunk["codes"]) for chunk in chunks] == [10, 4, 8, 16, 27]
    assert [chunk["piece_end"] for chunk in chunks] == [False, False, False, False, True]
    assert {chunk["codes"].dtype for chunk in chunks} == {np.dtype(np.int16)}


def test_pieces_are_spoken_one_after_another_each_from_its_own_prompt(engine: DemoVoiceEngine) -> None:
    first, second = speak(engine, request(TEXTS[0]))[0], speak(engine, request(TEXTS[1]))[0]
    both, result = speak(engine, request(TEXTS[0], TEXTS[1]))
    assert both == first + second
    assert result["input_tokens"] == len(TEXTS[0]) + len(TEXTS[1]) + 4
    assert (result["finish_reason"], result["output_tokens"]) == ("stop", len(both))


def test_max_frames_bounds_all_pieces_together(engine: DemoVoiceEngine) -> None:
    whole = speak(engine, request(TEXTS[0], TEXTS[1]))[0]
    cut, result = speak(engine, request(TEXTS[0], TEXTS[1], TEXTS[2], max_frames=30))
    assert cut[:27] == whole[:27]  # the last three frames hear the end of audio that the limit put there
    assert len(cut) == 30
    assert (result["finish_reason"], result["output_tokens"]) == ("length", 30)


def test_speed_rides_on_every_chunk(engine: DemoVoiceEngine) -> None:
    engine.add("a", request("yes.", speed=1.5))
    assert {chunk["speed"] for chunk in Heard().finish(engine).chunks["a"]} == {1.5}


def mixed_requests(rng: random.Random, count: int) -> dict[str, Payload]:
    """Greedy and sampled, of one and two pieces, in every voice."""
    return {
        f"r{i}": request(
            *rng.sample(TEXTS, rng.choice([1, 1, 2])),
            voice=i % 4,
            temperature=rng.choice([0.0, 0.0, 0.8]),
            seed=i,
            max_frames=rng.randint(12, 60),
        )
        for i in range(count)
    }


@pytest.mark.parametrize("seed", [0, 1])
def test_codes_are_the_same_alone_and_among_others(engine: DemoVoiceEngine, seed: int) -> None:
    rng = random.Random(seed)
    requests = mixed_requests(rng, 12)
    alone = {request_id: speak(engine, payload) for request_id, payload in requests.items()}

    heard, waiting = Heard(), list(requests.items())
    rng.shuffle(waiting)
    disturbers, begun = [f"aborted{i}" for i in range(6)], set[str]()
    while engine.has_work or waiting:
        if waiting and rng.random() < 0.3:
            engine.add(*waiting.pop())
        if disturbers and rng.random() < 0.1 and disturbers[-1] not in begun:
            engine.add(disturbers[-1], request(TEXTS[3]))
            begun.add(disturbers[-1])
        if disturbers and rng.random() < 0.1:
            engine.abort(disturbers.pop())
        heard.step(engine)
    for request_id, (codes, result) in alone.items():
        assert heard.codes(request_id) == codes
        assert heard.results[request_id] == result


def test_a_row_has_the_same_bits_at_every_position_of_a_group(model: VoiceDecoder) -> None:
    assert rows_are_independent(model, 8)


def test_decoding_falls_back_to_single_rows_where_rows_disturb_each_other(
    model: VoiceDecoder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_module, "rows_are_independent", lambda model, width: False)
    engine = DemoVoiceEngine(model, right_context=6)
    assert "one row at a time" in caplog.text
    for golden in GOLDEN[:2]:
        engine.add(golden["piece"], request(golden["piece"], voice=golden["voice"]))
    heard = Heard().finish(engine)
    assert all(heard.codes(golden["piece"]) == golden["codes"] for golden in GOLDEN[:2])


def test_sampling_repeats_with_a_seed_and_varies_without(engine: DemoVoiceEngine) -> None:
    def sampled(seed: int | None) -> list[list[int]]:
        return speak(engine, request(TEXTS[1], temperature=1.0, seed=seed, max_frames=20))[0]

    assert sampled(5) == sampled(5) != sampled(6)
    assert sampled(None) != sampled(None)
    assert sampled(-1) == sampled(-1)


def test_top_k_of_one_and_a_vanishing_temperature_are_greedy(engine: DemoVoiceEngine) -> None:
    greedy = speak(engine, request(TEXTS[0]))[0]
    assert speak(engine, request(TEXTS[0], temperature=0.9, top_k=1, seed=3))[0] == greedy
    assert speak(engine, request(TEXTS[0], temperature=1e-30))[0] == greedy
    assert speak(engine, request(TEXTS[0], temperature=0.9, top_k=10**6, seed=3, max_frames=5))[0] != greedy


def test_top_k_0_and_minus_1_leave_all_ids(engine: DemoVoiceEngine) -> None:
    def spoken(top_k: int) -> object:
        return speak(engine, request(TEXTS[0], temperature=1.5, top_k=top_k, seed=3, max_frames=5))[0]

    assert spoken(0) == spoken(-1) == spoken(10**6) != spoken(2)


def test_more_requests_than_rows_wait_in_order_of_arrival(model: VoiceDecoder) -> None:
    engine = DemoVoiceEngine(model, right_context=6, max_running_requests=2)
    for i in range(5):
        engine.add(f"r{i}", request("yes.", max_frames=10))
    heard = Heard()
    heard.step(engine)
    assert gauges(engine) == (2, 3, 0)
    heard.finish(engine)
    assert list(heard.results) == [f"r{i}" for i in range(5)]
    assert len({str(heard.codes(request_id)) for request_id in heard.results}) == 1
    assert gauges(engine) == (0, 0, 2)


@pytest.mark.parametrize("steps", [0, 1, 2, 15])
def test_abort_frees_the_row_at_any_moment(model: VoiceDecoder, steps: int) -> None:
    engine = DemoVoiceEngine(model, right_context=6, max_running_requests=2)
    for request_id in ("a", "b", "waiting"):
        engine.add(request_id, request(TEXTS[3]))
    heard = Heard()
    for _ in range(steps):
        heard.step(engine)
    for request_id in ("a", "b", "waiting", "a", "unknown"):
        engine.abort(request_id)
    assert not engine.has_work
    assert gauges(engine) == (0, 0, 2)
    assert not heard.results
    assert speak(engine, request(GOLDEN[0]["piece"], voice=GOLDEN[0]["voice"]))[0] == GOLDEN[0]["codes"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"pieces": []}, "input"),
        ({"pieces": [""]}, "input"),
        ({"pieces": ["Not normalised 7"]}, "input"),
        ({"pieces": ["a" * 216]}, "input"),
        ({"voice": 4}, "voice"),
        ({"voice": -1}, "voice"),
        ({"voice": "rms"}, "voice"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"max_frames": 0}, "max_new_tokens"),
        ({"seed": "x"}, "seed"),
    ],
)
def test_refuses_what_can_never_be_spoken(engine: DemoVoiceEngine, change: Payload, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        engine.add("bad", {**request("yes."), **change})
    assert refused.value.param == param
    assert not engine.has_work


def test_the_longest_piece_and_the_most_frames_fit_a_row(engine: DemoVoiceEngine) -> None:
    codes, result = speak(engine, request("word " * 42 + "word.", temperature=2.0, top_k=1024, seed=0))
    assert result["output_tokens"] == len(codes) <= 400


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ({}, 16),
        ({"max_running_requests": 3}, 3),
        ({"max_running_requests": 3, "max_total_tokens": 1300}, 2),
        ({"max_running_requests": 64, "kv_cache_bytes": 3 * 621 * 8192}, 3),
    ],
)
def test_the_stages_engine_settings_size_the_cache(settings: dict[str, Any], rows: int) -> None:
    stats = create_engine("demo-voice", engine=settings).engine.stats()
    assert (stats["free_rows"], stats["kv_capacity_tokens"]) == (rows, rows * 621)


def test_a_cache_too_small_for_one_request_is_refused() -> None:
    with pytest.raises(StartupError, match="at least 621"):
        create_engine("demo-voice", engine={"max_total_tokens": 620})
