"""The first outputs of every model in device rows with the GPU's kernels, against the same references as elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import test_csm
import test_higgs_audio_v2
import test_qwen3_omni
import test_whisper_decoder
import torch
from test_csm import Csm, csm
from test_higgs_audio_v2 import Higgs, higgs
from test_qwen3_omni import EOS, Omni, Speech, omni, payload_of, speeches
from test_qwen3_tts import CASES, GOLDENS, Tiny, models, prepared
from test_whisper_decoder import Whisper, whisper

import test_moss_tts_local
from sgl_omni.engine.engine import AutoregressiveEngine
from test_moss_tts_local import Moss, moss

__all__ = ["csm", "higgs", "models", "moss", "omni", "speeches", "whisper"]

pytestmark = pytest.mark.usefixtures("by_kernels")

TOKENS = 3


def first_codes(engine: AutoregressiveEngine, payloads: dict[str, dict[str, Any]]) -> dict[str, list[list[int]]]:
    """The frames of each request up to its first chunk."""
    for name, payload in payloads.items():
        engine.add(name, payload)
    found: dict[str, list[list[int]]] = {}
    while len(found) < len(payloads):
        for output in engine.step():
            assert output.error is None
            rows = [row for chunk in output.chunks for row in chunk["codes"].tolist()]
            if rows or output.result is not None:
                found.setdefault(output.request_id, rows)
    return found


def begins(whole: list[list[int]], first: list[list[int]]) -> bool:
    return bool(first) and whole[: len(first)] == first


def test_the_thinkers_tokens_and_hidden_states(omni: Omni) -> None:
    """Rotation along three axes, experts, hidden states of three layers."""
    prompts = {"a": [40, 31, 99, 120, 64], "b": [77, 35, 150]}
    layers = [0, omni.talker.spec.accept_layer, -1]
    engine = test_qwen3_omni.thinker_engine(omni, True, chunked_prefill_tokens=4)
    for name, ids in prompts.items():
        engine.add(name, {"prompt_ids": ids, "max_new_tokens": TOKENS, "hidden_states": layers, "ignore_eos": True})
    hidden: dict[str, list[torch.Tensor]] = {name: [] for name in prompts}
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            hidden[output.request_id] += [chunk["hidden_states"] for chunk in output.chunks]
            if output.result is not None:
                tokens[output.request_id] = output.result["token_ids"]
    for name, ids in prompts.items():
        with torch.no_grad():
            read = torch.tensor([ids + tokens[name][:-1]])
            reference = omni.reference.thinker.model(read, output_hidden_states=True)
            logits = omni.reference.thinker(read).logits[0, len(ids) - 1 :]
        assert tokens[name] == logits.argmax(-1).tolist()
        assert EOS not in tokens[name]
        kept = (reference.hidden_states[0], reference.hidden_states[layers[1]], reference.last_hidden_state)
        expected = torch.stack([states[0] for states in kept], 1)
        assert (torch.cat(hidden[name]) - expected).abs().max() / expected.abs().max() < 1e-4


def test_the_talkers_frames(omni: Omni, speeches: list[Speech]) -> None:
    """Arriving rows, a code predictor, penalised repetition."""
    engine = test_qwen3_omni.talker_engine(omni, True)
    cases = {str(i): {**payload_of(s), "added_embeddings": s.text} for i, s in enumerate(speeches[:2])}
    for name, frames in first_codes(engine, cases).items():
        assert begins(speeches[int(name)].codes, frames)


def test_whispers_tokens(whisper: Whisper) -> None:
    """Attention over an encoder's output, rules about times."""
    names = ("text", "times")
    engine = test_whisper_decoder.engine_for(whisper.decoder, True)
    for name in names:
        engine.add(name, whisper.payloads[name])
    said: dict[str, list[int]] = {name: [] for name in names}
    while engine.has_work and any(len(tokens) < TOKENS for tokens in said.values()):
        for output in engine.step():
            said[output.request_id] += [token for chunk in output.chunks for token in chunk["token_ids"]]
    for name, tokens in said.items():
        assert whisper.expected[name][0][: len(tokens)] == tokens


def test_higgs_frames(higgs: Higgs) -> None:
    """Summed codebooks in a staircase."""
    names = list(higgs.cases)[:2]
    engine = test_higgs_audio_v2.engine_for(higgs.model, True)
    for name, frames in first_codes(engine, {name: higgs.cases[name].payload for name in names}).items():
        assert begins(higgs.cases[name].frames, frames)


def test_moss_frames(moss: Moss) -> None:
    name = next(iter(moss.cases))
    engine = test_moss_tts_local.engine_for(moss.model, True)
    assert begins(moss.cases[name].codes, first_codes(engine, {name: moss.cases[name].payload})[name])


def test_csm_frames(csm: Csm) -> None:
    names = list(csm.cases)[:2]
    engine = test_csm.engine_for(csm.model, True)
    for name, frames in first_codes(engine, {name: csm.cases[name].payload for name in names}).items():
        assert begins(csm.cases[name].codes, frames)


def test_qwen3_tts_frames(models: dict[str, Tiny]) -> None:
    name = next(name for name, case in CASES.items() if case["kind"] == "base")
    frames = first_codes(models["base"].engine(True), {name: prepared(models, name)})[name]
    assert begins(GOLDENS[f"{name}/codes"].tolist(), frames)


@pytest.mark.parametrize("seed", [1, 2])
def test_drawn_frames_are_those_of_plain_torch(csm: Csm, seed: int) -> None:
    """The kernel that chooses, with options of its own for each row."""
    name = next(iter(csm.cases))
    drawn = {**csm.cases[name].payload, "temperature": 1.3, "top_k": 9, "top_p": 0.9, "seed": seed}
    found = [first_codes(test_csm.engine_for(csm.model, rows), {name: drawn})[name] for rows in (False, True)]
    assert found[0] == found[1]


@pytest.mark.parametrize("options", [{}, {"temperature": 1.3, "top_k": 9, "seed": 1}], ids=["greedy", "drawn"])
def test_a_frame_that_cannot_be_completed_fails_its_request(csm: Csm, options: dict[str, Any]) -> None:
    """The kernel that chooses says so."""
    engine = test_csm.engine_for(csm.model, True)
    head = csm.model.depth.heads[0]
    with torch.no_grad():
        kept = head.clone()
        head[:, 0] = torch.nan  # of one code: numpy, which stands for the GPU, takes no maximum of nothing but these
    try:
        engine.add("a", {**next(iter(csm.cases.values())).payload, **options})
        outputs = [output for step in iter(lambda: engine.step() if engine.has_work else None, None) for output in step]
    finally:
        with torch.no_grad():
            head.copy_(kept)
    assert [str(output.error) for output in outputs] == [
        "the logits are not all finite: the model's weights may be damaged"
    ]
