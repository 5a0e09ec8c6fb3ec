"""Qwen3-Omni's thinker and talker against transformers' own classes, on a tiny random checkpoint in real format."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import tiny_qwen3_omni
import torch
from engine_fixtures import EVERY_RUNNER
from tiny_qwen3_omni import AUDIO, EOS, GROUPS, TALKER_EOS, TALKER_VOCABULARY, TALKER_WIDTH, THINKER_WIDTH
from torch._subclasses.fake_tensor import FakeTensorMode

from sgl_omni.engine.attention import AttentionSpan, TorchAttention
from sgl_omni.engine.device_rows import DeviceRows, Field
from sgl_omni.engine.engine import AutoregressiveEngine, EngineSettings
from sgl_omni.engine.kv_cache import KVCache
from sgl_omni.engine.model import CausalModel
from sgl_omni.engine.repetition import penalise
from sgl_omni.engine.row_state import RowState
from sgl_omni.engine.task import InputSpec, TokenTask
from sgl_omni.errors import InvalidRequest
from sgl_omni.models.qwen3_omni.talker import TalkerModel
from sgl_omni.models.qwen3_omni.talker_feed import Feeds, TalkerFeed
from sgl_omni.models.qwen3_omni.talker_task import TalkerTask
from sgl_omni.models.qwen3_omni.thinker import load_thinker

pytest.importorskip("transformers")

VOCABULARY = 200
FRAMES = 12
LOGITS_TOLERANCE = 5e-5


@dataclass(frozen=True)
class Omni:
    reference: Any
    thinker: CausalModel
    talker: TalkerModel


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Omni:
    folder = tmp_path_factory.mktemp("omni")
    reference = tiny_qwen3_omni.build(folder, vocabulary=VOCABULARY, layers=3, levels=1)
    accept = reference.config.talker_config.accept_hidden_layer
    return Omni(reference, load_thinker(folder, kept_layers=[0, accept]), TalkerModel.load(folder))


def thinker_engine(omni: Omni, device_rows: bool = False, **settings: Any) -> AutoregressiveEngine:
    inputs = InputSpec(vocab_sizes=(VOCABULARY,), hidden_size=THINKER_WIDTH, axes=3)
    task = TokenTask(inputs, eos_ids=[EOS], kept_layers=omni.thinker.kept_layers)
    options = EngineSettings(**{"max_total_tokens": 1024, "page_size": 1, **settings})
    return AutoregressiveEngine.build(omni.thinker, task, options, device_rows=device_rows)


def talker_engine(omni: Omni, device_rows: bool = False, **settings: Any) -> AutoregressiveEngine:
    task = TalkerTask(omni.talker.spec, omni.talker.marks()[2].cpu())
    options = EngineSettings(**{"max_total_tokens": 1024, "page_size": 1, **settings})
    return AutoregressiveEngine.build(omni.talker, task, options, device_rows=device_rows)


@EVERY_RUNNER
@pytest.mark.parametrize("pool", [1024, 56])
@pytest.mark.parametrize("chunk", [9, 2048])
def test_the_thinker_says_what_generate_says(omni: Omni, churn: Any, pool: int, chunk: int, device_rows: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(30, 180, (n,), generator=generator).tolist() for n in (6, 25, 14, 40, 11, 18)]
    expected = [
        omni.reference.thinker.generate(
            torch.tensor([prompt]), max_new_tokens=FRAMES, do_sample=False, eos_token_id=EOS, pad_token_id=0
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    engine = thinker_engine(omni, device_rows, max_total_tokens=pool, chunked_prefill_tokens=chunk)
    payloads = {str(i): {"prompt_ids": p, "max_new_tokens": FRAMES} for i, p in enumerate(prompts)}
    seen = churn(engine, payloads, f"{pool} {chunk}")
    assert (engine.stats()["retractions"] > 0) == (pool < 1024)
    assert [seen[str(i)].result["token_ids"] for i in range(len(prompts))] == expected


@EVERY_RUNNER
@pytest.mark.parametrize("pool", [1024, 60])
def test_the_thinker_goes_on_from_embeddings_at_positions_of_three_axes(
    omni: Omni, churn: Any, pool: int, device_rows: bool
) -> None:
    generator = torch.Generator().manual_seed(6)
    payloads, expected = {}, {}
    for n in (7, 19, 33):
        embeddings = torch.randn(n, THINKER_WIDTH, generator=generator) * 0.3
        positions = torch.stack([torch.arange(n), torch.arange(n) // 3, torch.arange(n) % 4 + n // 2])
        payloads[str(n)] = {"prompt_embeddings": embeddings, "positions": positions, "max_new_tokens": FRAMES}
        expected[str(n)] = by_hand(omni.reference.thinker, embeddings, positions)
    engine = thinker_engine(omni, device_rows, max_total_tokens=pool, chunked_prefill_tokens=8)
    seen = churn(engine, payloads, str(pool))
    assert {name: one.result["token_ids"] for name, one in seen.items()} == expected
    assert (engine.stats()["retractions"] > 0) == (pool < 1024)
    flat = {k: v for k, v in payloads["19"].items() if k != "positions"}
    assert churn(engine, {"flat": flat}, "")["flat"].result["token_ids"] != expected["19"]


@torch.no_grad()
def by_hand(thinker: Any, x: torch.Tensor, positions: torch.Tensor) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < FRAMES and tokens[-1:] != [EOS]:
        hidden = thinker.model(inputs_embeds=x[None], position_ids=positions[:, None]).last_hidden_state
        tokens.append(int(thinker.lm_head(hidden[0, -1]).argmax()))
        x = torch.cat([x, thinker.get_input_embeddings()(torch.tensor(tokens[-1:]))])
        positions = torch.cat([positions, (positions.max() + 1).expand(3, 1)], 1)
    return tokens


@dataclass(frozen=True)
class Speech:
    prompt: torch.Tensor
    text: torch.Tensor
    penalty: float
    codes: list[list[int]]


@pytest.fixture(scope="module")
def speeches(omni: Omni) -> list[Speech]:
    """Prompts and text of different lengths, and the codes that the talker's ``generate`` makes of them."""
    generator = torch.Generator().manual_seed(9)
    made = []
    for length, count, penalty in [(9, 5, 1.0), (14, 0, 1.3), (5, 20, 1.05), (31, 3, 1.0), (22, 9, 1.3)]:
        prompt = torch.randn(length, TALKER_WIDTH, generator=generator) * 0.3
        text = torch.randn(count, TALKER_WIDTH, generator=generator) * 0.3
        made.append(Speech(prompt, text, penalty, spoken(omni, prompt, text, penalty)))
    return made


def spoken(omni: Omni, prompt: torch.Tensor, text: torch.Tensor, penalty: float) -> list[list[int]]:
    talker = omni.reference.talker
    specials = [i for i in range(TALKER_VOCABULARY - 1024, TALKER_VOCABULARY) if i != TALKER_EOS]
    out = talker.generate(
        inputs_embeds=prompt[None],
        trailing_text_hidden=text[None],
        tts_pad_embed=omni.talker.marks()[None, 2:],
        talker_input_ids=torch.full((1, len(prompt)), 20),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=FRAMES + 1,  # the last one's other codes are not predicted
        do_sample=False,
        repetition_penalty=penalty,
        suppress_tokens=specials,
        eos_token_id=TALKER_EOS,
        output_hidden_states=True,
        return_dict_in_generate=True,
    )
    return torch.stack([states[-1] for states in out.hidden_states if states[-1] is not None], 1)[0].tolist()


def payload_of(speech: Speech) -> dict[str, Any]:
    return {"prompt_embeddings": speech.prompt, "max_frames": FRAMES, "repetition_penalty": speech.penalty}


@EVERY_RUNNER
@pytest.mark.parametrize("pool", [1024, 55, 45])
@pytest.mark.parametrize("chunk", [6, 2048])
def test_the_talker_speaks_what_generate_speaks(
    omni: Omni, speeches: list[Speech], churn: Any, pool: int, chunk: int, device_rows: bool
) -> None:
    engine = talker_engine(omni, device_rows, max_total_tokens=pool, chunked_prefill_tokens=chunk)
    payloads = {str(i): {**payload_of(s), "added_embeddings": s.text} for i, s in enumerate(speeches)}
    seen = churn(engine, payloads, f"{pool} {chunk}")
    assert (engine.stats()["retractions"] > 0) == (pool < 1024)
    for i, speech in enumerate(speeches):
        assert seen[str(i)].joined("codes").tolist() == speech.codes
    assert len({str(speech.codes) for speech in speeches}) == len(speeches)


@EVERY_RUNNER
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("pool", [1024, 45])
def test_the_talker_speaks_the_same_when_its_text_comes_piece_by_piece(
    omni: Omni, speeches: list[Speech], pool: int, seed: int, device_rows: bool
) -> None:
    rng = random.Random(f"{pool} {seed}")
    engine = talker_engine(omni, device_rows, max_total_tokens=pool)
    pieces = [[s.text[i : i + 3] for i in range(0, len(s.text), 3)] for s in speeches]
    waiting, codes = list(range(len(speeches))), {i: [] for i in range(len(speeches))}
    open_ones: list[int] = []
    while waiting or open_ones or engine.has_work:
        if waiting and rng.random() < 0.5:
            open_ones.append(waiting.pop())
            engine.add(str(open_ones[-1]), {**payload_of(speeches[open_ones[-1]]), "input_open": True})
        for i in [i for i in open_ones if rng.random() < 0.2]:
            if pieces[i]:
                engine.extend(str(i), {"added_embeddings": pieces[i].pop(0)})
            else:
                engine.finish_input(str(i))
                open_ones.remove(i)
        for output in engine.step() if engine.has_work else []:
            codes[int(output.request_id)] += [row for part in output.chunks for row in part["codes"].tolist()]
    assert [codes[i] for i in range(len(speeches))] == [speech.codes for speech in speeches]


def test_the_talkers_logits_are_within_tolerance(omni: Omni, speeches: list[Speech]) -> None:
    speech = speeches[3]
    rows = torch.tensor(speech.codes[:3])
    talker = omni.reference.talker
    with torch.no_grad():
        embedded = talker.get_input_embeddings()(rows[:, 0]) + sum(
            table(rows[:, 1 + k]) for k, table in enumerate(talker.code_predictor.get_input_embeddings())
        )
        whole = torch.cat([speech.prompt, embedded + speech.text[:3]])
        hidden = talker.model(inputs_embeds=whole[None]).last_hidden_state[0]
        expected = talker.codec_head(hidden)
    cache = KVCache(omni.talker.kv_shape, num_pages=20, page_size=4)
    pages = random.Random(0).sample(range(20), 20)
    for start, stop in [(0, 13), (13, 31), (31, 32), (32, 34)]:
        attend = TorchAttention().begin(cache, [AttentionSpan(start, stop, pages)])
        x = torch.cat([speech.prompt, omni.talker.embed_ids(rows) + speech.text[:3]])[start:stop]
        mine = omni.talker(x, torch.arange(start, stop).expand(3, -1), attend)
        logits = omni.talker.logits(mine)[:, 0]
        assert (logits - expected[start:stop]).abs().max() / expected.abs().max() < LOGITS_TOLERANCE


@torch.no_grad()
def test_the_code_predictors_logits_are_within_tolerance(omni: Omni) -> None:
    generator = torch.Generator().manual_seed(2)
    hidden, first = torch.randn(2, 6, TALKER_WIDTH, generator=generator)
    logits: list[torch.Tensor] = []

    def choose(step: torch.Tensor, index: int) -> torch.Tensor:
        logits.append(step)
        return step.argmax(-1)

    codes = omni.talker.predictor(hidden, first, choose)
    reference = omni.reference.talker.code_predictor
    for index in range(GROUPS - 1):
        x = [hidden, first] + [reference.get_input_embeddings()[k](codes[:, k]) for k in range(index)]
        last = reference.model(inputs_embeds=torch.stack(x, 1)).last_hidden_state[:, -1]
        expected = reference.lm_head[index](last)
        assert (logits[index] - expected).abs().max() / expected.abs().max() < LOGITS_TOLERANCE
        assert torch.equal(codes[:, index], expected.argmax(-1))


def test_the_code_predictor_decides_nothing_on_the_host(omni: Omni) -> None:
    """Tensors without data go through it: a look at any value would raise."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        first = torch.empty(7, 1, dtype=torch.int64)
        rows = omni.talker.whole_rows(first, torch.empty(7, TALKER_WIDTH))
        logits = omni.talker.without_specials(torch.empty(7, TALKER_VOCABULARY))
    assert rows.shape == (7, GROUPS)
    assert logits.shape == (7, TALKER_VOCABULARY)


def test_the_talkers_rules_in_device_rows_decide_nothing_on_the_host(omni: Omni) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        like = torch.empty(1, TALKER_WIDTH)
        rows = DeviceRows(6, GROUPS, 2, 0, "cpu", seen_vocabulary=TALKER_VOCABULARY, added_places=8, inputs_like=like)
        at = torch.empty(5, dtype=torch.int64)
        state = RowState(rows, at, torch.empty(3, dtype=torch.int64))
        logits = omni.talker.rule_rows(torch.empty(3, 1, TALKER_VOCABULARY), state)
        whole, _ = omni.talker.finish_rows(state.choose(logits), torch.empty(3, TALKER_WIDTH), state)
        assert rows.seen is not None
        assert rows.added is not None
        rows.seen.note(at[:3], whole[:, 0])
        added = rows.added.add(torch.empty(5, TALKER_WIDTH), at, at, rows.fields, Field.STEP)
    assert whole.shape == (3, GROUPS)
    assert added.shape == (5, TALKER_WIDTH)


@EVERY_RUNNER
def test_sampled_codes_depend_on_the_seed_alone(
    omni: Omni, speeches: list[Speech], churn: Any, device_rows: bool
) -> None:
    options = {"temperature": 0.9, "top_k": 20}
    payloads = {
        f"{i} {seed}": {**payload_of(s), **options, "added_embeddings": s.text, "seed": seed}
        for i, s in enumerate(speeches)
        for seed in (1, 2)
    }
    alone = {
        n: churn(talker_engine(omni, device_rows), {n: p}, "").pop(n).joined("codes").tolist()
        for n, p in payloads.items()
    }
    engine = talker_engine(omni, device_rows, max_total_tokens=90)
    together = {name: one.joined("codes").tolist() for name, one in churn(engine, payloads, "").items()}
    assert together == alone
    assert engine.stats()["retractions"] > 0
    assert all(alone[f"{i} 1"] != alone[f"{i} 2"] for i in range(len(speeches)))
    assert alone["3 2"] == churn(talker_engine(omni), {"a": payloads["3 2"]}, "")["a"].joined("codes").tolist()
    columns = torch.tensor(alone["0 1"])[:, 1:]
    assert any(len(set(column)) > 3 for column in columns.T.tolist())


def test_penalties_of_ids_that_were_said() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0], [2.0, -2.0, 1.0]])
    seen = torch.tensor([[True, True, False], [False, False, True]])
    lowered = penalise(logits, seen, torch.tensor([2.0, 4.0]))
    assert lowered.tolist() == [[1.0, -4.0, 1.0], [2.0, -2.0, 0.25]]


CONVERSATIONS: dict[str, list[int]] = {
    "text": [10, 11, 40, 41, 2, 10, 12, 50, 51, 52, 2, 10, 13, 60],
    "two turns": [10, 12, 50, 51, 2, 10, 13, 60, 70, 71, 2, 10, 12, 80, 81, 2, 10, 13, 60],
    "audio": [10, 11, 40, 41, 2, 10, 12, 193] + [AUDIO] * 13 + [194, 50, 51, 2, 10, 13, 60],
}


@EVERY_RUNNER
@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_thinker_and_talker_together_say_what_the_whole_model_says(
    omni: Omni, monkeypatch: pytest.MonkeyPatch, kind: str, device_rows: bool
) -> None:
    ids, spoken_codes = CONVERSATIONS[kind], []

    def record(codes: torch.Tensor, **options: Any) -> torch.Tensor:
        spoken_codes.append(codes[0].T.tolist())
        return torch.zeros(1, 1, 1)

    monkeypatch.setattr(omni.reference.code2wav, "chunked_decode", record)
    extra = {}
    if kind == "audio":
        features = torch.randn(1, 128, 100, generator=torch.Generator().manual_seed(1))
        extra = {"input_features": features, "feature_attention_mask": torch.ones(1, 100, dtype=torch.long)}
    sequence, _ = omni.reference.generate(
        torch.tensor([ids]),
        speaker="Chelsie",
        thinker_max_new_tokens=9,
        thinker_eos_token_id=EOS,
        thinker_do_sample=False,
        talker_max_new_tokens=FRAMES + 1,
        talker_do_sample=False,
        **extra,
    )
    prompt: dict[str, Any] = {"prompt_ids": ids}
    if kind == "audio":
        with torch.no_grad():
            whole = omni.reference.thinker(
                input_ids=torch.tensor([ids]), output_hidden_states=True, **extra
            ).hidden_states[0][0]
        prompt = {"prompt_embeddings": whole}

    thinker, talker = thinker_engine(omni, device_rows), talker_engine(omni, device_rows)
    feed, feeds = TalkerFeed(omni.talker.spec, ids, "chelsie"), Feeds(omni.talker)
    layers = [0, omni.talker.spec.accept_layer]
    thinker.add("a", {**prompt, "max_new_tokens": 9, "hidden_states": layers})
    tokens, codes, opened = [], [], False
    while thinker.has_work or talker.has_work:
        for output in thinker.step() if thinker.has_work else []:
            for part in output.chunks:
                tokens += part["token_ids"]
                feed.take(part["hidden_states"])
                if feed.is_due and not opened:
                    [piece] = feeds.pieces([feed])
                    talker.add("a", {**piece, "max_frames": FRAMES, "repetition_penalty": 1.05})
                    opened = True
                elif feed.is_due:
                    talker.extend("a", feeds.pieces([feed])[0])
            if output.result is not None:
                feed.end()
                assert feed.is_due
                talker.extend("a", feeds.pieces([feed])[0])
                talker.finish_input("a")
        for output in talker.step() if talker.has_work else []:
            codes += [row for part in output.chunks for row in part["codes"].tolist()]
    assert tokens == sequence[0, len(ids) :].tolist()
    assert codes == spoken_codes[0]
    assert len(codes) > 3


def test_a_voice_and_a_prompt_that_the_talker_does_not_know_are_refused(omni: Omni) -> None:
    with pytest.raises(InvalidRequest, match="voice 'nobody' is not one of chelsie, ethan"):
        TalkerFeed(omni.talker.spec, CONVERSATIONS["text"], "nobody")
    with pytest.raises(InvalidRequest, match="header of the assistant"):
        TalkerFeed(omni.talker.spec, CONVERSATIONS["text"][:-1], "ethan")
