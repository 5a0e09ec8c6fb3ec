"""Whisper's decoder against transformers' own class, on a tiny random checkpoint in real format."""

from __future__ import annotations

import json
import math
import random
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
from sgl_omni.errors import InvalidRequest, StartupError
from sgl_omni.models.whisper.decoder import WhisperDecoder, WhisperSpec
from sgl_omni.models.whisper.task import WhisperTask

transformers = pytest.importorskip("transformers")

VOCABULARY, WIDTH, FRAMES, OUTPUTS = 150, 32, 50, 16
SUPPRESSED, SUPPRESSED_FIRST = list(range(0, 150, 5)), list(range(1, 150, 3))
START, EOS = 140, 141
LOGITS_TOLERANCE = 2e-5


@dataclass(frozen=True)
class Whisper:
    folder: Path
    reference: Any
    decoder: WhisperDecoder
    payloads: dict[str, dict[str, Any]]
    expected: dict[str, list[int]]


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Whisper:
    torch.manual_seed(8)
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        num_mel_bins=16,
        encoder_layers=1,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_source_positions=FRAMES,
        max_target_positions=64,
        bos_token_id=EOS,
        eos_token_id=EOS,
        pad_token_id=EOS,
        decoder_start_token_id=START,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    reference = transformers.WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if "layer_norm" in name and name.endswith("weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.05)  # larger ones would choose the tokens by themselves
            elif "conv" not in name and "encoder.embed_positions" not in name:
                parameter.normal_(0, 0.4)
    reference.generation_config.suppress_tokens = SUPPRESSED
    reference.generation_config.begin_suppress_tokens = SUPPRESSED_FIRST
    folder = tmp_path_factory.mktemp("whisper")
    reference.save_pretrained(folder, max_shard_size="60KB")
    payloads, expected = {}, {}
    for i, length in enumerate((1, 4, 9, 2, 20, 3)):
        with torch.no_grad():
            states = reference.model.encoder(torch.randn(1, 16, 2 * FRAMES)).last_hidden_state[0]
        prompt = [START, *torch.randint(0, 140, (length - 1,)).tolist()]
        payloads[str(i)] = {"prompt_ids": prompt, "encoder_states": states, "max_new_tokens": OUTPUTS}
        expected[str(i)] = generate(reference, prompt, states)
    return Whisper(folder, reference, WhisperDecoder.load(folder), payloads, expected)


def generate(reference: Any, prompt: list[int], states: torch.Tensor) -> list[int]:
    """By the plain ``generate``: that of Whisper's own class does more, cutting long audio into windows."""
    ids: list[int] = transformers.GenerationMixin.generate(
        reference,
        encoder_outputs=transformers.modeling_outputs.BaseModelOutput(last_hidden_state=states[None]),
        decoder_input_ids=torch.tensor([prompt]),
        max_new_tokens=OUTPUTS,
        do_sample=False,
    )[0, len(prompt) :].tolist()
    return ids


def engine_for(decoder: WhisperDecoder, device_rows: bool = False, **settings: Any) -> AutoregressiveEngine:
    options = EngineSettings(**{"max_total_tokens": 400, "page_size": 1, **settings})
    task = WhisperTask(decoder.spec)
    return AutoregressiveEngine.build(
        decoder, task, options, max_positions=decoder.spec.max_positions, device_rows=device_rows
    )


BOTH_RUNNERS = pytest.mark.parametrize("device_rows", [False, True], ids=["at-once", "ahead"])


def test_the_cases_differ_and_are_ruled_by_what_is_suppressed(whisper: Whisper) -> None:
    assert len({str(tokens) for tokens in whisper.expected.values()}) == len(whisper.expected)
    free = WhisperDecoder.load(whisper.folder)
    free.spec = replace(free.spec, suppressed=(), suppressed_first=())
    engine = engine_for(free)
    results = {}
    for name, payload in whisper.payloads.items():
        engine.add(name, payload)
    while engine.has_work:
        results |= {output.request_id: output.result for output in engine.step() if output.result}
    assert {name: result["token_ids"] for name, result in results.items()} != whisper.expected


@BOTH_RUNNERS
@pytest.mark.parametrize("pool", [400, 60, 36])
@pytest.mark.parametrize("chunk", [3, 2048])
@pytest.mark.parametrize("running", [3, 64])
def test_greedy_tokens_equal_generate(
    whisper: Whisper, churn: Any, running: int, chunk: int, pool: int, device_rows: bool
) -> None:
    engine = engine_for(
        whisper.decoder, device_rows, max_total_tokens=pool, chunked_prefill_tokens=chunk, max_running_requests=running
    )
    seen = churn(engine, whisper.payloads, f"{pool} {chunk} {running}")
    assert {name: one.result["token_ids"] for name, one in seen.items()} == whisper.expected
    assert engine.stats()["source_places_used"] == 0
    assert engine.stats()["retractions"] > 0 or pool > 36


@BOTH_RUNNERS
def test_a_place_is_kept_through_retractions_and_written_once(whisper: Whisper, device_rows: bool) -> None:
    written: list[int] = []

    class Recording(WhisperDecoder):
        def source_kv(self, source: torch.Tensor) -> torch.Tensor:
            written.append(len(source))
            return super().source_kv(source)

    engine = engine_for(Recording.load(whisper.folder), device_rows, max_total_tokens=40, max_running_requests=4)
    for name, payload in whisper.payloads.items():
        engine.add(name, payload)
    assert engine.stats()["source_places_used"] == 0
    most = 0.0
    while engine.has_work:
        engine.step()
        most = max(most, engine.stats()["source_places_used"])
    assert engine.stats()["retractions"] > 0
    assert written == [FRAMES] * len(whisper.payloads)
    assert 1 < most <= 4


def test_the_same_prompt_over_other_audio_is_computed_anew(whisper: Whisper, churn: Any) -> None:
    engine = engine_for(whisper.decoder)
    prompt = whisper.payloads["4"]["prompt_ids"]
    for name in ("0", "1"):
        states = whisper.payloads[name]["encoder_states"]
        payload = {"prompt_ids": prompt, "encoder_states": states, "max_new_tokens": OUTPUTS}
        assert churn(engine, {"a": payload}, "")["a"].result["token_ids"] == generate(whisper.reference, prompt, states)
    assert engine.stats()["reused_tokens"] == 0


@BOTH_RUNNERS
def test_shorter_sources_stand_beside_whole_ones(whisper: Whisper, churn: Any, device_rows: bool) -> None:
    payloads = {
        f"{name} {frames}": {**payload, "encoder_states": payload["encoder_states"][:frames]}
        for name, payload in whisper.payloads.items()
        for frames in (1, 17, FRAMES)
    }
    seen = churn(engine_for(whisper.decoder, device_rows, max_total_tokens=80), payloads, "")
    for name, payload in payloads.items():
        expected = generate(whisper.reference, payload["prompt_ids"], payload["encoder_states"])
        assert seen[name].result["token_ids"] == expected


def test_logits_are_within_tolerance(whisper: Whisper) -> None:
    payload = whisper.payloads["4"]
    ids, states = [*payload["prompt_ids"], *whisper.expected["4"]], payload["encoder_states"]
    with torch.no_grad():
        output = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=states[None])
        expected = whisper.reference(encoder_outputs=output, decoder_input_ids=torch.tensor([ids])).logits[0]
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
    "no audio": ({}, "encoder_states must be an array"),
    "no frame": ({"encoder_states": torch.zeros(0, WIDTH)}, "1 to 50 frames, not 0"),
    "too many frames": ({"encoder_states": torch.zeros(FRAMES + 1, WIDTH)}, "1 to 50 frames, not 51"),
    "frames of another width": ({"encoder_states": torch.zeros(3, 8)}, "32"),
    "frames that are no numbers": ({"encoder_states": torch.full((3, WIDTH), math.nan)}, "not all finite"),
    "beyond the positions": ({"encoder_states": torch.zeros(3, WIDTH), "max_new_tokens": 65}, "the model has 64"),
    "no prompt": ({"encoder_states": torch.zeros(3, WIDTH), "prompt_ids": None}, "prompt of ids is missing"),
    "later input": ({"encoder_states": torch.zeros(3, WIDTH), "input_open": True}, "all of a request's input at once"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_heard_is_refused(whisper: Whisper, case: str) -> None:
    payload, message = REFUSED[case]
    engine = engine_for(whisper.decoder)
    with pytest.raises(InvalidRequest, match=message):
        engine.add("bad", {"prompt_ids": [START], **payload})
    assert not engine.has_work


def test_another_model_is_refused(whisper: Whisper) -> None:
    config = json.loads((whisper.folder / "config.json").read_text())
    with pytest.raises(StartupError, match="model type 'llama' is not whisper"):
        WhisperSpec.parse({**config, "model_type": "llama"}, {})
    with pytest.raises(StartupError, match="activation 'relu' is not supported"):
        WhisperSpec.parse({**config, "activation_function": "relu"}, {})


def test_rules_without_a_counterpart_for_device_rows_are_refused_there(whisper: Whisper) -> None:
    class Ruled(WhisperDecoder):
        rule_rows = StepModel.rule_rows

    with pytest.raises(StartupError, match="rules of Ruled look at requests; give it rule_rows"):
        engine_for(Ruled.load(whisper.folder), device_rows=True)
    assert not whisper.decoder.asks_host
