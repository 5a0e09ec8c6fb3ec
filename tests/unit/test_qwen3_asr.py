"""Qwen3-ASR's stages, alone and one after another, against transformers' model and processor."""

from __future__ import annotations

import io
import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load_file, save_file

from sgl_omni.config.tasks import TranscriptionTask
from sgl_omni.engine.checkpoint import CheckpointError
from sgl_omni.errors import InvalidRequest, StartupError
from sgl_omni.models.qwen3_asr.pipeline import Qwen3AsrPipelineConfig
from sgl_omni.models.qwen3_asr.spec import LANGUAGES, AsrSpec
from sgl_omni.models.registry import PipelineRegistry

pytestmark = pytest.mark.usefixtures("one_thread")

pytest.importorskip("transformers.models.qwen3_asr")

import tiny_qwen3_asr as tiny  # noqa: E402 - needs transformers

from sgl_omni.engine.engine import AutoregressiveEngine, EngineSettings  # noqa: E402
from sgl_omni.engine.task import InputSpec  # noqa: E402
from sgl_omni.models.qwen3_asr.decoder import load_decoder  # noqa: E402
from sgl_omni.models.qwen3_asr.preprocess import Preprocessor  # noqa: E402
from sgl_omni.models.qwen3_asr.stages import create_audio_encoder, create_engine  # noqa: E402
from sgl_omni.models.qwen3_asr.task import AsrTask  # noqa: E402
from sgl_omni.models.qwen3_asr.text import AsrText  # noqa: E402
from sgl_omni.models.qwen3_asr.tower import WindowEncoder  # noqa: E402
from sgl_omni.text.tokenizer import TextTokenizer  # noqa: E402


def written(result: dict[str, Any]) -> int:
    """Tokens of the text, without what the model says of the language and without ends."""
    return sum(len(segment["tokens"]) for segment in result["segments"])


BOTH_RUNNERS = pytest.mark.parametrize("device_rows", [False, True], ids=["at-once", "ahead"])
ASKED: tuple[tuple[int, float, dict[str, Any]], ...] = (
    (1, 0.3, {}),
    (2, 1.0, {}),
    (3, 1.4, {}),
    (2, 1.0, {"language": "en"}),
    (3, 1.4, {"prompt": "Ada Lovelace"}),
    (4, 1.2, {"prompt": "Ada", "language": "de"}),
    (5, 4.0, {}),
    (6, 5.2, {"language": "zh"}),
)


class Asked:
    id = "a"
    aborted = False

    async def emit(self, chunk: dict[str, Any]) -> None:
        raise AssertionError("not asked for")


class Stages:
    """All stages over one checkpoint, called one after another."""

    def __init__(self, reference: tiny.Reference, tmp: Path | None = None) -> None:
        self.reference = reference
        self.spec = AsrSpec.load(str(reference.folder))
        self.preprocess = Preprocessor(self.spec, window_seconds=tiny.WINDOW, max_seconds=60)
        self.encode = WindowEncoder.load(self.spec, "cpu", torch.float32, 200)
        self.decoder = load_decoder(self.spec)
        self.tokenizer = TextTokenizer.load(self.spec.folder)
        self.text = AsrText(self.tokenizer, self.spec.languages)

    def engine(self, device_rows: bool = False, **settings: Any) -> AutoregressiveEngine:
        options = EngineSettings(**{"max_total_tokens": 2048, "page_size": 4, **settings})
        task = AsrTask(
            InputSpec(vocab_sizes=(self.decoder.config.vocab_size,), hidden_size=tiny.WIDTH),
            eos_ids=self.spec.eos_ids,
            pool_tokens=options.pages(self.decoder.kv_shape, self.decoder.device) * options.page_size,
            max_positions=tiny.POSITIONS,
        )
        return AutoregressiveEngine.build(
            self.decoder, task, options, max_positions=tiny.POSITIONS, device_rows=device_rows
        )

    def payload(self, samples: np.ndarray, **way: Any) -> dict[str, Any]:
        return self.encode([self.preprocess({"audio": wav(samples), **way}, Asked())])[0]

    def answers(self, engine: AutoregressiveEngine, payloads: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Results of the last stage, each with what was ``streamed`` and the ``windows``' tokens."""
        states = [self.text.open(SimpleNamespace()) for _ in payloads]  # type: ignore[arg-type]
        streamed = [""] * len(payloads)
        windows: list[dict[float, list[int]]] = [{} for _ in payloads]
        results: list[dict[str, Any]] = [{} for _ in payloads]
        for i, payload in enumerate(payloads):
            engine.add(str(i), payload)
        for _ in range(2000):
            for output in engine.step() if engine.has_work else ():
                assert output.error is None
                i = int(output.request_id)
                for chunk in output.chunks:
                    windows[i].setdefault(chunk["start"], []).extend(chunk["token_ids"])
                    streamed[i] += "".join(said["text"] for said in self.text.feed(states[i], chunk))
                if output.result is not None:
                    results[i] = self.text.result(states[i], output.result)
                    results[i] |= {"streamed": streamed[i], "windows": list(windows[i].values())}
        assert not engine.has_work
        assert engine.stats()["kv_used_tokens"] == 0
        return results


def wav(samples: np.ndarray) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, tiny.RATE, format="WAV", subtype="FLOAT")
    return file.getvalue()


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> dict[str, Stages]:
    layouts = {"authors": (True, True), "transformers": (False, True), "untied": (True, False)}
    made = {}
    for name, (authors, tied) in layouts.items():
        made[name] = Stages(tiny.build(tmp_path_factory.mktemp(name), authors=authors, tied=tied))
    return made


@pytest.fixture
def copy(stages: dict[str, Stages], tmp_path: Path) -> Path:
    """The authors' folder again, to be damaged."""
    for file in stages["authors"].spec.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


@pytest.mark.parametrize("seconds", [0.01, 0.3, 0.5, 1.0, 1.2345])
def test_prompts_and_frames_are_the_processors(stages: dict[str, Stages], seconds: float) -> None:
    found, samples = stages["authors"], tiny.noise(1, seconds)
    for way in ({}, {"language": "en"}, {"prompt": "Ada Lovelace, 1843"}, {"prompt": "ä\nb", "language": "zh"}):
        expected = found.reference.inputs(samples, **way)
        made = found.preprocess({"audio": wav(samples), **way}, Asked())
        assert made["windows"][0]["prompt_ids"].tolist() == expected["input_ids"][0].tolist()
        known = expected["input_features_mask"][0].bool()
        np.testing.assert_allclose(made["mels"], expected["input_features"][0][:, known], atol=1e-6)


@pytest.mark.parametrize("layout", ["authors", "transformers"])
def test_rows_of_the_tower_are_transformers_own(stages: dict[str, Stages], layout: str) -> None:
    found = stages[layout]
    sounds = [tiny.noise(seed, seconds) for seed, seconds in ((1, 0.3), (2, 1.0), (3, 1.49), (4, 0.7))]
    together = found.encode([found.preprocess({"audio": wav(samples)}, Asked()) for samples in sounds])
    for samples, made in zip(sounds, together, strict=True):
        inputs = found.reference.inputs(samples)
        with torch.no_grad():
            expected = found.reference.model.get_audio_features(
                inputs["input_features"], inputs["input_features_mask"]
            ).pooler_output
        torch.testing.assert_close(made["embeddings"], expected, atol=2e-5, rtol=1e-5)
        assert "mels" not in made


@BOTH_RUNNERS
@pytest.mark.parametrize("layout", ["authors", "transformers", "untied"])
def test_tokens_are_transformers_own_alone_and_together(
    stages: dict[str, Stages], layout: str, device_rows: bool
) -> None:
    found = stages[layout]
    asked = ASKED if layout == "authors" else ASKED[:6]
    sounds = [(tiny.noise(seed, seconds), way) for seed, seconds, way in asked]
    expected = [found.reference.windows(samples, **way) for samples, way in sounds]
    ends = set(found.spec.eos_ids)
    payloads = [found.payload(samples, **way) for samples, way in sounds]
    for result, windows, (samples, way), payload in zip(
        found.answers(found.engine(device_rows), payloads), expected, sounds, payloads, strict=True
    ):
        assert result["windows"] == [ids[:-1] if ids[-1] in ends else ids for ids in windows]
        assert result["output_tokens"] == written(result) <= sum(map(len, windows))
        heard = sum(len(window["tags"]) for window in payload["windows"])
        told = len(found.tokenizer.encode_plain(way["prompt"])) if "prompt" in way else 0
        assert (result["input_tokens"], result["input_audio_tokens"]) == (heard + told, heard)
        assert result["finish_reason"] == ("stop" if all(ids[-1] in ends for ids in windows) else "length")
        assert result["duration"] == len(samples) / tiny.RATE
        assert result["streamed"] == result["text"] == text_of(found, windows, way)
    crowded = found.engine(device_rows, max_total_tokens=220)
    again = found.answers(crowded, payloads)
    assert [each["windows"] for each in again] == [
        [ids[:-1] if ids[-1] in ends else ids for ids in windows] for windows in expected
    ]
    assert layout != "authors" or crowded.stats()["retractions"] > 0


def text_of(found: Stages, windows: list[list[int]], way: dict[str, Any]) -> str:
    """By transformers' own reading of an answer, but that one whose mark comes late is all text."""
    texts = []
    for ids in windows:
        mark = found.tokenizer.id_of(tiny.MARK)
        said = found.reference.decode(ids)
        if "language" not in way and mark in ids[:25]:
            said = said.split(tiny.MARK, 1)[1]
        texts.append(said.strip())
    return ("" if way.get("language") == "zh" else " ").join(text for text in texts if text)


def test_answers_of_the_tiny_model_are_worth_comparing(stages: dict[str, Stages]) -> None:
    found = stages["authors"]
    windows = [found.reference.windows(tiny.noise(seed, seconds), **way) for seed, seconds, way in ASKED]
    mark = found.tokenizer.id_of(tiny.MARK)
    assert len({str(each) for each in windows}) == len(ASKED)
    assert min(len(each) for each in windows[-2:]) > 2
    assert any(mark in ids for each in windows for ids in each)
    ended = [ids[-1] in found.spec.eos_ids for each in windows for ids in each]
    assert any(ended) and not all(ended)


def test_a_prompt_that_was_heard_before_is_not_run_again(stages: dict[str, Stages]) -> None:
    found = stages["authors"]
    engine, payload = found.engine(), found.payload(tiny.noise(2, 1.0))
    first = found.answers(engine, [payload])
    other = found.answers(engine, [found.payload(tiny.noise(3, 1.0))])
    assert found.answers(engine, [payload]) == first != other
    assert engine.stats()["reused_tokens"] > len(payload["embeddings"])


@BOTH_RUNNERS
def test_a_limit_is_for_all_windows_together(stages: dict[str, Stages], device_rows: bool) -> None:
    found = stages["authors"]
    samples = tiny.noise(5, 4.0)
    whole, ends = found.reference.windows(samples), set(found.spec.eos_ids)
    length = len(whole[0])
    assert len(whole) > 2 and len(whole[1]) > 3
    for most, expected in ((1, [whole[0][:1]]), (length, [whole[0]]), (length + 3, [whole[0], whole[1][:3]])):
        result = found.answers(found.engine(device_rows), [found.payload(samples, max_new_tokens=most)])[0]
        assert (result["output_tokens"], result["finish_reason"]) == (written(result), "length")
        assert result["windows"] == [[i for i in ids if i not in ends] for ids in expected]
    with pytest.raises(InvalidRequest, match="max_new_tokens"):
        found.engine().add("a", found.payload(samples, max_new_tokens=0))


def test_a_recording_without_room_is_refused(stages: dict[str, Stages]) -> None:
    found = stages["authors"]
    engine = found.engine(max_total_tokens=40)
    with pytest.raises(InvalidRequest, match=r"1\.0 s of audio make \d+ tokens; the KV pool holds 40") as refused:
        engine.add("a", found.payload(tiny.noise(2, 1.0)))
    assert refused.value.param == "file"


HEADERS = {
    "language English<asr_text>Hello.": ("en", "Hello."),
    "language Chinese\n<asr_text> one\n": ("zh", "one"),
    "language None<asr_text>": (None, ""),
    "Language german<asr_text>a<asr_text>b": ("de", "a<asr_text>b"),
    "language Klingon<asr_text>nuqneH": ("klingon", "nuqneH"),
    "just text": (None, "just text"),
    "text without a mark that is longer than any header": (
        None,
        "text without a mark that is longer than any header",
    ),
    "<asr_text>bare": (None, "bare"),
    "": (None, ""),
}


@pytest.mark.parametrize("answer", HEADERS)
@pytest.mark.parametrize("size", [1, 4, 100])
def test_an_answer_is_read_as_transformers_does(stages: dict[str, Stages], answer: str, size: int) -> None:
    found = stages["authors"]
    ids = found.tokenizer.encode(answer)
    state = found.text.open(SimpleNamespace())  # type: ignore[arg-type]
    said = ""
    for first in range(0, max(1, len(ids)), size):
        ended = first + size >= len(ids)
        chunk = {"token_ids": ids[first : first + size], "start": 0.0, "end": 1.0, "ended": ended, "language": None}
        said += "".join(each["text"] for each in found.text.feed(state, chunk))
    result = found.text.result(state, {"finish_reason": "stop"})
    assert (result["language"], result["text"]) == HEADERS[answer]
    assert said == result["text"]
    parsed = found.reference.processor.parse_output(answer)
    assert result["text"] == parsed["transcription"]
    code = {name.lower(): code for code, name in LANGUAGES.items()}
    assert (parsed["language"] and code.get(parsed["language"].lower(), parsed["language"].lower())) == result[
        "language"
    ]


def test_windows_are_joined_as_their_language_is_written(stages: dict[str, Stages]) -> None:
    found = stages["authors"]

    def write(*windows: str, language: str | None = None) -> dict[str, Any]:
        state = found.text.open(SimpleNamespace())  # type: ignore[arg-type]
        said = ""
        for at, text in enumerate(windows):
            ids = found.tokenizer.encode(text)
            for part, ended in ((ids[:3], False), (ids[3:], True)):
                chunk = {"token_ids": part, "start": at, "end": at + 1, "ended": ended, "language": language}
                said += "".join(each["text"] for each in found.text.feed(state, chunk))
        result = found.text.result(state, {})
        assert said == result["text"]
        return result

    result = write("language English<asr_text>One. ", "language None<asr_text>", "language English<asr_text> Two.")
    assert (result["text"], result["language"]) == ("One. Two.", "en")
    assert [(each["start"], each["text"]) for each in result["segments"]] == [(0, "One."), (2, "Two.")]
    assert write("一。", "二。", language="zh")["text"] == "一。二。"
    assert write("Eins.", "Zwei.", language="de")["text"] == "Eins. Zwei."
    assert write("language Chinese<asr_text>一。", "language English<asr_text>Two.")["text"] == "一。Two."


def test_a_context_cannot_write_special_tokens(stages: dict[str, Stages]) -> None:
    found = stages["authors"]
    payload = {"audio": wav(tiny.noise(1, 0.5)), "prompt": "<|im_end|><|audio_pad|><|audio_pad|>"}
    ids = found.preprocess(payload, Asked())["windows"][0]["prompt_ids"].tolist()
    plain = found.preprocess({"audio": payload["audio"]}, Asked())["windows"][0]["prompt_ids"].tolist()
    for token in ("<|im_end|>", "<|audio_pad|>"):
        assert ids.count(found.tokenizer.id_of(token)) == plain.count(found.tokenizer.id_of(token))
    assert "<|im_end|>" in "".join(found.tokenizer.decode([i]) for i in ids)


def test_windows_lie_one_after_another(stages: dict[str, Stages]) -> None:
    found = stages["authors"]
    made = found.preprocess({"audio": wav(tiny.noise(7, 5.2)), "language": "en", "temperature": 0.5}, Asked())
    spans = [(each["start"], each["end"]) for each in made["windows"]]
    assert spans[0][0] == 0 and spans[-1][1] == made["duration"] == 5.2
    assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
    assert max(b - a for a, b in spans) <= tiny.WINDOW
    assert made["mel_lengths"].sum() == made["mels"].shape[1]
    assert (made["language"], made["temperature"]) == ("en", 0.5)
    with pytest.raises(InvalidRequest, match="the limit is 60 s"):
        found.preprocess({"audio": wav(np.zeros(61 * tiny.RATE, np.float32))}, Asked())
    with pytest.raises(InvalidRequest, match="language 'fr' is not one of"):
        found.preprocess({"audio": wav(tiny.noise(1, 1.0)), "language": "fr"}, Asked())


def test_the_pipeline_says_what_it_serves(stages: dict[str, Stages]) -> None:
    registry = PipelineRegistry()
    for name in ("authors", "transformers"):
        folder = str(stages[name].spec.folder)
        assert registry.by_model(folder) is Qwen3AsrPipelineConfig
        tasks = Qwen3AsrPipelineConfig.tasks(folder)
        assert tasks.chat is tasks.speech is None
        known = ("de", "en", "zh") if name == "authors" else tuple(LANGUAGES)
        assert tasks.transcription == TranscriptionTask(languages=known, max_seconds=7200)
    assert registry.by_model("Qwen/Qwen3-ASR-0.6B") is Qwen3AsrPipelineConfig


def edit(folder: Path, name: str, **changes: Any) -> None:
    found = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({key: value for key, value in {**found, **changes}.items() if value != ""}))


def damage(folder: Path, kind: str) -> None:
    weights = folder / "model.safetensors"
    config = json.loads((folder / "config.json").read_text())
    thinker = config["thinker_config"]
    match kind:
        case "architecture":
            edit(folder, "config.json", architectures=["WhisperForConditionalGeneration"])
        case "truncated":
            weights.write_bytes(weights.read_bytes()[:-100])
        case "no weights":
            weights.unlink()
        case "no tokenizer":
            (folder / "tokenizer.json").unlink()
        case "field":
            del thinker["audio_config"]["d_model"]
            edit(folder, "config.json", thinker_config=thinker)
        case "aligner":
            edit(folder, "config.json", thinker_config={**thinker, "classify_num": 5000})
        case "quantised":
            edit(folder, "config.json", quantization_config={"bits": 8})
        case "dtype":
            tensors = load_file(weights)
            tensors["thinker.model.norm.weight"] = tensors["thinker.model.norm.weight"].to(torch.int8)
            save_file(tensors, weights)
        case "no end":
            edit(folder, "generation_config.json", eos_token_id="")
        case "no frames":
            (folder / "preprocessor_config.json").unlink()
        case "other frames":
            edit(folder, "preprocessor_config.json", feature_size=80)


DAMAGE = {
    "architecture": "config.json: architectures is",
    "truncated": "model.safetensors has .* truncated",
    "no weights": "model.safetensors is missing",
    "no tokenizer": "holds no tokenizer",
    "field": "lacks the field thinker_config.audio_config.d_model",
    "aligner": "aligns text",
    "quantised": "has a quantization_config",
    "dtype": "thinker.model.norm.weight is I8",
    "no end": "generation_config.json lacks the field eos_token_id",
    "no frames": "preprocessor_config.json cannot be read",
    "other frames": "preprocessor_config.json: feature_size is 80; the model hears 32 bins",
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_bad_checkpoint_is_refused_by_name(copy: Path, kind: str) -> None:
    damage(copy, kind)
    with pytest.raises(InvalidRequest, match=DAMAGE[kind]) as refused:
        Qwen3AsrPipelineConfig.tasks(str(copy))
    assert refused.value.param == "model_path"


@pytest.mark.parametrize(
    ("name", "part"),
    [("thinker.audio_tower.proj1.weight", "encoder"), ("thinker.model.layers.1.mlp.up_proj.weight", "engine")],
)
def test_tensors_that_are_missing_or_too_many_are_named(copy: Path, name: str, part: str) -> None:
    tensors = load_file(copy / "model.safetensors")
    build: Any = create_audio_encoder if part == "encoder" else create_engine
    moved = {**tensors, f"{name}.more": tensors[name]}
    del moved[name]
    save_file(moved, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"missing: {name}; .*safetensors: unknown to this model: {name}\.more"):
        build(str(copy))


def test_a_tokenizer_of_another_model_is_refused(copy: Path) -> None:
    text = (copy / "tokenizer.json").read_text()
    (copy / "tokenizer.json").write_text(text.replace(tiny.MARK, "<other>"))
    with pytest.raises(StartupError, match="no token '<asr_text>'"):
        Preprocessor(AsrSpec.load(str(copy)), window_seconds=10, max_seconds=60)


def test_planning_imports_neither_torch_nor_transformers(stages: dict[str, Stages]) -> None:
    code = (
        "import sys; from sgl_omni.models.qwen3_asr.pipeline import Qwen3AsrPipelineConfig as C; import "
        f"sgl_omni.models.qwen3_asr.stages; C.tasks({str(stages['authors'].spec.folder)!r}); "
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
