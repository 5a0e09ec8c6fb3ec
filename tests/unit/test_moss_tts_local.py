"""MOSS-TTS-Local's engine against a plain model on transformers' Qwen3, on a tiny random checkpoint in real format."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensorMode

from sgl_omni.engine.checkpoint import CheckpointError
from sgl_omni.engine.device_rows import DeviceRows
from sgl_omni.engine.engine import AutoregressiveEngine, EngineSettings
from sgl_omni.engine.row_state import RowState
from sgl_omni.engine.task import HandOver
from sgl_omni.errors import InvalidRequest, StartupError
from sgl_omni.models.moss_tts_local.model import MossModel
from sgl_omni.models.moss_tts_local.spec import MossSpec
from sgl_omni.models.moss_tts_local.task import MossTask

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny_moss import BOOKS, CODES, TEXTS, Tiny, build

FRAMES = 14
BOTH_RUNNERS = pytest.mark.parametrize("device_rows", [False, True], ids=["at-once", "ahead"])


@dataclass(frozen=True)
class Case:
    prompt: torch.Tensor
    codes: list[list[int]]

    @property
    def payload(self) -> dict[str, Any]:
        return {"prompt_ids": self.prompt, "max_frames": FRAMES}


@dataclass(frozen=True)
class Moss:
    tiny: Tiny
    model: MossModel
    cases: dict[str, Case]


@pytest.fixture(scope="module")
def moss(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Moss:
    tiny = build(tmp_path_factory.mktemp("moss"))
    generator = torch.Generator().manual_seed(2)
    cases = {}
    for i, text in enumerate(TEXTS):
        voice = torch.randint(0, CODES, (3 + i, BOOKS), generator=generator)
        for kind, codes in (("plain", None), ("voice", voice)):
            prompt = tiny.prompt(text, codes)
            cases[f"{kind} {i}"] = Case(prompt, tiny.model.generate(prompt, FRAMES).tolist())
    return Moss(tiny, MossModel.load(tiny.folder), cases)


def engine_for(model: MossModel, device_rows: bool = False, **settings: Any) -> AutoregressiveEngine:
    options = EngineSettings(**{"max_total_tokens": 2048, "page_size": 1, **settings})
    task = MossTask(model.spec, hand_over=HandOver(2, 5))
    return AutoregressiveEngine.build(model, task, options, device_rows=device_rows)


def codes_of(seen: Any) -> list[list[int]]:
    return seen.joined("codes").tolist() if seen.chunks else []


def test_a_request_that_says_no_limit_gets_what_room_its_prompt_leaves(moss: Moss) -> None:
    task, positions = MossTask(moss.model.spec), moss.model.spec.decoder.max_positions
    assert positions is not None
    prompt = torch.zeros(positions - 30, 1 + BOOKS, dtype=torch.int64)
    assert task.parse("a", {"prompt_ids": prompt}).max_outputs == 30


def test_the_cases_end_by_the_decision_and_by_the_limit(moss: Moss) -> None:
    lengths = {len(case.codes) for case in moss.cases.values()}
    assert FRAMES in lengths
    assert any(0 < n < FRAMES for n in lengths)
    assert len({str(case.codes) for case in moss.cases.values()}) == len(moss.cases)


@BOTH_RUNNERS
@pytest.mark.parametrize("pool", [2048, 220])
@pytest.mark.parametrize("chunk", [7, 2048])
def test_greedy_codes_equal_the_plain_model(moss: Moss, churn: Any, pool: int, chunk: int, device_rows: bool) -> None:
    engine = engine_for(moss.model, device_rows, max_total_tokens=pool, chunked_prefill_tokens=chunk)
    seen = churn(engine, {name: case.payload for name, case in moss.cases.items()}, f"{pool} {chunk}")
    assert (engine.stats()["retractions"] > 0) == (pool < 2048)
    for name, case in moss.cases.items():
        assert codes_of(seen[name]) == case.codes, name
        result = seen[name].result
        assert result["output_tokens"] == len(case.codes)
        assert result["input_tokens"] == len(case.prompt)
        assert result["finish_reason"] == ("stop" if len(case.codes) < FRAMES else "length")


def test_frames_are_handed_on_in_pieces(moss: Moss) -> None:
    name = next(name for name, case in moss.cases.items() if len(case.codes) == FRAMES)
    engine = engine_for(moss.model)
    engine.add(name, {**moss.cases[name].payload, "speed": 1.5})
    chunks = [chunk for output in iter(lambda: engine.step() if engine.has_work else None, None) for chunk in output]
    sizes = [len(chunk["codes"]) for output in chunks for chunk in output.chunks]
    assert sizes == [2, 5, 5, 2]
    assert all(chunk["speed"] == 1.5 for output in chunks for chunk in output.chunks)


def test_logits_of_the_first_code_are_those_of_the_plain_model(moss: Moss) -> None:
    hidden = torch.randn(3, moss.model.spec.decoder.hidden_size, generator=torch.Generator().manual_seed(0))
    plain = moss.tiny.model
    with torch.no_grad():
        expected = torch.stack([plain.audio_embeddings[0].weight @ plain.local(row[None]) for row in hidden])
    assert torch.allclose(moss.model.logits(hidden)[:, 0], expected, atol=2e-5)


def test_a_full_vocabulary_head_decides_by_two_rows_of_the_text_embedding(moss: Moss, tmp_path: Path) -> None:
    folder = changed(moss.tiny.folder, tmp_path, local_text_head_mode="full_vocab")
    tensors = load_file(folder / "model.safetensors")
    del tensors["local_text_lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    model = MossModel.load(folder)
    table = moss.tiny.model.transformer.embed_tokens.weight
    ids = [model.spec.slot_id, model.spec.end_id]
    assert torch.equal(model.decision, table[ids])


def test_sampled_codes_are_the_same_in_device_rows_and_follow_the_seed(moss: Moss, churn: Any) -> None:
    options = {"temperature": 1.3, "top_k": 9, "top_p": 0.9}
    payloads = {
        f"{name} {seed}": {**case.payload, **options, "seed": seed}
        for name, case in list(moss.cases.items())[:4]
        for seed in (1, 2)
    }
    found = [
        {name: codes_of(one) for name, one in churn(engine_for(moss.model, rows), payloads, "").items()}
        for rows in (False, True)
    ]
    assert found[0] == found[1]
    assert any(found[0][f"{name} 1"] != found[0][f"{name} 2"] for name in list(moss.cases)[:4])


def test_the_decision_is_drawn_whatever_top_p_says(moss: Moss) -> None:
    """Of two outcomes that are 80 and 20 in 100, a top_p of 0.5 for the codes must not forbid the second."""
    model = moss.model
    drawn = []

    class Decisions(MossTask):
        def take(self, request: Any, row: list[int]) -> bool:
            drawn.append(row[0] == model.spec.end_id)
            return super().take(request, row)

    prompt = next(iter(moss.cases.values())).prompt
    task = Decisions(model.spec)
    engine = AutoregressiveEngine.build(model, task, EngineSettings(max_total_tokens=4096), device_rows=False)
    before = model.decision.clone()
    with torch.no_grad():
        model.decision.mul_(0)
    try:
        for seed in range(40):
            options = {"temperature": 1.0, "top_p": 1e-6, "seed": seed, "max_frames": 1}
            engine.add(str(seed), {"prompt_ids": prompt, **options})
        while engine.has_work:
            engine.step()
    finally:
        with torch.no_grad():
            model.decision.copy_(before)
    assert 8 < sum(drawn) < 32  # an even chance


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no prompt": ({}, "a prompt is either ids or embeddings"),
    "other codebooks": ({"prompt_ids": [[1, 2]]}, r"\[length, 5\]"),
    "a code too large": ({"prompt_ids": [[1, CODES + 1, 0, 0, 0]]}, "id 25"),
    "no frames": ({"prompt_ids": [[1, 0, 0, 0, 0]], "max_frames": 0}, "max_new_tokens must be 1 or more"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_prompts_that_make_no_sense_are_refused(moss: Moss, case: str) -> None:
    payload, message = REFUSED[case]
    with pytest.raises(InvalidRequest, match=message):
        engine_for(moss.model).add("bad", payload)


def changed(folder: Path, into: Path, **fields: Any) -> Path:
    """A copy of the checkpoint whose config says something else; None removes a field."""
    copy = into / "copy"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    for name, value in fields.items():
        part, _, key = name.rpartition("__")
        place = config[part] if part else config
        place.pop(key, None) if value is None else place.update({key: value})
    (copy / "config.json").write_text(json.dumps(config))
    return copy


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no backbone": ({"qwen3_config": None}, "qwen3_config"),
    "version 1.0": ({"gpt2_config": None}, "gpt2_config; v1.0"),
    "no codebooks": ({"n_vq": None}, "n_vq"),
    "codebooks of several sizes": ({"audio_codebook_sizes": [24, 24, 24, 12]}, "differ"),
    "codebooks that are not counted": ({"audio_codebook_sizes": [24]}, "1 entries for n_vq 4"),
    "another width": ({"gpt2_config__n_embd": 64}, "n_embd 64 is not the backbone's 32"),
    "heads that do not divide": ({"gpt2_config__n_head": 5}, "n_head 5"),
    "learned positions": ({"gpt2_config__position_embedding_type": None}, "position_embedding_type 'absolute'"),
    "another activation": ({"gpt2_config__activation_function": "relu"}, "relu"),
    "no end": ({"audio_end_token_id": None}, "audio_end_token_id"),
}


@pytest.mark.parametrize("case", WRONG)
def test_configs_of_another_kind_are_refused_by_field(moss: Moss, tmp_path: Path, case: str) -> None:
    fields, message = WRONG[case]
    with pytest.raises(StartupError, match=message):
        MossSpec.parse(json.loads((changed(moss.tiny.folder, tmp_path, **fields) / "config.json").read_text()))


def test_a_checkpoint_of_another_depth_names_its_tensors(moss: Moss, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"missing: local_transformer.h.2.attn.c_attn.bias"):
        MossModel.load(changed(moss.tiny.folder, tmp_path, local_transformer_layers=3))


def test_a_step_in_device_rows_asks_the_host_nothing(moss: Moss) -> None:
    """On fake tensors, which have no values to look at."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        rows = DeviceRows(4, BOOKS + 1, 2, 0, "cpu")
        hidden = torch.zeros(3, moss.model.spec.decoder.hidden_size)
        at = torch.arange(3)
        state = RowState(rows, at, at)
        ids = state.choose(moss.model.rule_rows(moss.model.logits(hidden), state))
        found, ends = moss.model.finish_rows(ids, hidden, state)
    assert (tuple(found.shape), ends) == ((3, BOOKS + 1), None)
