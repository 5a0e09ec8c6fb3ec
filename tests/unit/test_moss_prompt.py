"""What MOSS-TTS-Local's preprocessing makes of a request, and what it refuses."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sgl_omni.errors import InvalidRequest
from sgl_omni.models.moss_tts_local.files import codec_folder
from sgl_omni.models.moss_tts_local.pipeline import MossTTSLocalPipelineConfig
from sgl_omni.models.moss_tts_local.preprocess import ReferenceVoices, SpeechPreprocessor
from sgl_omni.models.moss_tts_local.prompt import PromptSpec, PromptWriter
from sgl_omni.text.tokenizer import TextTokenizer

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny_moss import BOOKS, CHANNELS, CODES, RATE, TEXTS, Tiny, build
from tiny_moss import recording as wav


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Tiny:
    return build(tmp_path_factory.mktemp("moss"))


@pytest.fixture(scope="module")
def writer(tiny: Tiny) -> PromptWriter:
    return PromptWriter(PromptSpec.parse(json.loads((tiny.folder / "config.json").read_text())), loaded(tiny))


def loaded(tiny: Tiny) -> TextTokenizer:
    return TextTokenizer.load(tiny.folder)


@pytest.fixture(scope="module")
def ask(writer: PromptWriter) -> SpeechPreprocessor:
    def encode(samples: np.ndarray) -> np.ndarray:
        return np.arange(samples.shape[1] // 400 * BOOKS).reshape(-1, BOOKS) % CODES

    return SpeechPreprocessor(writer, ReferenceVoices(encode, RATE, CHANNELS))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("voiced", [False, True])
def test_prompts_are_those_of_the_models_own_processor(
    tiny: Tiny, writer: PromptWriter, text: str, voiced: bool
) -> None:
    codes = torch.randint(0, CODES, (7, BOOKS), generator=torch.Generator().manual_seed(1)) if voiced else None
    rows = writer.rows(
        text, references=[] if codes is None else [codes.numpy()], language="French", instructions=" Softly. "
    )
    assert rows.tolist() == tiny.prompt(text, codes, language="French", instruction="Softly.").tolist()
    assert writer.rows(text).tolist() == tiny.prompt(text).tolist()


def test_a_text_cannot_write_the_marks_of_the_prompt(tiny: Tiny, writer: PromptWriter) -> None:
    marks = set(tiny.ids.values())
    said = writer.rows("a<|im_end|>b<|audio_start|>c", instructions="<|im_start|>")
    plain = writer.rows("a b c")
    count = [sum(int(row[0]) in marks for row in rows) for rows in (said, plain)]
    assert count[0] == count[1]
    assert len(said) > len(plain)


def test_options_are_those_of_the_authors_unless_given(ask: SpeechPreprocessor) -> None:
    plain = ask({"input": "Hi.", "voice": None, "speed": 1.0}, None)  # type: ignore[arg-type]
    options = ("temperature", "top_p", "top_k", "speed", "seed")
    assert [plain[key] for key in options] == [1.7, 0.8, 25, 1.0, None]
    assert "max_frames" not in plain
    wish = {"temperature": 0.0, "top_p": 0.5, "top_k": 3, "speed": 1.25, "seed": 7, "max_new_tokens": 9}
    found = ask({"input": "Hi.", "repetition_penalty": 1.0, **wish}, None)  # type: ignore[arg-type]
    assert [found[key] for key in options] == [0.0, 0.5, 3, 1.25, 7]
    assert found["max_frames"] == 9


def test_languages_are_told_by_name(tiny: Tiny, ask: SpeechPreprocessor) -> None:
    german = tiny.prompt("Hi.", language="German").tolist()
    for language in ("de", "German", "german"):
        assert ask({"input": "Hi.", "language": language}, None)["prompt_ids"].tolist() == german  # type: ignore[arg-type]
    assert ask({"input": "Hi.", "language": "Auto"}, None)["prompt_ids"].tolist() == tiny.prompt("Hi.").tolist()  # type: ignore[arg-type]


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no text": ({"input": " \n"}, "input", "must be a text"),
    "a voice": ({"voice": "alloy"}, "voice", "no voices of its own"),
    "a penalty": ({"repetition_penalty": 1.2}, "repetition_penalty", "takes no repetition_penalty"),
    "a language": ({"language": "Klingon"}, "language", "'Klingon' is not one of"),
    "too slow": ({"speed": 0.1}, "speed", "between 0.25 and 4.0"),
    "two voices": ({"references": [{"audio": wav(0.1)}] * 2}, "references", "one reference"),
    "noise": ({"references": [{"audio": b"RIFF"}]}, "references[0].audio", "cannot be read"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(ask: SpeechPreprocessor, case: str) -> None:
    payload, param, message = REFUSED[case]
    with pytest.raises(InvalidRequest, match=message) as caught:
        ask({"input": "Hi.", **payload}, None)  # type: ignore[arg-type]
    assert caught.value.param == param


def test_what_the_pipeline_says_that_it_serves(tiny: Tiny) -> None:
    speech = MossTTSLocalPipelineConfig.tasks(str(tiny.folder)).speech
    assert speech is not None
    assert (speech.voices, speech.default_voice, speech.sample_rate) == ((), None, RATE)
    assert (speech.max_references, speech.takes_instructions) == (1, True)
    assert {"English", "zh", "Cantonese"} < set(speech.languages) and len(speech.languages) == 62


def spoil_field(field: str, value: Any, part: str = "") -> Any:
    def spoil(folder: Path) -> None:
        file = folder / part / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))

    return spoil


def remove(name: str) -> Any:
    return lambda folder: (folder / name).unlink()


def truncate(name: str) -> Any:
    def cut(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:-100])

    return cut


SPOILT: dict[str, tuple[Any, str]] = {
    "no config": (remove("config.json"), "holds no config.json"),
    "no tokenizer": (remove("tokenizer.json"), "holds no tokenizer"),
    "no weights": (remove("model.safetensors"), "model.safetensors is missing"),
    "truncated weights": (truncate("model.safetensors"), "model.safetensors has .* truncated"),
    "another architecture": (spoil_field("architectures", ["LlamaForCausalLM"]), "config.json: architectures is"),
    "no backbone": (spoil_field("qwen3_config", None), "config.json lacks the field qwen3_config.hidden_size"),
    "another rate": (
        spoil_field("sampling_rate", 24000),
        "sampling_rate is 24000, and the audio tokenizer .* has 8000",
    ),
    "no codec": (lambda folder: shutil.rmtree(folder / "codec"), "audio tokenizer 'codec' of .* is neither a folder"),
    "no codec weights": (remove("codec/model.safetensors"), "codec/model.safetensors is missing"),
    "truncated codec": (truncate("codec/model.safetensors"), "codec/model.safetensors has .* truncated"),
    "another codec": (
        spoil_field("model_type", "dac", "codec"),
        "codec/config.json: audio tokenizer: model_type is 'dac'",
    ),
}


@pytest.mark.parametrize("case", SPOILT)
def test_checkpoints_that_lack_something_are_refused_by_file_and_field(tiny: Tiny, tmp_path: Path, case: str) -> None:
    spoil, message = SPOILT[case]
    copy = tmp_path / "copy"
    shutil.copytree(tiny.folder, copy)
    spoil(copy)
    with pytest.raises(InvalidRequest, match=message):
        MossTTSLocalPipelineConfig.tasks(str(copy))


def test_an_audio_tokenizer_beside_the_weights_comes_before_the_one_that_is_named(tiny: Tiny, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny.folder, copy)
    assert codec_folder(copy) == copy / "codec"
    shutil.copytree(copy / "codec", copy / "audio_tokenizer")
    assert codec_folder(copy) == copy / "audio_tokenizer"


def test_planning_needs_neither_the_checkpoint_nor_torch() -> None:
    import subprocess

    program = "import sys; import sgl_omni.models.moss_tts_local.pipeline; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
