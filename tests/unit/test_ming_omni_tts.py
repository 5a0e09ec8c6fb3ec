"""Ming-Omni-TTS against a plain model on transformers' Qwen2, on a tiny random checkpoint in real format."""

from __future__ import annotations

import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sgl_omni.engine.checkpoint import CheckpointError
from sgl_omni.engine.device_rows import DeviceRows
from sgl_omni.engine.engine import AutoregressiveEngine, EngineSettings
from sgl_omni.engine.row_state import RowState
from sgl_omni.engine.task import HandOver
from sgl_omni.errors import InvalidRequest, StartupError
from sgl_omni.models.ming_omni_tts.model import MingModel, _with_latents
from sgl_omni.models.ming_omni_tts.pipeline import MingOmniTTSPipelineConfig
from sgl_omni.models.ming_omni_tts.preprocess import SpeechPreprocessor
from sgl_omni.models.ming_omni_tts.prompt import PromptWriter, caption
from sgl_omni.models.ming_omni_tts.spec import MingSpec
from sgl_omni.models.ming_omni_tts.task import MingTask
from sgl_omni.models.ming_omni_tts.vae import SequenceAttend, VaeEncoder
from sgl_omni.text.tokenizer import TextTokenizer

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny_ming import CAPTION, LATENT, PATCH, RATE, STEP, TEXTS, Tiny, audio_of, build
from tiny_moss import recording

STEPS = 9
TOLERANCE = 2e-4


@dataclass(frozen=True)
class Case:
    payload: dict[str, Any]
    latents: torch.Tensor
    audio: np.ndarray
    reason: str


@dataclass(frozen=True)
class Ming:
    tiny: Tiny
    model: MingModel
    cases: dict[str, Case]


@pytest.fixture(scope="module")
def ming(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Ming:
    tiny = build(tmp_path_factory.mktemp("ming"))
    generator = torch.Generator().manual_seed(3)
    cases = {}
    for i, text in enumerate(TEXTS):
        for kind, heard, temperature in (("plain", 0, 0.0), ("voice", 1 + i, 0.0), ("stirred", 0, 1.5)):
            latents = torch.randn(heard * PATCH, LATENT, generator=generator)
            ids, at = tiny.prompt(text, spoken="Hello." if heard else None)
            said = tiny.model.latents(ids, at, latents, 5 + i, STEPS, temperature)
            reason = "stop" if tiny.model.ended else "length"
            options = {"seed": 5 + i, "temperature": temperature, "max_steps": STEPS}
            payload = {"ids": np.asarray(ids), "speaker_at": at, **options}
            payload |= {"latents": latents.numpy()} if heard else {}
            cases[f"{kind} {i}"] = Case(payload, said, tiny.model.audio.decode(said).numpy().clip(-1, 1), reason)
    return Ming(tiny, MingModel.load(tiny.folder), cases)


def engine_for(ming: Ming, *, device_rows: bool | str = False, **settings: Any) -> AutoregressiveEngine:
    options = EngineSettings(**{"max_total_tokens": 4096, "page_size": 1, **settings})
    return AutoregressiveEngine.build(ming.model, MingTask(ming.model), options, device_rows=bool(device_rows))


def test_the_cases_end_by_the_head_and_by_the_limit(ming: Ming) -> None:
    lengths = {len(case.latents) // PATCH for case in ming.cases.values()}
    assert STEPS in lengths and any(5 <= length < STEPS for length in lengths)
    assert all(np.abs(case.audio).max() > 0.01 for case in ming.cases.values())


@pytest.mark.parametrize("pool", [4096, 180])
@pytest.mark.parametrize(
    ("chunk", "device_rows"), [(7, False), (2048, False), (7, True), (2048, True), (7, "captured")]
)
def test_audio_equals_the_plain_model(ming: Ming, churn: Any, pool: int, chunk: int, device_rows: bool | str) -> None:
    engine = engine_for(ming, max_total_tokens=pool, chunked_prefill_tokens=chunk, device_rows=device_rows)
    assert not ming.model.asks_host
    seen = churn(engine, {name: case.payload for name, case in ming.cases.items()}, f"{pool} {chunk}")
    assert (engine.stats()["retractions"] > 0) == (pool < 4096)
    for name, case in ming.cases.items():
        result, steps = seen[name].result, len(case.latents) // PATCH
        assert (result["output_tokens"], result["finish_reason"]) == (steps, case.reason)
        audio = audio_of(ming.tiny.folder, seen[name].chunks)
        assert len(audio) == steps * STEP
        assert np.abs(audio - case.audio).max() < TOLERANCE, name


def test_a_step_in_device_rows_asks_the_host_nothing(ming: Ming) -> None:
    """On fake tensors, which have no values to look at."""
    model = ming.model
    with FakeTensorMode(allow_non_fake_inputs=True):
        rows = DeviceRows(4, model.columns, 2, 0, "cpu", kept_shape=model.kept_shape)
        hidden = torch.zeros(3, model.spec.decoder.hidden_size)
        at = torch.arange(3)
        state = RowState(rows, at, at, at)
        ids = state.choose(model.rule_rows(model.logits(hidden), state))
        found, ends = model.finish_rows(ids, hidden, state)
        embedded = model.embed_ids(found)
    assert (tuple(found.shape), ends) == ((3, 1 + PATCH * LATENT), None)
    assert embedded.shape == hidden.shape


def test_latents_go_through_ids_bit_by_bit(ming: Ming) -> None:
    latents = torch.randn(5, PATCH, LATENT)
    latents[0, 0, :4] = torch.tensor([0.0, -0.0, 1e-42, -3e38])
    rows = _with_latents(torch.ones(5, 1, dtype=torch.int64), latents)
    found = ming.model.latents_of(torch.tensor(rows.tolist()))
    assert torch.equal(found.view(torch.int32), latents.view(torch.int32)) and rows[:, 0].tolist() == [1] * 5


def test_latents_equal_the_plain_model(ming: Ming) -> None:
    engine = engine_for(ming)
    for name, case in ming.cases.items():
        engine.add(name, case.payload)
    said: dict[str, list[np.ndarray]] = {name: [] for name in ming.cases}
    while engine.has_work:
        for output in engine.step():
            said[output.request_id] += [chunk["latents"] for chunk in output.chunks]
    for name, case in ming.cases.items():
        found = torch.from_numpy(np.concatenate(said[name]))
        assert (found - case.latents).abs().max() < 1e-4 * case.latents.abs().max()


@pytest.mark.parametrize("device_rows", [False, True])
def test_latents_are_handed_over_early_at_first_and_then_some_together(ming: Ming, device_rows: bool) -> None:
    task = MingTask(ming.model, hand_over=HandOver(2, 3))
    settings = EngineSettings(max_total_tokens=4096)
    engine = AutoregressiveEngine.build(ming.model, task, settings, device_rows=device_rows)
    payloads = {name: {**case.payload, "speed": 1.5} for name, case in ming.cases.items()}
    for name, payload in payloads.items():
        engine.add(name, payload)
    steps: dict[str, list[int]] = {name: [] for name in payloads}
    while engine.has_work:
        for output in engine.step():
            assert all(chunk["speed"] == 1.5 for chunk in output.chunks)
            steps[output.request_id] += [len(chunk["latents"]) / PATCH for chunk in output.chunks]
    for name, case in ming.cases.items():
        *pieces, last = steps[name]
        assert pieces == [2, *[3] * (len(pieces) - 1)] and 1 <= last <= 3
        assert sum(steps[name]) == len(case.latents) / PATCH


@pytest.mark.parametrize("samples", [STEP, 3 * STEP, 5 * STEP - 3])
def test_references_become_the_latents_of_the_plain_model(ming: Ming, samples: int) -> None:
    heard = torch.randn(samples, generator=torch.Generator().manual_seed(samples)) * 0.3
    encoder = VaeEncoder.load(ming.tiny.folder)
    noise = torch.randn(encoder.latents_of(samples), LATENT, generator=torch.Generator().manual_seed(0))
    found, expected = encoder.encode(heard, noise), ming.tiny.model.audio.encode(heard, noise)
    assert found.shape == (-(-samples // (STEP // PATCH)), LATENT)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.fixture(scope="module")
def ask(ming: Ming) -> SpeechPreprocessor:
    return SpeechPreprocessor(PromptWriter(TextTokenizer.load(ming.tiny.folder)), RATE, STEP)


@pytest.mark.parametrize("text", TEXTS)
def test_prompts_are_those_of_the_published_code(ming: Ming, ask: SpeechPreprocessor, text: str) -> None:
    ids, at = ming.tiny.prompt(text, caption=CAPTION)
    found = ask({"input": text, "instructions": "soft"}, None)  # type: ignore[arg-type]
    assert (found["ids"].tolist(), found["speaker_at"]) == (ids, at)
    heard = {"references": [{"audio": recording(0.05), "text": "Hello."}]}
    found = ask({"input": text, **heard}, None)  # type: ignore[arg-type]
    assert (found["ids"].tolist(), found["speaker_at"]) == ming.tiny.prompt(text, spoken="Hello.")
    assert len(found["samples"]) == 7 * STEP  # 400 samples, filled up


def test_prompts_are_the_same_whatever_other_threads_write(ming: Ming, ask: SpeechPreprocessor) -> None:
    def write(i: int) -> list[int]:
        return ask({"input": TEXTS[i % 2]}, None)["ids"].tolist()  # type: ignore[arg-type]

    expected = [ming.tiny.prompt(text)[0] for text in TEXTS[:2]]
    with ThreadPoolExecutor(4) as pool:
        assert all(ids == expected[i % 2] for i, ids in enumerate(pool.map(write, range(1000))))


def test_captions_of_fields() -> None:
    told = json.loads(caption('{"情感": "高兴", "BGM": {"SNR": 10.0}}'))["audio_sequence"][0]
    assert list(told) == ["序号", "说话人", "BGM", "情感", "方言", "风格", "语速", "基频", "音量", "IP"]
    assert (told["情感"], told["BGM"]["SNR"]) == ("高兴", 10.0)


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no text": ({"input": ""}, "input", "must be a text"),
    "a voice": ({"voice": "alloy"}, "voice", "no voices"),
    "top_p": ({"top_p": 0.9}, "top_p", "takes no top_p"),
    "no transcript": ({"references": [{"audio": recording(0.1), "text": None}]}, "references[0].text", "what is said"),
    "noise": ({"references": [{"audio": b"RIFF", "text": "a"}]}, "references[0].audio", "cannot be read"),
    "two": ({"references": [{"audio": b"", "text": "a"}] * 2}, "references", "one reference"),
    "an unknown field": ({"instructions": '{"mood": 1}'}, "instructions", "unknown fields mood"),
    "broken JSON": ({"instructions": "{"}, "instructions", "no JSON object"),
    "too fast": ({"speed": 9.0}, "speed", "between"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(ask: SpeechPreprocessor, case: str) -> None:
    payload, param, message = REFUSED[case]
    with pytest.raises(InvalidRequest, match=message) as caught:
        ask({"input": "Hi.", **payload}, None)  # type: ignore[arg-type]
    assert caught.value.param == param


def changed(folder: Path, into: Path, **fields: Any) -> Path:
    copy = into / "copy"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    for name, value in fields.items():
        *parts, key = name.split("__")
        place = config
        for part in parts:
            place = place[part]
        place.update({key: value})
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def test_what_the_pipeline_says_that_it_serves(ming: Ming, tmp_path: Path) -> None:
    speech = MingOmniTTSPipelineConfig.tasks(str(ming.tiny.folder)).speech
    assert speech is not None
    assert (speech.sample_rate, speech.max_references, speech.voices) == (RATE, 1, ())
    for i, (fields, message) in enumerate(
        [
            ({"model_type": "bailingmm"}, "model_type is 'bailingmm'"),
            ({"ditar_config": {}}, "lacks the field ditar_config.patch_size"),
            ({"audio_tokenizer_config__semantic_module_kwargs": {}}, "semantic_module_kwargs"),
        ]
    ):
        (tmp_path / str(i)).mkdir()
        with pytest.raises(InvalidRequest, match=message):
            MingOmniTTSPipelineConfig.tasks(str(changed(ming.tiny.folder, tmp_path / str(i), **fields)))


def test_configs_and_checkpoints_of_another_shape(ming: Ming, tmp_path: Path) -> None:
    folder = changed(ming.tiny.folder, tmp_path, ditar_config__depth=3)
    with pytest.raises(CheckpointError, match=r"missing: flowloss.cfm.model.blocks.2.attn.to_k.bias"):
        MingModel.load(folder)
    config = json.loads((folder / "config.json").read_text())
    config["aggregator_config"]["num_heads"] = 3
    with pytest.raises(StartupError, match=r"aggregator_config\.num_heads 3"):
        MingSpec.parse(config)


@pytest.mark.parametrize("window", [None, 5, 2000])
def test_long_recordings_are_attended_part_by_part(window: int | None) -> None:
    """As with one mask for all places, of which there would be the square of a minute's many thousands."""
    q, k, v = (torch.randn(2500, heads, 8, generator=torch.Generator().manual_seed(3)) for heads in (4, 2, 2))
    at = torch.arange(2500)
    distance = at[:, None] - at
    mask = (distance >= 0) & (distance < (window or 2500))
    over = [part.transpose(0, 1)[None] for part in (q, k, v)]
    whole = torch.nn.functional.scaled_dot_product_attention(*over, mask, enable_gqa=True)[0].transpose(0, 1)
    assert (SequenceAttend()(0, q, k, v, window=window) - whole).abs().max() < 1e-6
