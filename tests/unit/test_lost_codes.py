"""Codes of a frame that were to be chosen from logits which are no numbers: their request fails by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import test_csm
import test_qwen3_omni
import torch
from engine_fixtures import EVERY_RUNNER, captured_steps
from test_csm import Csm, csm
from test_qwen3_omni import Omni, Speech, omni, payload_of, speeches
from test_qwen3_tts import CASES, Tiny, models, prepared

import test_moss_tts_local
from sgl_omni.engine.code_predictor import greedy
from sgl_omni.engine.engine import AutoregressiveEngine
from sgl_omni.engine.interface import EngineOutput
from test_moss_tts_local import Moss, moss

__all__ = ["captured_steps", "csm", "models", "moss", "omni", "speeches"]

ERROR = "the logits are not all finite: the model's weights may be damaged"


@dataclass(frozen=True)
class Predictor:
    """``weight`` is of what chooses a code that is neither the frame's first nor its last."""

    engine: Callable[..., AutoregressiveEngine]
    payload: dict[str, Any]
    weight: torch.Tensor


@pytest.fixture
def predictor(request: pytest.FixtureRequest) -> Predictor:
    found: Predictor = globals()[f"of_{request.param}"](request)
    return found


def of_csm(request: pytest.FixtureRequest) -> Predictor:
    csm: Csm = request.getfixturevalue("csm")
    payload = next(iter(csm.cases.values())).payload
    return Predictor(lambda rows: test_csm.engine_for(csm.model, rows), payload, csm.model.depth.heads[0])


def of_moss(request: pytest.FixtureRequest) -> Predictor:
    moss: Moss = request.getfixturevalue("moss")
    payload = next(iter(moss.cases.values())).payload
    return Predictor(lambda rows: test_moss_tts_local.engine_for(moss.model, rows), payload, moss.model.decision)


def of_qwen3_tts(request: pytest.FixtureRequest) -> Predictor:
    models: dict[str, Tiny] = request.getfixturevalue("models")
    name = next(name for name, case in CASES.items() if case["kind"] == "base")
    tiny = models["base"]
    return Predictor(tiny.engine, prepared(models, name), tiny.talker.predictor.heads[0])


def of_qwen3_omni(request: pytest.FixtureRequest) -> Predictor:
    omni: Omni = request.getfixturevalue("omni")
    speech: Speech = request.getfixturevalue("speeches")[0]
    payload = {**payload_of(speech), "added_embeddings": speech.text}
    return Predictor(lambda rows: test_qwen3_omni.talker_engine(omni, rows), payload, omni.talker.predictor.heads[0])


EVERY_PREDICTOR = pytest.mark.parametrize("predictor", ["csm", "moss", "qwen3_tts", "qwen3_omni"], indirect=True)


def outputs_of(engine: AutoregressiveEngine) -> list[EngineOutput]:
    found: list[EngineOutput] = []
    while engine.has_work:
        found += engine.step()
    return found


def codes_of(outputs: list[EngineOutput]) -> list[Any]:
    return [row for output in outputs for chunk in output.chunks for row in chunk["codes"].tolist()]


@EVERY_RUNNER
@EVERY_PREDICTOR
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 1}], ids=["greedy", "drawn"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_request_fails_whose_frames_cannot_be_completed(
    predictor: Predictor, bad: float, options: dict[str, Any], device_rows: bool
) -> None:
    engine = predictor.engine(device_rows)
    payload = {**predictor.payload, **options}
    engine.add("before", payload)
    expected = codes_of(outputs_of(engine))
    with torch.no_grad():
        kept = predictor.weight[0].clone()
        predictor.weight[0] = bad
    try:
        engine.add("bad", payload)
        outputs = outputs_of(engine)
    finally:
        with torch.no_grad():
            predictor.weight[0] = kept
    assert [(output.request_id, str(output.error)) for output in outputs] == [("bad", ERROR)]
    assert engine.stats()["kv_used_tokens"] == 0
    engine.add("after", payload)
    assert codes_of(outputs_of(engine)) == expected


@EVERY_RUNNER
def test_those_whose_codes_are_known_go_on(omni: Omni, speeches: list[Speech], device_rows: bool) -> None:
    """What follows one of the codes is no number: requests that never say it never see that."""
    predictor = omni.talker.predictor
    payloads = {str(i): {**payload_of(s), "added_embeddings": s.text} for i, s in enumerate(speeches)}
    last = predictor.num_codes - 1
    said = {name: {row[last] for row in speeches[int(name)].codes} for name in payloads}  # by the last but one head
    code = next(c for codes in said.values() for c in codes if any(c not in other for other in said.values()))
    bad = {name for name, codes in said.items() if code in codes}
    engine = test_qwen3_omni.talker_engine(omni, device_rows)
    with torch.no_grad():
        kept = predictor.embedding[last - 1][code].clone()
        predictor.embedding[last - 1][code] = math.nan
    try:
        for name, payload in payloads.items():
            engine.add(name, payload)
        outputs = outputs_of(engine)
    finally:
        with torch.no_grad():
            predictor.embedding[last - 1][code] = kept
    assert {o.request_id for o in outputs if o.error is not None} == bad
    assert {str(o.error) for o in outputs if o.error is not None} == {ERROR}
    for name in payloads.keys() - bad:
        assert codes_of([o for o in outputs if o.request_id == name]) == speeches[int(name)].codes


def test_some_code_of_the_codebook_is_chosen_all_the_same(omni: Omni) -> None:
    """The step after it may run already when the host learns of it."""
    talker = omni.talker
    width, most = talker.spec.decoder.hidden_size, talker.predictor.heads.shape[1]
    hidden = torch.full((2, width), math.nan)
    rows = talker.whole_rows(torch.zeros(2, 1, dtype=torch.int64), hidden, greedy)
    assert 0 <= int(rows.min()) <= int(rows.max()) < most
