"""CSM's engine and codec against transformers' own classes, on a tiny random checkpoint in real format."""

from __future__ import annotations

import io
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensorMode

from sgl_omni.audio.decode import decode_audio
from sgl_omni.engine.checkpoint import CheckpointError
from sgl_omni.engine.device_rows import DeviceRows
from sgl_omni.engine.engine import AutoregressiveEngine, EngineSettings
from sgl_omni.engine.row_state import RowState
from sgl_omni.engine.task import HandOver
from sgl_omni.errors import InvalidRequest
from sgl_omni.models.csm.codec import CodecDecoder
from sgl_omni.models.csm.files import checked
from sgl_omni.models.csm.model import CsmModel
from sgl_omni.models.csm.stages import create_preprocessing
from sgl_omni.models.csm.task import CsmTask

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny_csm import BOOKS, CODES, FRAME, TEXTS, WINDOW, Tiny, build, recording

FRAMES = 12
BOTH_RUNNERS = pytest.mark.parametrize("device_rows", [False, True], ids=["at-once", "ahead"])
GREEDY = {"temperature": 0.0, "max_new_tokens": FRAMES}
HEARD = ("Good morning.", recording(0.5, 16000))


@dataclass(frozen=True)
class Case:
    """``payload`` is what preprocessing makes of a request."""

    payload: dict[str, Any]
    codes: list[list[int]]


@dataclass(frozen=True)
class Csm:
    tiny: Tiny
    model: CsmModel
    prepare: Any
    cases: dict[str, Case]


@pytest.fixture(scope="module")
def csm(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Csm:
    tiny = build(tmp_path_factory.mktemp("csm"), FRAMES)
    prepare = create_preprocessing(str(tiny.folder)).fn
    samples = decode_audio(HEARD[1], 24000, param="references")
    references = [{"audio": HEARD[1], "text": HEARD[0]}]
    cases = {}
    for text, speaker in zip(TEXTS, "9012", strict=True):
        codes = tiny.codes(text, FRAMES, speaker)
        cases[text] = Case(prepare({"input": text, "voice": speaker, **GREEDY}, None), codes.tolist())
        codes = tiny.codes(text, FRAMES, heard=[(HEARD[0], samples)])
        cases[f"heard {text}"] = Case(
            prepare({"input": text, "references": references, **GREEDY}, None), codes.tolist()
        )
    return Csm(tiny, CsmModel.load(tiny.folder), prepare, cases)


def engine_for(model: CsmModel, device_rows: bool = False, **settings: Any) -> AutoregressiveEngine:
    options = EngineSettings(**{"max_total_tokens": 2048, "page_size": 1, **settings})
    task = CsmTask(model.spec, hand_over=HandOver(2, 5))
    return AutoregressiveEngine.build(model, task, options, device_rows=device_rows, max_positions=256)


def codes_of(seen: Any) -> list[list[int]]:
    return seen.joined("codes").tolist() if seen.chunks else []


def test_the_cases_end_by_themselves_and_by_the_limit(csm: Csm) -> None:
    lengths = {len(case.codes) for case in csm.cases.values()}
    assert FRAMES in lengths
    assert any(0 < n < FRAMES for n in lengths)
    assert len({str(case.codes) for case in csm.cases.values()}) == len(csm.cases)


@BOTH_RUNNERS
@pytest.mark.parametrize(("pool", "chunk"), [(2048, 2048), (2048, 7), (130, 2048)])
def test_greedy_frames_equal_transformers(csm: Csm, churn: Any, pool: int, chunk: int, device_rows: bool) -> None:
    engine = engine_for(csm.model, device_rows, max_total_tokens=pool, chunked_prefill_tokens=chunk)
    seen = churn(engine, {name: case.payload for name, case in csm.cases.items()}, f"{pool} {chunk}")
    for name, case in csm.cases.items():
        assert codes_of(seen[name]) == case.codes, name
        assert seen[name].result == {
            "finish_reason": "stop" if len(case.codes) < FRAMES else "length",
            "input_tokens": len(case.payload["prompt_ids"]),
            "output_tokens": len(case.codes),
        }


def test_sampled_codes_are_the_same_in_device_rows_and_follow_the_seed(csm: Csm, churn: Any) -> None:
    options = {"temperature": 1.3, "top_k": 9, "top_p": 0.9}
    payloads = {f"{t} {seed}": {**csm.cases[t].payload, **options, "seed": seed} for t in TEXTS for seed in (1, 2)}
    found = [
        {name: codes_of(one) for name, one in churn(engine_for(csm.model, rows), payloads, "").items()}
        for rows in (False, True)
    ]
    assert found[0] == found[1]
    assert all(found[0][f"{text} 1"] != found[0][f"{text} 2"] for text in TEXTS)


def test_frames_are_handed_on_in_pieces(csm: Csm) -> None:
    name = next(name for name, case in csm.cases.items() if len(case.codes) == FRAMES)
    engine = engine_for(csm.model)
    engine.add(name, {**csm.cases[name].payload, "speed": 1.5})
    outputs = [output for step in iter(lambda: engine.step() if engine.has_work else None, None) for output in step]
    chunks = [chunk for output in outputs for chunk in output.chunks]
    assert [len(chunk["codes"]) for chunk in chunks] == [2, 5, 5]
    assert all(chunk["speed"] == 1.5 for chunk in chunks)


def test_a_long_prompt_leaves_what_room_there_is(csm: Csm) -> None:
    task = CsmTask(csm.model.spec)
    rows = np.zeros((200, 1 + BOOKS), dtype=np.int64)
    assert task.parse("a", {"prompt_ids": rows}).max_outputs == 56
    assert task.parse("a", {"prompt_ids": rows, "max_frames": 70}).max_outputs == 70
    with pytest.raises(InvalidRequest, match="the model has 256"):
        engine_for(csm.model).add("a", {"prompt_ids": rows, "max_frames": 70})


def test_a_frame_ends_the_audio_by_all_codes_but_the_last_and_is_spoken_if_that_differs(csm: Csm) -> None:
    spec = csm.model.spec
    request = CsmTask(spec).parse("a", {"prompt_ids": csm.cases[TEXTS[0]].payload["prompt_ids"]})
    assert CsmTask(spec).take(request, [spec.audio_end_id, 0, 0, 0, 7])
    assert (len(request.outputs), request.finish_reason) == (1, "stop")


@pytest.mark.parametrize("cut", [1, 3, 40])
def test_audio_in_pieces_is_that_of_transformers(csm: Csm, cut: int) -> None:
    codes = torch.randint(0, CODES, (40, BOOKS), generator=torch.Generator().manual_seed(1))
    assert 2 * len(codes) > 3 * WINDOW
    decoder = CodecDecoder.load(csm.tiny.folder)
    stream = decoder.open()
    found = torch.cat([decoder.decode([piece.numpy()], [stream])[0] for piece in codes.split(cut)]).numpy()
    wanted = csm.tiny.audio(codes)
    assert found.shape == wanted.shape == (40 * FRAME,)
    assert 0.1 < np.abs(wanted).max() < 1
    np.testing.assert_allclose(found, wanted, atol=2e-6)


TABLES = ("backbone_model.embed_tokens.embed_audio_tokens.weight", "depth_decoder.model.embed_tokens.weight")


@pytest.mark.parametrize("kept", [TABLES[:1], TABLES[1:], TABLES])
def test_the_table_of_codes_may_have_either_name_or_both(csm: Csm, tmp_path: Path, kept: tuple[str, ...]) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(csm.tiny.folder, folder)
    tensors = load_file(folder / "model.safetensors")
    table = next(found for name in TABLES if (found := tensors.pop(name, None)) is not None)
    save_file({**tensors, **{name: table.clone() for name in kept}}, folder / "model.safetensors")
    assert torch.equal(CsmModel.load(folder).codes.weight, table)


def test_two_tables_of_codes_that_differ_are_refused(csm: Csm, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(csm.tiny.folder, folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {**tensors, **{name: torch.full((140, 32), float(i)) for i, name in enumerate(TABLES)}},
        folder / "model.safetensors",
    )
    with pytest.raises(CheckpointError, match="differ, which is not supported"):
        CsmModel.load(folder)


def test_a_missing_tensor_is_named(csm: Csm, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(csm.tiny.folder, folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["depth_decoder.codebooks_head.weight"], tensors["codec_model.upsample.conv.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing: depth_decoder\.codebooks_head\.weight"):
        CsmModel.load(folder)
    with pytest.raises(CheckpointError, match=r"missing: codec_model\.upsample\.conv\.weight"):
        CodecDecoder.load(folder)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": ({"architectures": ["VitsModel"]}, r"architectures is \['VitsModel'\]"),
    "no codec": ({"codec_config": None}, "lacks the field codec_config.codebook_size"),
    "no depth decoder": ({"depth_decoder_config": None}, "lacks the field depth_decoder_config.hidden_size"),
    "two tables of codes": ({"tie_codebooks_embeddings": False}, "tie_codebooks_embeddings is False"),
    "one codebook": ({"num_codebooks": 1}, "num_codebooks is 1"),
    "other codebooks": ({"num_codebooks": 5}, "codec_config.num_quantizers is 4; the backbone has 5"),
    "a codec that looks ahead": ({"codec_config__use_causal_conv": False}, "codec_config.use_causal_conv is False"),
    "a mark outside of the vocabulary": ({"audio_token_id": 5000}, "audio_token_id is 5000"),
    "an end that is no code": ({"codebook_eos_token_id": 34}, "codebook_eos_token_id is 34"),
    "more codes than embeddings": ({"vocab_size": 16, "depth_decoder_config__vocab_size": 16}, "codebook_size is 32"),
}


@pytest.mark.parametrize("case", WRONG)
def test_configs_of_another_kind_are_refused_by_field(csm: Csm, tmp_path: Path, case: str) -> None:
    fields, message = WRONG[case]
    folder = tmp_path / "copy"
    shutil.copytree(csm.tiny.folder, folder)
    config = json.loads((folder / "config.json").read_text())
    for name, value in fields.items():
        part, _, key = name.rpartition("__")
        place = config[part] if part else config
        place.pop(key) if value is None else place.update({key: value})
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidRequest, match=message) as caught:
        checked(str(folder))
    assert str(folder / "config.json") in str(caught.value)


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no text": ({"input": " "}, "input", "must be a text"),
    "no such speaker": ({"voice": "10"}, "voice", "one of 0, 1"),
    "repetition": ({"repetition_penalty": 1.2}, "repetition_penalty", "takes no"),
    "speed": ({"speed": 9.0}, "speed", "between"),
    "words unknown": ({"references": [{"audio": HEARD[1], "text": None}]}, "references[0].text", "needs the text"),
    "no recording": ({"references": [{"audio": b"nothing", "text": "a"}]}, "references[0].audio", "cannot be read"),
    "too many": ({"references": [{"audio": HEARD[1], "text": "a"}] * 9}, "references", "takes 8 references"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_requests_that_make_no_sense_are_refused(csm: Csm, case: str) -> None:
    fields, param, message = REFUSED[case]
    with pytest.raises(InvalidRequest, match=message) as caught:
        csm.prepare({"input": "Hello.", **fields}, None)
    assert caught.value.param == param


def test_options_come_from_the_request_then_from_the_checkpoint_then_from_the_authors(csm: Csm) -> None:
    found = csm.prepare({"input": "Hello.", "temperature": 0.3}, None)
    assert (found["temperature"], found["top_k"], found["top_p"]) == (0.3, 20, 1.0)
    assert csm.prepare({"input": "Hello."}, None)["temperature"] == 0.9


def test_a_recording_shorter_than_a_frame_is_one_frame(csm: Csm) -> None:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(100, np.float32), 24000, format="WAV")
    rows = csm.prepare({"input": "a", "references": [{"audio": file.getvalue(), "text": "a"}]}, None)["prompt_ids"]
    assert (rows[:, 0] == csm.model.spec.audio_id).sum() == 1


def test_a_step_in_device_rows_asks_the_host_nothing(csm: Csm) -> None:
    """On fake tensors, which have no values to look at."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        rows = DeviceRows(4, BOOKS + 1, 2, 0, "cpu")
        hidden = torch.zeros(3, csm.model.spec.backbone.hidden_size)
        at = torch.arange(3)
        state = RowState(rows, at, at)
        ids = state.choose(csm.model.rule_rows(csm.model.logits(hidden), state))
        found, ends = csm.model.finish_rows(ids, hidden, state)
    assert (tuple(found.shape), ends) == ((3, BOOKS + 1), None)
