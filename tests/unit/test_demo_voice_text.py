"""Normalising and splitting. The golden file holds what the model's training normaliser made of each text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_omni.errors import InvalidRequest
from sgl_omni.models.demo_voice.preprocess import SpeechPreprocessor
from sgl_omni.models.demo_voice.spec import PACKAGED_WEIGHTS, VoiceSpec, resolve_folder
from sgl_omni.models.demo_voice.stages import create_preprocessing
from sgl_omni.models.demo_voice.text import ALPHABET, normalise, split
from sgl_omni.runtime.stage import FunctionStage, Payload

GOLDEN = Path(__file__).parent / "data" / "demo_voice" / "text.json"
REFERENCE = Path(__file__).parents[3] / "shared" / "demo_voice" / "reference" / "textnorm.py"

FRAGMENTS = (  # noqa: SIM905
    "$ £ € % & # @ / ° 0 1 7 12 23 007 1999 2005 1,000 .5 3.25 st nd th am p.m. km MB million , . : ; - -- ' ( ) ? ! "
    "a A B I s x May june NASA U.S. Mr Mr. Dr. etc. i.e. it's CPUs well-known é ß ² ٣ — … hello the"
).split()
any_text = st.one_of(st.text(), st.lists(st.sampled_from([*FRAGMENTS, " ", "\n"]), max_size=25).map("".join))


def test_every_golden_text_is_normalised_and_split_as_in_training() -> None:
    for text, normalised, pieces in json.loads(GOLDEN.read_text(encoding="utf-8")):
        assert normalise(text) == normalised, text
        assert split(normalised) == pieces, text


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        ("It costs $7.50.", "it costs seven dollars and fifty cents."),
        ("Born on June 21st, 1987", "born on june twenty-first, nineteen eighty-seven."),
        ("NASA met Dr. Who at 6:05 pm", "n ay s ay met doctor who at six oh five pee em."),
        ("5 km. away -- really!?", "five kilometers away, really?"),
        ("Déjà vu “again”…", "deja vu again."),
        ("", ""),
        ("日本語 😀 --- ...", ""),
    ],
)
def test_normalise(text: str, spoken: str) -> None:
    assert normalise(text) == spoken


def test_numbers_too_long_to_name_are_read_digit_by_digit() -> None:
    assert normalise("$" + "9" * 5000) == " ".join(["nine"] * 5000) + " dollars."
    assert normalise("7" * 5000 + "th") == " ".join(["seven"] * 5000) + "."


@given(any_text)
def test_normalised_text_is_speakable_and_its_pieces_fit_the_model(text: str) -> None:
    normalised = normalise(text)
    assert set(normalised) <= set(ALPHABET)
    assert not normalised or normalised[-1] in ".?!"
    for piece in split(normalised * 20):
        assert 0 < len(piece) <= 201
        assert any(c.isalpha() for c in piece)


@pytest.mark.skipif(not REFERENCE.exists(), reason="the training normaliser is not beside this checkout")
@given(any_text)
def test_equals_the_training_normaliser(text: str) -> None:
    reference: dict[str, object] = {"__name__": "textnorm"}
    exec(compile(REFERENCE.read_text(encoding="utf-8"), str(REFERENCE), "exec"), reference)
    assert normalise(text) == reference["normalize"](text)  # type: ignore[operator]
    assert split(normalise(text), 60) == reference["split_text"](normalise(text), 60)  # type: ignore[operator]


# ---------------------------------------------------------------- the preprocessing stage


def preprocess(**payload: object) -> Payload:
    return SpeechPreprocessor(VoiceSpec.load(PACKAGED_WEIGHTS))(payload, None)  # type: ignore[arg-type]


def test_preprocessing_fills_in_every_option() -> None:
    assert preprocess(input="Hello, Dr. Who!", voice="awb", speed=1.0) == {
        "pieces": ["hello, doctor who!"],
        "voice": 2,
        "speed": 1.0,
        "temperature": 0.0,
        "top_k": 50,
        "seed": None,
        "max_frames": 400,
    }


def test_preprocessing_keeps_the_callers_options() -> None:
    made = preprocess(input="Hi.", voice="", speed=1.5, temperature=0.7, top_k=3, seed=9, max_new_tokens=20)
    assert made["voice"] == 1  # rms, the default
    assert (made["speed"], made["temperature"], made["top_k"], made["seed"], made["max_frames"]) == (1.5, 0.7, 3, 9, 20)


@pytest.mark.parametrize(
    ("payload", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": "😀 ..."}, "input"),
        ({"input": None}, "input"),
        ({"input": "Hi.", "voice": "nobody"}, "voice"),
        ({"input": "Hi.", "speed": 0.0}, "speed"),
        ({"input": "Hi.", "speed": float("nan")}, "speed"),
    ],
)
def test_preprocessing_refuses(payload: Payload, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        preprocess(**payload)
    assert refused.value.param == param


def test_a_model_path_is_the_model_id_or_a_folder(tmp_path: Path) -> None:
    assert resolve_folder("demo-voice") == PACKAGED_WEIGHTS
    assert resolve_folder(str(PACKAGED_WEIGHTS)) == PACKAGED_WEIGHTS
    with pytest.raises(InvalidRequest, match=r"nowhere"):
        resolve_folder(str(tmp_path / "nowhere"))


def test_preprocessing_starts_without_torch() -> None:
    assert isinstance(create_preprocessing("demo-voice"), FunctionStage)
    code = (
        "import sys; from sgl_omni.models.demo_voice import stages; stages.create_preprocessing('demo-voice'); "
        "print('torch' in sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "False"
