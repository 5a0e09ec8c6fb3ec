"""Higgs TTS 3's decoder against transformers' Qwen3, and the prompts of both Higgs models."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1]))
import tiny_higgs as tiny  # noqa: E402

from sgl_omni.config.load import load_config  # noqa: E402
from sgl_omni.engine.checkpoint import CheckpointError  # noqa: E402
from sgl_omni.engine.engine import AutoregressiveEngine, EngineSettings  # noqa: E402
from sgl_omni.errors import InvalidRequest, StartupError  # noqa: E402
from sgl_omni.models.higgs_tts.checkpoint import Defaults, HiggsCheckpoint  # noqa: E402
from sgl_omni.models.higgs_tts.model import HiggsTts3Model  # noqa: E402
from sgl_omni.models.higgs_tts.pipeline import HiggsTtsPipelineConfig  # noqa: E402
from sgl_omni.models.higgs_tts.preprocess import SpeechPreprocessor  # noqa: E402
from sgl_omni.models.higgs_tts.prompts import SCENE, SYSTEM, ChatPrompts, TaggedPrompts  # noqa: E402
from sgl_omni.models.higgs_tts.references import (  # noqa: E402
    EncodedVoices,
    PromptBuilder,
    delayed,
    framed,
    uniform_places,
    v2_places,
)
from sgl_omni.models.higgs_tts.spec import HiggsTts3Spec  # noqa: E402
from sgl_omni.models.higgs_tts.task import HiggsTts3Task  # noqa: E402
from sgl_omni.models.registry import PipelineRegistry  # noqa: E402
from sgl_omni.text.tokenizer import TextTokenizer  # noqa: E402

FRAMES = 24
TEXTS = ("The sun rises.", "Audio is recorded", "east", "A quiet room, and nobody in it.", "12 3", "following")
BOTH_RUNNERS = pytest.mark.parametrize("device_rows", [False, True], ids=["at-once", "ahead"])


@dataclass(frozen=True)
class V3:
    folder: Path
    reference: tiny.TinyV3
    model: HiggsTts3Model
    prompts: TaggedPrompts


@pytest.fixture(scope="module")
def v3(tmp_path_factory: pytest.TempPathFactory) -> V3:
    folder = tmp_path_factory.mktemp("v3")
    reference = tiny.save_v3(folder)
    return V3(folder, reference, HiggsTts3Model.load(folder), TaggedPrompts(TextTokenizer.load(folder)))


@pytest.fixture(scope="module")
def v2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("v2")
    tiny.save_v2(folder)
    return folder


@dataclass(frozen=True)
class Case:
    payload: dict[str, Any]
    rows: list[list[int]]


@pytest.fixture(scope="module")
def cases(v3: V3) -> dict[str, Case]:
    found = {}
    for i, text in enumerate(TEXTS):
        for kind in ("text", "voice"):
            codes = np.random.default_rng(i).integers(0, tiny.CODES, (5 + i, tiny.BOOKS))
            voice = delayed(codes, tiny.BOC, tiny.EOC) if kind == "voice" else None
            pieces = v3.prompts.pieces(text, [] if voice is None else ["words"], None)
            ids = [*pieces[0]] if voice is None else [*pieces[0], *[-1] * len(voice), *pieces[1]]
            payload = {"prompt_ids": np.asarray(ids), "audio_rows": voice, "max_frames": FRAMES}
            found[f"{text} {kind}"] = Case(payload, v3.reference.rows(ids, voice, FRAMES))
    return found


def engine_for(model: HiggsTts3Model, device_rows: bool = False, **settings: Any) -> AutoregressiveEngine:
    options = EngineSettings(**{"max_total_tokens": 2048, "page_size": 1, **settings})
    return AutoregressiveEngine.build(model, HiggsTts3Task(model.spec), options, device_rows=device_rows)


def test_the_cases_end_by_an_end_id_and_by_the_limit(cases: dict[str, Case]) -> None:
    lengths = {len(tiny.v3_frames(case.rows, FRAMES)) for case in cases.values()}
    assert FRAMES in lengths
    assert any(tiny.BOOKS < n < FRAMES for n in lengths)
    assert len({str(case.rows) for case in cases.values()}) == len(cases)


@BOTH_RUNNERS
@pytest.mark.parametrize("pool", [2048, 130])
def test_greedy_frames_equal_the_reference(
    v3: V3, cases: dict[str, Case], churn: Any, pool: int, device_rows: bool
) -> None:
    engine = engine_for(v3.model, device_rows, max_total_tokens=pool)
    seen = churn(engine, {name: case.payload for name, case in cases.items()}, f"{pool}")
    assert (engine.stats()["retractions"] > 0) == (pool < 2048)
    for name, case in cases.items():
        expected = tiny.v3_frames(case.rows, FRAMES)
        assert seen[name].joined("codes").tolist() == expected, name
        assert seen[name].result["output_tokens"] == len(expected)
        assert seen[name].result["finish_reason"] == ("stop" if len(expected) < FRAMES else "length")


@BOTH_RUNNERS
def test_rows_equal_the_reference(v3: V3, cases: dict[str, Case], device_rows: bool) -> None:
    """The rows themselves, those after the end included, which the model reads again."""
    taken: dict[str, list[list[int]]] = {}

    class Recording(HiggsTts3Task):
        def result(self, request: Any) -> dict[str, Any]:
            taken[request.id] = [row[1:] for row in request.outputs]
            return super().result(request)

    options = EngineSettings(max_total_tokens=2048)
    engine = AutoregressiveEngine.build(v3.model, Recording(v3.model.spec), options, device_rows=device_rows)
    for name, case in cases.items():
        engine.add(name, case.payload)
    while engine.has_work:
        engine.step()
    assert taken == {name: case.rows for name, case in cases.items()}


def test_sampled_frames_are_the_same_in_device_rows(v3: V3, cases: dict[str, Case], churn: Any) -> None:
    payloads = {name: {**case.payload, "temperature": 0.8, "top_k": 9, "seed": 4} for name, case in cases.items()}
    found = [
        {name: one.joined("codes").tolist() for name, one in churn(engine_for(v3.model, rows), payloads, "").items()}
        for rows in (False, True)
    ]
    assert found[0] == found[1]


def test_a_voice_that_was_heard_before_is_not_computed_again(v3: V3, cases: dict[str, Case]) -> None:
    engine = engine_for(v3.model)
    payload = next(case.payload for name, case in cases.items() if name.endswith("voice"))
    for turn in range(2):
        engine.add(str(turn), payload)
        while engine.has_work:
            engine.step()
    assert engine.stats()["reused_tokens"] >= len(payload["prompt_ids"]) - 1


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        ({"prompt_ids": [5, -1]}, "1 places for audio rows, and 0 rows"),
        ({"prompt_ids": [5], "audio_rows": [[1] * tiny.BOOKS]}, "0 places .* 1 rows"),
        ({"prompt_ids": [-1], "audio_rows": [[1, 2]]}, r"\[length, 4\]"),
        ({"prompt_ids": [-1], "audio_rows": [[tiny.CODES + 2] * tiny.BOOKS]}, "id 66"),
        ({"prompt_ids": [5, 100_000]}, "id 100000"),
        ({"prompt_ids": [5, -100]}, "id -100"),
        ({}, "the prompt is empty"),
        ({"prompt_ids": [5], "max_frames": 0}, "max_frames must be 1 or more"),
    ],
)
def test_prompts_that_make_no_sense_are_refused(v3: V3, payload: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        engine_for(v3.model).add("bad", payload)


def test_a_request_that_says_no_limit_gets_what_room_its_prompt_leaves(v3: V3) -> None:
    positions = v3.model.spec.decoder.max_positions
    assert positions is not None
    prompt = [5] * (positions - 100)
    request = HiggsTts3Task(v3.model.spec).parse("a", {"prompt_ids": prompt})
    assert request.prompt_length + request.max_outputs == positions
    engine_for(v3.model, max_total_tokens=2 * positions).add("a", {"prompt_ids": prompt})


def test_a_prompt_of_higgs_tts_3_has_its_parts_in_order(v3: V3) -> None:
    tokenizer = TextTokenizer.load(v3.folder)
    words = tokenizer.encode("The sun<|laugh|> rises")
    assert tokenizer.id_of("<|laugh|>") in words
    tts, ref_text, ref_audio, text, audio = map(
        tokenizer.id_of, ["<|tts|>", "<|ref_text|>", "<|ref_audio|>", "<|text|>", "<|audio|>"]
    )
    target = [text, *words, audio]
    assert v3.prompts.pieces("The sun<|laugh|> rises ", [], None) == [[tts, *target]]
    assert v3.prompts.pieces("The sun<|laugh|> rises", [None], None) == [[tts, ref_audio], target]
    found = v3.prompts.pieces("The sun<|laugh|> rises", ["quiet"], None)
    assert found == [[tts, ref_text, *tokenizer.encode("quiet"), ref_audio], target]
    for bad, param in ((("a<|audio|>b", [], None), "input"), (("a", ["b<|text|>"], None), "references")):
        with pytest.raises(InvalidRequest, match="only the prompt itself") as caught:
            v3.prompts.pieces(*bad)
        assert caught.value.param == param
    with pytest.raises(InvalidRequest, match="one reference"):
        v3.prompts.pieces("a", [None, None], None)


def chat(folder: Path) -> ChatPrompts:
    config = json.loads((folder / "config.json").read_text())
    return ChatPrompts(TextTokenizer.load(folder), config["audio_token_id"])


def processor_for(folder: Path) -> Any:
    """transformers' own, around an audio tokenizer that gives the codes it is told."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    class Codec:
        config = type("Config", (), {"num_quantizers": tiny.BOOKS})
        device = "cpu"

        def encode(self, input_values: Any) -> Any:
            count = int(np.asarray(input_values).size) // tiny.HOP
            codes = torch.arange(count * tiny.BOOKS).view(1, tiny.BOOKS, count) % tiny.CODES
            return type("Out", (), {"audio_codes": codes})

    kind = transformers.models.higgs_audio_v2.processing_higgs_audio_v2.HiggsAudioV2Processor
    found = kind.__new__(kind)
    found.tokenizer, found.audio_tokenizer = tokenizer, Codec()
    found.feature_extractor = transformers.DacFeatureExtractor(hop_length=1, sampling_rate=tiny.RATE)
    found.chat_template = tiny.TEMPLATE
    found.audio_token, found.audio_delay_token = "<|AUDIO_OUT|>", "<|reserved_special_token_6|>"
    found.audio_stream_bos_id, found.audio_stream_eos_id = tiny.BOC, tiny.EOC
    return found


CONVERSATIONS: dict[str, tuple[str, list[str | None], str | None]] = {
    "text": ("The sun rises.\nAnd sets!", [], None),
    "odd start": ("... 12 suns", [], None),
    "scene": ("hello", [], "A man, outdoors.\n\nWindy!"),
    "voice": ("hello there", ["what was said"], None),
    "two voices": ("[SPEAKER1] hi", ["one.", "(two)"], None),
    "voice without text": ("hello there", [None], None),
    "two without text": ("[SPEAKER0] a [SPEAKER1] b", [None, None], None),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_prompts_of_higgs_audio_v2_equal_the_processors(v2_folder: Path, name: str) -> None:
    text, transcripts, instructions = CONVERSATIONS[name]
    say = lambda what: {"type": "text", "text": what}  # noqa: E731
    sound = {"type": "audio"}
    scene, turns = [say(instructions or SCENE)], []
    for index, transcript in enumerate(transcripts):
        if transcript is None:
            scene += [say(f"SPEAKER{index}:"), sound]
        else:
            turns += [{"role": "user", "content": [say(transcript)]}, {"role": "assistant", "content": [sound]}]
    target = f"[SPEAKER0] {text}" if transcripts == [None] else text
    messages = [
        {"role": "system", "content": [say(SYSTEM)]},
        {"role": "scene", "content": scene},
        *turns,
        {"role": "user", "content": [say(target)]},
    ]
    processor = processor_for(v2_folder)
    rendered = processor.tokenizer.apply_chat_template(
        messages, chat_template=tiny.TEMPLATE, tokenize=False, add_generation_prompt=True
    )
    audio = [np.zeros((6 + i) * tiny.HOP, np.float32) for i in range(len(transcripts))]
    expected = processor(
        text=rendered, audio=audio or None, return_tensors="pt", add_special_tokens=False, sampling_rate=tiny.RATE
    )

    config = json.loads((v2_folder / "config.json").read_text())
    codes = [
        (torch.arange(n * tiny.BOOKS).view(tiny.BOOKS, n) % tiny.CODES).T.numpy() for n in range(6, 6 + len(audio))
    ]
    build = PromptBuilder(
        EncodedVoices(lambda file, param: codes[file[0]]),
        lambda found: delayed(framed(found, tiny.BOC, tiny.EOC), tiny.BOC, tiny.EOC),
        v2_places(tiny.BOOKS, config["audio_token_id"], config["audio_delay_token_id"]),
    )
    pieces = chat(v2_folder).pieces(text, transcripts, instructions)
    references = [bytes([i]) for i in range(len(audio))]
    found = build({"pieces": pieces, "references": references, "speed": 1.0}, None)  # type: ignore[arg-type]
    assert found["prompt_ids"].tolist() == expected["input_ids"][0].tolist()
    if audio:
        assert found["audio_rows"].tolist() == expected["audio_input_ids"][0].tolist()
    else:
        assert found["audio_rows"] is None


def test_what_a_caller_writes_brings_no_special_tokens_along(v2_folder: Path) -> None:
    tokenizer = TextTokenizer.load(v2_folder)
    (plain,) = chat(v2_folder).pieces("a", [], None)
    (found,) = chat(v2_folder).pieces("a<|eot_id|><|AUDIO_OUT|>", [], "b<|scene_desc_end|>")
    for token in tiny.V2_SPECIALS:
        assert found.count(tokenizer.id_of(token)) == plain.count(tokenizer.id_of(token))
    assert "<|eot_id|><|AUDIO_OUT|>" in tokenizer.decode(found)


def test_texts_of_some_references_are_not_enough(v2_folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="of every reference, or of none"):
        chat(v2_folder).pieces("a", ["b", None], None)


def preprocess(prompts: Any, **payload: Any) -> dict[str, Any]:
    entry = SpeechPreprocessor(prompts, Defaults(0.8, 50, 0.9), 1)
    return entry({"input": "The sun", "voice": None, "speed": 1.0, **payload}, None)  # type: ignore[arg-type]


def test_options_are_filled_in(v3: V3) -> None:
    found = preprocess(v3.prompts)
    assert {key: found[key] for key in ("temperature", "top_k", "top_p", "seed", "speed")} == {
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.9,
        "seed": None,
        "speed": 1.0,
    }
    assert "max_frames" not in found  # as long as the model has positions for
    found = preprocess(v3.prompts, temperature=0.0, top_k=3, seed=7, max_new_tokens=9, speed=2.0)
    assert (found["temperature"], found["top_k"], found["seed"], found["max_frames"]) == (0.0, 3, 7, 9)


@pytest.mark.parametrize(
    ("payload", "param"),
    [
        ({"input": " "}, "input"),
        ({"input": 5}, "input"),
        ({"voice": "anna"}, "voice"),
        ({"speed": 9.0}, "speed"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"references": [{"audio": b"a", "text": None}] * 2}, "references"),
        ({"references": [{"text": "a"}]}, "references"),
    ],
)
def test_what_cannot_be_spoken_is_refused(v3: V3, payload: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        preprocess(v3.prompts, **payload)
    assert caught.value.param == param


def test_a_voice_is_encoded_once_however_many_ask() -> None:
    asked: list[bytes] = []
    go_on = threading.Event()

    def encode(audio: Any, param: str) -> Any:
        asked.append(bytes(audio))
        go_on.wait(10)
        if audio == b"bad":
            raise InvalidRequest("no audio", param)
        return np.full((3, tiny.BOOKS), len(audio))

    voices = EncodedVoices(encode, most=2)
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(voices.codes, b"one", "references[0].audio") for _ in range(4)]
        go_on.set()
        assert all(job.result(10)[0, 0] == 3 for job in jobs)
    assert asked == [b"one"]
    for _ in range(2):
        with pytest.raises(InvalidRequest):
            voices.codes(b"bad", "references[0].audio")
    for audio in (b"two", memoryview(b"one"), b"three", b"one", b"two"):
        voices.codes(audio, "")
    assert asked == [b"one", b"bad", b"bad", b"two", b"three", b"two"], "the least recently used is forgotten"


def test_the_delay_pattern_of_a_recording() -> None:
    codes = np.asarray([[1, 2, 3], [4, 5, 6]])
    assert delayed(codes, 8, 9).tolist() == [[1, 8, 8], [4, 2, 8], [9, 5, 3], [9, 9, 6]]
    assert framed(codes, 8, 9).tolist() == [[8, 8, 8], [1, 2, 3], [4, 5, 6], [9, 9, 9]]
    assert uniform_places(-1)(3).tolist() == [-1, -1, -1]
    assert v2_places(3, 90, 92)(5).tolist() == [90, 90, 90, 92, 92]


@pytest.fixture
def copy(v3: V3, v2_folder: Path, tmp_path: Path) -> Any:
    def make(kind: str) -> Path:
        folder = tmp_path / kind
        shutil.copytree(v3.folder if kind == "v3" else v2_folder, folder)
        return folder

    return make


def edit(file: Path, **fields: Any) -> None:
    config = json.loads(file.read_text())
    for path, value in fields.items():
        *parents, last = path.split("__")
        part = config
        for parent in parents:
            part = part[parent]
        if value is None:
            del part[last]
        else:
            part[last] = value
    file.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        ("v3", {"architectures": ["LlamaForCausalLM"]}, "not one of HiggsAudioV2"),
        ("v3", {"text_config": None}, r"config\.json lacks the field text_config\.hidden_size"),
        ("v3", {"audio_encoder_config__num_codebooks": None}, r"audio_encoder_config\.num_codebooks"),
        ("v3", {"audio_encoder_config__vocab_size": "big"}, r"vocab_size is 'big', no whole number"),
        ("v3", {"audio_encoder_config__num_codebooks": 6}, "speaks 6 codebooks of 64 codes"),
        ("v2", {"audio_token_id": None}, r"config\.json lacks the field audio_token_id"),
        ("v2", {"codebook_size": 34}, "speaks 4 codebooks of 32 codes, and the audio tokenizer .* 4 of 64"),
    ],
)
def test_a_config_that_does_not_fit_names_file_and_field(
    copy: Any, kind: str, fields: dict[str, Any], words: str
) -> None:
    folder = copy(kind)
    edit(folder / "config.json", **fields)
    with pytest.raises(InvalidRequest, match=words):
        HiggsCheckpoint.load(str(folder))


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("v3", "model.safetensors", r"model\.safetensors is missing"),
        ("v3", "tokenizer.json", "holds no tokenizer"),
        ("v2", "audio_tokenizer/model.safetensors", r"audio_tokenizer/model\.safetensors is missing"),
        ("v2", "audio_tokenizer/config.json", r"audio_tokenizer/config\.json cannot be read"),
        ("v2", "audio_tokenizer", "download bosonai/higgs-audio-v2-tokenizer|hf download"),
    ],
)
def test_a_missing_file_is_named(copy: Any, kind: str, name: str, words: str) -> None:
    folder = copy(kind)
    target = folder / name
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    with pytest.raises(InvalidRequest, match=words):
        HiggsTtsPipelineConfig.tasks(str(folder))


def test_a_truncated_file_is_named(copy: Any) -> None:
    folder = copy("v3")
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(100_000)
    with pytest.raises(InvalidRequest, match=r"model\.safetensors has 100000 bytes.*truncated"):
        HiggsTtsPipelineConfig.tasks(str(folder))


def test_a_tensor_that_is_missing_or_unknown_is_named(copy: Any) -> None:
    from safetensors.torch import load_file, save_file

    folder = copy("v3")
    tensors = load_file(folder / "model.safetensors")
    tensors["body.extra.weight"] = tensors.pop("body.norm.weight")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"missing: body\.norm\.weight; .*safetensors: unknown to this model: body\.extra\.weight"
    ):
        HiggsTts3Model.load(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"audio_encoder_config": {"encoder_type": "whisper"}}, "encoder_type is 'whisper'"),
        ({"audio_encoder_config": {"use_delay_pattern": False, "num_codebooks": 4}}, "use_delay_pattern is false"),
        ({"audio_encoder_config": {"num_codebooks": 4}}, r"audio_encoder_config\.vocab_size must be"),
        ({"audio_encoder_config": {"num_codebooks": 4, "vocab_size": 66, "out_dim": 7}}, "out_dim is 7"),
        ({"text_config": {"model_type": "mamba"}}, "model type 'mamba'"),
    ],
)
def test_a_model_of_another_kind_is_refused(v3: V3, change: dict[str, Any], words: str) -> None:
    config = json.loads((v3.folder / "config.json").read_text())
    with pytest.raises(StartupError, match=words):
        HiggsTts3Spec.parse(config | change)


def test_a_vocabulary_without_the_prompts_tokens_is_refused(v2_folder: Path) -> None:
    with pytest.raises(StartupError, match=r"no token '<\|tts\|>'"):
        TaggedPrompts(TextTokenizer.load(v2_folder))


def test_generation_config_says_how_to_sample(copy: Any) -> None:
    folder = copy("v3")
    assert HiggsCheckpoint.load(str(folder)).defaults == Defaults(0.8, 50, 1.0)
    file = folder / "generation_config.json"
    file.write_text(json.dumps({"do_sample": True, "temperature": 0.6, "top_p": 0.5}))
    assert HiggsCheckpoint.load(str(folder)).defaults == Defaults(0.6, 50, 0.5)
    file.write_text(json.dumps({"do_sample": True, "temperature": "hot"}))
    with pytest.raises(InvalidRequest, match=r"generation_config\.json: temperature is 'hot'"):
        HiggsCheckpoint.load(str(folder))


def test_the_pipeline_says_what_it_serves(v3: V3, v2_folder: Path) -> None:
    speech = HiggsTtsPipelineConfig.tasks(str(v3.folder)).speech
    assert speech is not None
    assert (speech.sample_rate, speech.max_references, speech.voices, speech.default_voice) == (24_000, 1, (), None)
    assert not speech.takes_instructions
    speech = HiggsTtsPipelineConfig.tasks(str(v2_folder)).speech
    assert speech is not None
    assert (speech.max_references, speech.takes_instructions) == (4, True)
    registry = PipelineRegistry()
    assert registry.by_model(str(v2_folder)) is registry.by_model(str(v3.folder)) is HiggsTtsPipelineConfig


def test_the_example_configuration_resolves() -> None:
    example = Path(__file__).parents[2] / "examples/configs/higgs_tts.yaml"
    resolved = load_config(example, [], registry=PipelineRegistry())
    assert resolved.cls is HiggsTtsPipelineConfig
    assert resolved.engine_stages == ("tts_engine",)
