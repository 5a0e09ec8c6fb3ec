"""Higgs Audio v2 against transformers' own class, on a tiny random checkpoint in real format."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sgl_omni.engine.attention import AttentionSpan, TorchAttention
from sgl_omni.engine.delay import forced_ids
from sgl_omni.engine.device_rows import DeviceRows
from sgl_omni.engine.engine import AutoregressiveEngine, EngineSettings
from sgl_omni.engine.kv_cache import KVCache
from sgl_omni.engine.row_state import RowState
from sgl_omni.errors import InvalidRequest
from sgl_omni.models.higgs_audio_v2.model import HiggsModel
from sgl_omni.models.higgs_audio_v2.task import HiggsTask

transformers = pytest.importorskip("transformers")

CODES, BOOKS = 22, 4
STREAM_BOS, STREAM_EOS = CODES, CODES + 1
PLACE, BEGIN, DELAY, END = 90, 91, 92, 2
TEXTS = (5, 12, 30, 7, 22, 9)
FRAMES = 20
LOGITS_TOLERANCE = 2e-5


@dataclass(frozen=True)
class Case:
    prompt_ids: list[int]
    audio_rows: torch.Tensor | None
    rows: list[list[int]]
    """What ``generate`` says, up to its end."""

    @property
    def payload(self) -> dict[str, Any]:
        audio = {} if self.audio_rows is None else {"audio_rows": self.audio_rows}
        return {"prompt_ids": self.prompt_ids, "max_frames": FRAMES, **audio}

    @property
    def frames(self) -> list[list[int]]:
        """Frames before the row that brings an end id, out of their diagonals."""
        end = next((i - 1 for i, row in enumerate(self.rows) if STREAM_EOS in row), FRAMES)
        count = max(0, min(end, len(self.rows) - BOOKS))
        return [[min(self.rows[f + 1 + k][k], CODES - 1) for k in range(BOOKS)] for f in range(count)]


@dataclass(frozen=True)
class Higgs:
    reference: Any
    model: HiggsModel
    cases: dict[str, Case]


@pytest.fixture(scope="module")
def higgs(tmp_path_factory: pytest.TempPathFactory) -> Higgs:
    torch.manual_seed(5)
    folder = tmp_path_factory.mktemp("higgs")
    config = transformers.HiggsAudioV2Config(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=END,
        num_codebooks=BOOKS,
        codebook_size=CODES + 2,
        audio_token_id=PLACE,
        audio_bos_token_id=BEGIN,
        audio_delay_token_id=DELAY,
        audio_stream_bos_id=STREAM_BOS,
        audio_stream_eos_id=STREAM_EOS,
        initializer_range=0.3,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 32.0,
            "low_freq_factor": 0.125,
            "high_freq_factor": 0.5,
            "original_max_position_embeddings": 128,
        },
    )
    reference = transformers.HiggsAudioV2ForConditionalGeneration(config, use_text_head=True).eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
        reference.audio_lm_head.weight.view(BOOKS, CODES + 2, -1)[:, STREAM_EOS] *= 0.8  # not all end at once
    reference.save_pretrained(folder, max_shard_size="60KB")
    cases = {f"{n} {kind}": generate(reference, n, kind) for n in TEXTS for kind in ("text", "voice")}
    return Higgs(reference, HiggsModel.load(folder), cases)


def generate(reference: Any, length: int, kind: str) -> Case:
    ids = torch.randint(3, 80, (length,)).tolist()
    audio = None
    if kind == "voice":
        audio = torch.randint(0, CODES, (6 + length % 3, BOOKS))
        places = [PLACE] * (len(audio) - BOOKS + 1) + [DELAY] * (BOOKS - 1)
        ids = [*ids[:3], *places, *ids[3:], 7, 8, 9]
    ids.append(BEGIN)
    extra = (
        {}
        if audio is None
        else {
            "audio_input_ids": audio[None],
            "audio_input_ids_mask": torch.ones(1, len(audio), dtype=torch.bool),
        }
    )
    rows = reference.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=FRAMES + BOOKS,
        do_sample=False,
        **extra,
    )[0]
    return Case(ids, audio, rows[0 if audio is None else len(audio) :].tolist())


def engine_for(model: HiggsModel, device_rows: bool = False, **settings: Any) -> AutoregressiveEngine:
    options = EngineSettings(**{"max_total_tokens": 2048, "page_size": 1, **settings})
    return AutoregressiveEngine.build(model, HiggsTask(model.spec), options, device_rows=device_rows)


BOTH_RUNNERS = pytest.mark.parametrize("device_rows", [False, True], ids=["at-once", "ahead"])


def test_the_cases_end_by_an_end_id_and_by_the_limit(higgs: Higgs) -> None:
    lengths = {len(case.frames) for case in higgs.cases.values()}
    assert FRAMES in lengths
    assert any(0 < n < FRAMES for n in lengths)
    assert len({str(case.rows) for case in higgs.cases.values()}) == len(higgs.cases)


@BOTH_RUNNERS
@pytest.mark.parametrize("pool", [2048, 100, 68])
@pytest.mark.parametrize("chunk", [5, 2048])
def test_greedy_frames_equal_generate(higgs: Higgs, churn: Any, pool: int, chunk: int, device_rows: bool) -> None:
    engine = engine_for(higgs.model, device_rows, max_total_tokens=pool, chunked_prefill_tokens=chunk)
    seen = churn(engine, {name: case.payload for name, case in higgs.cases.items()}, f"{pool} {chunk}")
    assert (engine.stats()["retractions"] > 0) == (pool < 2048)
    for name, case in higgs.cases.items():
        frames = seen[name].joined("codes").tolist() if seen[name].chunks else []
        assert frames == case.frames, name
        assert seen[name].result["output_tokens"] == len(case.frames)
        ended = any(STREAM_EOS in row for row in case.rows[: len(frames) + 2])
        assert seen[name].result["finish_reason"] == ("stop" if ended else "length")


@BOTH_RUNNERS
def test_rows_equal_generate(higgs: Higgs, device_rows: bool) -> None:
    """The rows themselves, begin and end ids included."""
    taken: dict[str, list[list[int]]] = {}

    class Recording(HiggsTask):
        def result(self, request: Any) -> dict[str, Any]:
            taken[request.id] = [row[1:] for row in request.outputs]
            return super().result(request)

    options = EngineSettings(max_total_tokens=2048)
    engine = AutoregressiveEngine.build(higgs.model, Recording(higgs.model.spec), options, device_rows=device_rows)
    for name, case in higgs.cases.items():
        engine.add(name, case.payload)
    while engine.has_work:
        engine.step()
    for name, case in higgs.cases.items():
        assert len(taken[name]) > BOOKS
        assert taken[name] == case.rows[: len(taken[name])], name


@pytest.mark.parametrize("name", ["30 text", "30 voice"])
def test_logits_are_within_tolerance(higgs: Higgs, name: str) -> None:
    case = higgs.cases[name]
    rows = HiggsTask(higgs.model.spec).parse("a", case.payload).prompt.rows
    audio = torch.tensor(case.rows[:10])
    assert len(audio) == 10
    outputs = torch.cat([torch.full((10, 1), PLACE), audio], 1)
    given = audio if case.audio_rows is None else torch.cat([case.audio_rows, audio])
    with torch.no_grad():
        expected = higgs.reference(
            torch.tensor([[*case.prompt_ids, *[PLACE] * 10]]),
            audio_input_ids=given[None],
            audio_input_ids_mask=torch.ones(1, len(given), dtype=torch.bool),
        ).logits[0]
    expected = expected.unflatten(-1, (BOOKS, -1))
    cache = KVCache(higgs.model.kv_shape, num_pages=30, page_size=4)
    pages = random.Random(0).sample(range(30), 30)
    whole, end = torch.cat([rows, outputs]), len(rows) + 10
    for start, stop in [(0, 9), (9, len(rows) + 1), *[(i, i + 1) for i in range(len(rows) + 1, end)]]:
        attend = TorchAttention().begin(cache, [AttentionSpan(start, stop, pages)])
        embed = higgs.model.embed_outputs if start > len(rows) else higgs.model.embed_ids
        hidden = higgs.model(embed(whole[start:stop]), torch.arange(start, stop)[None], attend)
        logits = higgs.model.logits(hidden)
        assert (logits - expected[start:stop]).abs().max() / expected.abs().max() < LOGITS_TOLERANCE


def test_the_pattern_of_begin_and_end_ids() -> None:
    delays = torch.tensor([1, 2, 3])
    steps, ends = torch.tensor([0, 1, 2, 6, 6, 7, 8]), torch.tensor([-1, -1, -1, -1, 5, 5, 5])
    b, e, free = 8, 9, -1
    assert forced_ids(steps, ends, delays, b, e).tolist() == [
        [b, b, b],
        [free, b, b],
        [free, free, b],
        [free, free, free],
        [e, free, free],
        [e, e, free],
        [e, e, e],
    ]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no audio for a place": ({"prompt_ids": [5, PLACE, BEGIN]}, "1 places for audio rows, and 0 rows"),
    "audio without a place": ({"prompt_ids": [5, BEGIN], "audio_rows": [[1] * BOOKS]}, "0 places .* 1 rows"),
    "audio of other codebooks": ({"prompt_ids": [PLACE, BEGIN], "audio_rows": [[1, 2]]}, r"\[length, 4\]"),
    "a code too large": ({"prompt_ids": [PLACE, BEGIN], "audio_rows": [[CODES + 2] * BOOKS]}, "id 24"),
    "no beginning of audio": ({"prompt_ids": [5, 6]}, "must end with the id that begins audio, 91, not 6"),
    "no prompt": ({}, "the prompt is empty"),
    "no frames": ({"prompt_ids": [5, BEGIN], "max_frames": 0}, "max_frames must be 1 or more"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_prompts_that_make_no_sense_are_refused(higgs: Higgs, case: str) -> None:
    payload, message = REFUSED[case]
    with pytest.raises(InvalidRequest, match=message):
        engine_for(higgs.model).add("bad", payload)


def test_sampled_frames_are_the_same_in_device_rows(higgs: Higgs, churn: Any) -> None:
    options = {"temperature": 0.8, "top_k": 9}
    payloads = {
        f"{name} {seed}": {**case.payload, **options, "seed": seed}
        for name, case in higgs.cases.items()
        for seed in (1, 2)
    }
    frames = [
        {
            name: one.joined("codes").tolist() if one.chunks else []
            for name, one in churn(engine_for(higgs.model, rows, max_total_tokens=150), payloads, "").items()
        }
        for rows in (False, True)
    ]
    assert frames[0] == frames[1]
    assert any(frames[0][f"{name} 1"] != frames[0][f"{name} 2"] for name in higgs.cases)


def test_what_finishes_a_row_decides_nothing_on_the_host(higgs: Higgs) -> None:
    """Tensors without data go through it: a look at any value would raise."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        rows = DeviceRows(6, higgs.model.columns, 2, 0, "cpu")
        state = RowState(rows, torch.empty(5, dtype=torch.int64), torch.empty(3, dtype=torch.int64))
        chosen = state.choose(torch.empty(3, BOOKS, CODES + 2))
        whole, ends = higgs.model.finish_rows(chosen, torch.empty(3, 32), state)
    assert whole.shape == (3, 1 + BOOKS)
    assert ends.shape == (3,)
