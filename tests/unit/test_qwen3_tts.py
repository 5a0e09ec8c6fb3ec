"""Qwen3-TTS against the model authors' own code: what that made of tiny checkpoints lies in ``data/qwen3_tts``."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from engine_fixtures import EVERY_RUNNER
from torch._subclasses.fake_tensor import FakeTensorMode

from sgl_omni.engine.code_predictor import CodeSampling, greedy
from sgl_omni.engine.device_rows import DeviceRows
from sgl_omni.engine.engine import AutoregressiveEngine, EngineSettings
from sgl_omni.engine.row_state import RowState
from sgl_omni.models.qwen3_tts.codec import CodecDecoder
from sgl_omni.models.qwen3_tts.facts import ModelFacts, next_cut
from sgl_omni.models.qwen3_tts.prompt import PromptBuilder
from sgl_omni.models.qwen3_tts.references import References, name_on_disk
from sgl_omni.models.qwen3_tts.stages import create_engine, create_preprocessing, create_vocoder
from sgl_omni.models.qwen3_tts.talker import TalkerModel
from sgl_omni.models.qwen3_tts.task import TalkerTask
from sgl_omni.models.qwen3_tts.vocoder import Vocoder

sys.path.append(str(Path(__file__).parents[1]))

import tiny_qwen3_tts as tiny

pytest.importorskip("transformers")

GOLDENS = np.load(tiny.DATA / "goldens.npz")
CASES: dict[str, dict[str, Any]] = json.loads((tiny.DATA / "cases.json").read_text())
FRAMES = 24
REQUEST: Any = SimpleNamespace(id="r", aborted=False)
DRAWS = CodeSampling(temperature=0.9, top_k=50, top_p=1.0)

ROWS_TOLERANCE, SPEAKER_TOLERANCE, AUDIO_TOLERANCE = 5e-6, 2e-5, 1e-6


@dataclass(frozen=True)
class Tiny:
    folder: Path
    preprocess: Any
    talker: TalkerModel
    vocoder: Vocoder

    @property
    def prompts(self) -> PromptBuilder:
        return PromptBuilder(self.talker)

    def engine(self, device_rows: bool = False, **settings: Any) -> AutoregressiveEngine:
        options = EngineSettings(**{"max_total_tokens": 2048, "page_size": 1, **settings})
        task = TalkerTask(self.talker.spec, self.prompts)
        return AutoregressiveEngine.build(self.talker, task, options, max_positions=512, device_rows=device_rows)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> dict[str, Tiny]:
    found = {}
    for kind in tiny.KINDS:
        folder = tiny.build(tmp_path_factory.mktemp(kind), kind)
        preprocess: Any = create_preprocessing(str(folder)).fn
        vocoder: Any = create_vocoder(str(folder))
        found[kind] = Tiny(folder, preprocess, TalkerModel.load(folder, DRAWS), vocoder)
    return found


def wav(samples: np.ndarray, rate: int) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="WAV", subtype="FLOAT")
    return file.getvalue()


def payload_of(case: dict[str, Any], **options: Any) -> dict[str, Any]:
    """What a server gives the entry stage for a case."""
    payload = {"input": case["text"], "voice": case.get("speaker"), "speed": 1.0, "temperature": 0.0, **options}
    payload |= {"max_new_tokens": FRAMES} if "max_new_tokens" not in options else {}
    if case["kind"] == "base":
        payload["references"] = [{"audio": wav(tiny.recording(), tiny.SAMPLE_RATE), "text": case.get("ref_text")}]
    given = {"language": case.get("language"), "instructions": case.get("instruct")}
    return payload | {key: value for key, value in given.items() if value is not None}


def prepared(models: dict[str, Tiny], name: str, **options: Any) -> dict[str, Any]:
    case = CASES[name]
    found: dict[str, Any] = models[case["kind"]].preprocess(payload_of(case, **options), REQUEST)
    return found


@pytest.mark.parametrize("name", CASES)
def test_prompts_are_those_of_the_authors(models: dict[str, Tiny], name: str) -> None:
    model = models[CASES[name]["kind"]]
    task = TalkerTask(model.talker.spec, model.prompts)
    request = task.parse("a", prepared(models, name))
    expected = GOLDENS[f"{name}/prompt"]
    assert request.prompt.rows.shape == expected.shape
    assert np.abs(request.prompt.rows.numpy() - expected).max() < ROWS_TOLERANCE
    assert request.inputs is not None
    trailing = GOLDENS[f"{name}/trailing"]
    added = request.inputs.rows[: len(trailing)]  # the authors' rows end with padding where there is no text
    assert np.abs(added.numpy() - trailing).max() < ROWS_TOLERANCE
    assert request.inputs.count in (len(trailing), len(trailing) - 1)


@EVERY_RUNNER
@pytest.mark.parametrize("is_small", [False, True])
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_frames_are_those_of_the_authors(
    models: dict[str, Tiny], churn: Any, kind: str, is_small: bool, device_rows: bool
) -> None:
    names = [name for name, case in CASES.items() if case["kind"] == kind]
    longest = max(len(GOLDENS[f"{name}/prompt"]) for name in names) + FRAMES
    pool = longest + 8 if is_small else 2048
    engine = models[kind].engine(device_rows, max_total_tokens=pool, chunked_prefill_tokens=9)
    seen = churn(engine, {name: prepared(models, name) for name in names}, f"{kind} {pool}")
    assert (engine.stats()["retractions"] > 0) == is_small
    for name in names:
        expected = GOLDENS[f"{name}/codes"]
        assert seen[name].joined("codes").tolist() == expected.tolist()
        assert seen[name].result["finish_reason"] == ("length" if len(expected) == FRAMES else "stop")
        assert seen[name].result["output_tokens"] == len(expected)
        cuts = np.cumsum([len(chunk["codes"]) for chunk in seen[name].chunks]).tolist()
        assert cuts == [cut for cut in (4, 8, 16) if cut < len(expected)] + [len(expected)]
    assert {len(GOLDENS[f"{name}/codes"]) for name in CASES} == {2, 16, FRAMES}


def say(vocoder: Vocoder, codes: np.ndarray, groups: list[int], **first: Any) -> np.ndarray:
    """Feeds frames in groups; returns the audio."""
    state = vocoder.open(REQUEST)
    audio, at = [], 0
    told: dict[str, Any] = {"speed": 1.0, "reference_codes": None, **first}
    for count in [*groups, len(codes)]:
        audio += [made["audio"] for made in vocoder.feed(state, {"codes": codes[at : at + count], **told})]
        at, told = at + count, {}
    audio += [made["audio"] for made in vocoder.flush(state)]
    vocoder.close(state)
    return np.concatenate(audio)


@pytest.mark.parametrize("name", CASES)
def test_audio_is_that_of_the_authors(models: dict[str, Tiny], name: str) -> None:
    vocoder = models[CASES[name]["kind"]].vocoder
    codes, expected = GOLDENS[f"{name}/codes"], GOLDENS[f"{name}/audio"]
    reference = GOLDENS["reference/codes"] if "ref_text" in CASES[name] else None
    audio = say(vocoder, codes, [], reference_codes=reference)
    assert audio.shape == expected.shape
    assert np.abs(audio - expected).max() < AUDIO_TOLERANCE
    assert np.abs(expected).max() > 0.05
    if reference is not None:
        assert np.abs(say(vocoder, codes, []) - expected).max() > 1e-3


@pytest.mark.parametrize("groups", [[1] * 70, [3, 11, 1, 20, 2, 30], [70]])
def test_a_stream_of_frames_is_the_whole(models: dict[str, Tiny], groups: list[int]) -> None:
    vocoder = models["base"].vocoder
    codes, expected = GOLDENS["codec/codes"], GOLDENS["codec/audio"]
    audio = say(vocoder, codes, groups)
    assert np.array_equal(audio, say(vocoder, codes, []))
    assert audio.shape == (70 * tiny.FRAME_SAMPLES,)
    assert np.abs(audio - expected).max() < AUDIO_TOLERANCE


def test_a_stream_that_is_primed_goes_on_as_if_it_had_been_spoken(models: dict[str, Tiny]) -> None:
    vocoder, codes = models["base"].vocoder, GOLDENS["codec/codes"]
    spoken = say(vocoder, codes[41:], [], reference_codes=codes[:41])
    assert np.abs(spoken - GOLDENS["codec/audio"][41 * tiny.FRAME_SAMPLES :]).max() < AUDIO_TOLERANCE


def test_a_stream_remembers_little_however_long_its_pieces_are(models: dict[str, Tiny]) -> None:
    decoder = CodecDecoder.load(models["base"].folder / "speech_tokenizer")
    held = []
    for count in (20, 70):
        stream = decoder.open()
        decoder([GOLDENS["codec/codes"][:count]], [stream])
        held.append(stream.memory.untyped_storage().nbytes())
    assert held[0] == held[1]


GPU_PATH = """
import sys
from pathlib import Path
import numpy as np
import torch
sys.path[:0] = [{tests!r}]
import tiny_qwen3_tts as tiny
import sgl_omni.engine.platform as platform
import sgl_omni.engine.decoder_graphs as graphs
import sgl_omni.models.qwen3_tts.codec as codec
from engine_fixtures import RunAgain, spoil_new_memory

spoil_new_memory()
torch.set_num_threads(1)
folder = Path({folder!r})
rng = np.random.default_rng(3)
codes = rng.integers(0, tiny.CODES, (2, 5, tiny.GROUPS)).astype(np.int16)
plain = codec.CodecDecoder.load(folder)
whole = [plain([one], [plain.open()])[0] for one in codes]
platform.everywhere = True
torch.backends.cudnn.allow_tf32 = {rounded}
ours = codec.CodecDecoder.load(folder)
streams = [ours.open(), ours.open()]
assert [each.memory.shape for each in streams] == [each.memory.shape for each in (plain.open(), plain.open())]
audio = [[], []]

def said(*rows):
    cuts = [codes[row, streams[row].frames :][:count] for row, count in rows]
    for (row, _), samples in zip(rows, ours(cuts, [streams[row] for row, _ in rows]), strict=True):
        audio[row].append(samples)

if {rounded}:
    said((0, 2), (1, 3))
    most = 1e-2
else:
    said((0, 2))
    ours.prime([codes[1, :2]], [streams[1]])
    graphs.StepGraphs, codec.can_capture = RunAgain, lambda device: True
    ours.capture(2, 2)
    said((1, 2), (0, 1))
    said((0, 2))  # of another graph, with codes and pasts left over from before
    assert RunAgain.replays == 2
    most = 5e-6
for row, frames in enumerate(each.frames for each in streams):
    found = torch.cat(audio[row])
    expected = whole[row][: frames * tiny.FRAME_SAMPLES][-len(found) :]
    off = float((found - expected).abs().max() / expected.abs().max())
    assert off < most, (row, off)
assert [each.frames for each in streams] == ([2, 3] if {rounded} else [5, 4])
print("all checked")
"""


@pytest.mark.slow
@pytest.mark.parametrize("rounded", [False, True])
def test_a_gpus_kernels_decode_what_the_modules_do(models: dict[str, Tiny], rounded: bool) -> None:
    """Streams that join and are primed, by themselves and as graphs; in a process of its own, because Triton decides at
    import whether it interprets."""
    folder = models["base"].folder / "speech_tokenizer"
    program = GPU_PATH.format(tests=str(Path(__file__).parents[1]), folder=str(folder), rounded=rounded)
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=900)
    assert done.stdout.endswith("all checked\n"), done.stderr


def test_speed_changes_the_length(models: dict[str, Tiny]) -> None:
    fast = say(models["base"].vocoder, GOLDENS["codec/codes"], [5, 9], speed=1.25)
    assert len(fast) == round(70 * tiny.FRAME_SAMPLES / 1.25)


def test_pieces_of_audio_grow() -> None:
    cuts = [0]
    while cuts[-1] < 64:
        cuts.append(next_cut(cuts[-1]))
    assert cuts == [0, 4, 8, 16, 32, 48, 64]


@pytest.mark.parametrize(("name", "rate"), [("", tiny.SAMPLE_RATE), (" at 16 kHz", 16000)])
def test_what_is_taken_of_a_recording_is_what_the_authors_take(models: dict[str, Tiny], name: str, rate: int) -> None:
    references = References.load(models["base"].folder)
    audio = wav(tiny.recording(rate=rate), rate)
    voice = references.read(audio, with_codes=True)
    expected = GOLDENS[f"reference{name}/speaker"]
    assert np.abs(voice.speaker - expected).max() / np.abs(expected).max() < SPEAKER_TOLERANCE
    assert voice.codes is not None
    assert voice.codes.tolist() == GOLDENS[f"reference{name}/codes"].tolist()
    assert references.read(bytearray(audio), with_codes=True) is voice
    assert references.read(audio, with_codes=False).codes is None


def test_parts_of_mimi_are_found_under_either_layout() -> None:
    assert name_on_disk("encoder.encoder_seanet.layers.0.conv.weight") == "encoder.layers.0.conv.weight"
    assert name_on_disk("encoder.downsample.conv.weight") == "downsample.conv.weight"
    for name in ("encoder.layers.0.conv.bias", "encoder_transformer.layers.1.mlp.fc1.weight", "downsample.conv.weight"):
        assert name_on_disk(name) == name


@EVERY_RUNNER
def test_sampled_frames_depend_on_the_seed_alone(models: dict[str, Tiny], churn: Any, device_rows: bool) -> None:
    names = ["clone", "clone by speaker"]
    options = {"temperature": None, "top_k": 20}
    payloads = {f"{n} {seed}": prepared(models, n, seed=seed, **options) for n in names for seed in (1, 2)}
    model = models["base"]
    alone = {
        n: churn(model.engine(device_rows), {n: p}, "").pop(n).joined("codes").tolist() for n, p in payloads.items()
    }
    together = churn(model.engine(device_rows), payloads, "")
    assert {n: one.joined("codes").tolist() for n, one in together.items()} == alone
    assert alone["clone 1"] != alone["clone 2"]
    assert alone["clone 2"] == churn(model.engine(), {"a": payloads["clone 2"]}, "")["a"].joined("codes").tolist()


def test_the_rules_in_device_rows_decide_nothing_on_the_host(models: dict[str, Tiny]) -> None:
    """Tensors without data go through them: a look at any value would raise."""
    talker = models["custom_voice"].talker
    with FakeTensorMode(allow_non_fake_inputs=True):
        rows = DeviceRows(6, tiny.GROUPS, 2, 0, "cpu", seen_vocabulary=tiny.CODES + 1024)
        state = RowState(rows, torch.empty(5, dtype=torch.int64), torch.empty(3, dtype=torch.int64))
        logits = talker.rule_rows(torch.empty(3, 1, tiny.CODES + 1024), state)
        whole, ends = talker.finish_rows(state.choose(logits), torch.empty(3, 32), state)
    assert whole.shape == (3, tiny.GROUPS)
    assert ends is None


def test_the_end_is_not_said_before_two_frames_and_no_other_special_ever(models: dict[str, Tiny]) -> None:
    talker = models["custom_voice"].talker
    logits = talker.allowed(torch.zeros(2, 1, tiny.CODES + 1024), torch.tensor([1, 2]))[:, 0]
    open_ids = [torch.isfinite(row).nonzero()[:, 0].tolist() for row in logits]
    codes = list(range(tiny.CODES))
    assert open_ids == [codes, [*codes, tiny.CODES + 6]]


def test_a_projection_is_there_where_widths_differ(models: dict[str, Tiny]) -> None:
    assert models["voice_design"].talker.predictor.projection is None
    predictor = models["base"].talker.predictor
    assert predictor.projection is not None
    assert predictor(torch.zeros(2, 32), torch.zeros(2, 32), greedy).shape == (2, tiny.GROUPS - 1)


def test_the_engine_is_built_from_its_settings(models: dict[str, Tiny]) -> None:
    stage = create_engine(str(models["base"].folder), engine={"max_total_tokens": 96, "dtype": "bfloat16"})
    assert stage.engine.stats()["kv_capacity_tokens"] == 96
    facts = ModelFacts.load(str(models["base"].folder))
    assert (facts.kind, facts.num_codes, facts.sample_rate) == ("base", tiny.GROUPS, tiny.SAMPLE_RATE)
