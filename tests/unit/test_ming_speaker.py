"""The speaker's vector of Ming-Omni-TTS: Kaldi's features, an ONNX file, and its place in the prompt."""

from __future__ import annotations

import io
import logging
import math
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from sgl_omni.engine.engine import AutoregressiveEngine, EngineSettings
from sgl_omni.errors import InvalidRequest, NotFinite, StartupError
from sgl_omni.models.ming_omni_tts.model import MingModel
from sgl_omni.models.ming_omni_tts.speaker import KaldiFeatures, SpeakerEncoder
from sgl_omni.models.ming_omni_tts.stages import create_preprocessing, create_reference_encoder
from sgl_omni.models.ming_omni_tts.task import MingTask
from sgl_omni.runtime.stage import Payload

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny_ming import (
    CAPTION,
    LATENT,
    PATCH,
    SPEAKER_RATE,
    STEP,
    TEXTS,
    PlainSpeakers,
    Tiny,
    audio_of,
    build,
    kaldi_features,
)
from tiny_moss import recording

STEPS = 9
TOLERANCE = 2e-4


def voice(seconds: float, pitch: float = 140.0) -> np.ndarray:
    """A tone with overtones that swells, in some noise: float32 at 16 kHz."""
    t = np.arange(round(seconds * SPEAKER_RATE)) / SPEAKER_RATE
    tone = sum(np.sin(2 * np.pi * pitch * k * t) / k for k in range(1, 9)) * (0.1 + 0.1 * np.sin(2 * np.pi * 3 * t))
    return (tone + np.random.default_rng(1).normal(0, 0.003, len(t))).astype(np.float32)


def file_of(samples: np.ndarray, rate: int = SPEAKER_RATE) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="WAV", subtype="FLOAT")
    return file.getvalue()


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "experts"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Tiny:
    return build(tmp_path_factory.mktemp("ming-speaker"), experts=request.param, speakers=True)


@pytest.fixture
def onnx_file(tmp_path: Path) -> Path:
    PlainSpeakers().save(tmp_path / "campplus.onnx")
    return tmp_path / "campplus.onnx"


def prepared(folder: Path, **payload: Any) -> Payload:
    """What reaches the engine of a request."""
    asked = create_preprocessing(str(folder)).fn(payload, None)  # type: ignore[arg-type]
    return create_reference_encoder(str(folder)).fn(asked, None)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("samples", [400, 559, 560, 4001, 160000])
@pytest.mark.parametrize("kind", ["noise", "voice", "silence and an offset"])
def test_features_are_those_of_kaldi(samples: int, kind: str) -> None:
    if kind == "voice":
        heard = voice(10)[:samples]
    elif kind == "noise":
        heard = np.random.default_rng(samples).normal(0, 0.2, samples).astype(np.float32)
    else:
        heard = np.full(samples, 0.25, np.float32)
    expected = kaldi_features(heard)
    found = KaldiFeatures()(torch.from_numpy(heard)).numpy()
    assert found.shape == expected.shape == (1 + (samples - 400) // 160, 80)
    assert np.abs(found - (expected - expected.mean(0))).max() < 2e-3  # of logarithms, which span 16


def test_vectors_are_those_of_the_plain_model_and_are_remembered(onnx_file: Path) -> None:
    encoder, plain = SpeakerEncoder.load(onnx_file, 1), PlainSpeakers()
    low, high = voice(2.0), voice(2.0, pitch=230.0)
    for heard in (low, high, voice(0.5)):
        found, expected = encoder.vector(heard), plain.vector(heard).numpy()
        assert found.shape == (192,) and found.dtype == np.float32
        assert np.abs(found - expected).max() < 1e-3 * np.abs(expected).max()
    assert np.abs(encoder.vector(low) - encoder.vector(high)).max() > 0.1 * np.abs(encoder.vector(low)).max()
    assert encoder.vector(low.copy()) is encoder.vector(low)


def test_the_file_runs_on_the_cpu_in_as_many_threads_as_asked(onnx_file: Path) -> None:
    session = SpeakerEncoder.load(onnx_file, 3)._session
    options = session.get_session_options()
    assert session.get_providers() == ["CPUExecutionProvider"]
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (3, 1)


@pytest.mark.parametrize("seconds", [0.001, 0.0249])
def test_recordings_too_short_for_a_frame_are_refused(onnx_file: Path, seconds: float) -> None:
    with pytest.raises(InvalidRequest, match="too short to tell a voice by") as caught:
        SpeakerEncoder.load(onnx_file, 1).vector(voice(seconds))
    assert caught.value.param == "references[0].audio"


def test_damaged_and_other_files_are_told_by_name_at_start(onnx_file: Path, tiny: Tiny) -> None:
    whole = onnx_file.read_bytes()
    plain = PlainSpeakers()
    damages = {
        "cut off": lambda: onnx_file.write_bytes(whole[: len(whole) // 2]),
        "empty": lambda: onnx_file.write_bytes(b""),
        "a pointer": lambda: onnx_file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        "other bands": lambda: plain.save(onnx_file, bands=64),
        "another size": lambda: plain.save(onnx_file, size=100),
    }
    for name, damage in damages.items():
        damage()
        with pytest.raises(StartupError, match=r"campplus\.onnx is no model of speakers: ") as caught:
            SpeakerEncoder.load(onnx_file, 1)
        assert "\n" not in str(caught.value), name
    assert "it makes 100 numbers, not 192" in str(caught.value)
    plain.outer[3, 5] = math.nan
    plain.save(onnx_file)
    with pytest.raises(StartupError, match=r"campplus\.onnx is damaged: it makes numbers that are not finite"):
        SpeakerEncoder.load(onnx_file, 1)


def test_a_model_that_makes_no_numbers_of_a_long_recording_is_not_the_callers_fault(onnx_file: Path) -> None:
    encoder = SpeakerEncoder.load(onnx_file, 1)
    endless = types.SimpleNamespace(run=lambda *_: [np.full((1, 192), np.inf, np.float32)])
    encoder._session = endless
    with pytest.raises(NotFinite, match="the numbers of the reference's speaker are not all finite"):
        encoder.vector(voice(3.0))
    with pytest.raises(InvalidRequest, match=r"lasts 0\.500 s, too short"):
        encoder.vector(voice(0.5))


def test_the_prompt_holds_vector_and_latents_and_without_text_the_vector_alone(tiny: Tiny) -> None:
    heard = voice(0.7)
    file = file_of(heard)
    expected = PlainSpeakers().vector(heard).numpy()
    for text in TEXTS:
        both = prepared(tiny.folder, input=text, references=[{"audio": file, "text": "Hello."}], seed=1)
        assert (both["ids"].tolist(), both["speaker_at"]) == tiny.prompt(text, spoken="Hello.", speaker=True)
        assert both["latents"].shape == (-(-round(0.7 * 8000) // STEP) * PATCH, LATENT)
        alone = prepared(
            tiny.folder, input=text, references=[{"audio": file, "text": None}], instructions="soft", seed=1
        )
        assert (alone["ids"].tolist(), alone["speaker_at"]) == tiny.prompt(text, caption=CAPTION)
        assert "latents" not in alone
        for found in (both, alone):
            assert np.abs(found["speaker"] - expected).max() < 1e-3 * np.abs(expected).max()
            assert not {"samples", "voice"} & set(found)
        nobody = prepared(tiny.folder, input=text, seed=1)
        assert nobody["speaker_at"] > 0 and not {"speaker", "latents"} & set(nobody)


def test_recordings_at_another_rate_give_nearly_the_same_vector(tiny: Tiny) -> None:
    heard = voice(1.5)
    twice = np.interp(np.arange(2 * len(heard)) / 2, np.arange(len(heard)), heard).astype(np.float32)
    vectors = [
        prepared(tiny.folder, input="Hi.", references=[{"audio": file, "text": "a"}])["speaker"]
        for file in (file_of(heard), file_of(twice, 2 * SPEAKER_RATE))
    ]
    assert np.dot(*vectors) / np.prod([np.linalg.norm(vector) for vector in vectors]) > 0.99


@pytest.mark.parametrize(("chunk", "device_rows"), [(7, False), (2048, True)])
def test_audio_equals_the_plain_model(tiny: Tiny, churn: Any, chunk: int, device_rows: bool) -> None:
    """Requests that differ in their speaker alone share no more of a prompt than what comes before the vector."""
    model = MingModel.load(tiny.folder)
    generator = torch.Generator().manual_seed(3)
    noise = np.random.default_rng(2).normal(0, 0.1, SPEAKER_RATE).astype(np.float32)
    vectors = [None, *(PlainSpeakers().vector(heard) for heard in (voice(1.0), noise))]
    payloads: dict[str, Payload] = {}
    expected: dict[str, np.ndarray] = {}
    for heard in (0, 3):
        latents = torch.randn(heard * PATCH, LATENT, generator=generator)
        for i, speaker in enumerate(vectors):
            ids, at = tiny.prompt(TEXTS[1], spoken="Hello." if heard else None, speaker=speaker is not None)
            said = tiny.model.latents(ids, at, latents, 5, STEPS, speaker=speaker)
            payload: Payload = {"ids": np.asarray(ids), "speaker_at": at, "seed": 5, "max_steps": STEPS}
            payload |= {"latents": latents.numpy()} if heard else {}
            payload |= {} if speaker is None else {"speaker": speaker.numpy()}
            payloads[f"{heard} {i}"] = payload
            expected[f"{heard} {i}"] = tiny.model.audio.decode(said).numpy().clip(-1, 1)
    options = EngineSettings(max_total_tokens=4096, page_size=1, chunked_prefill_tokens=chunk)
    engine = AutoregressiveEngine.build(model, MingTask(model), options, device_rows=device_rows)
    seen = churn(engine, payloads, f"speakers {chunk}")
    for name, wanted in expected.items():
        found = audio_of(tiny.folder, seen[name].chunks)
        assert len(found) == len(wanted) and np.abs(found - wanted).max() < TOLERANCE, name
    for heard in (0, 3):
        one, other = (expected[f"{heard} {i}"][: 3 * STEP] for i in (1, 2))
        assert np.abs(one - other).max() > 20 * TOLERANCE  # or the above would prove nothing of the vector


@pytest.mark.parametrize("lacks", ["the file", "the library"])
def test_without_the_file_or_the_library_references_are_heard_as_before(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lacks: str
) -> None:
    folder, told = tiny.folder, "campplus.onnx needs onnxruntime: pip install 'sgl-omni[ming]'"
    if lacks == "the library":
        monkeypatch.setitem(sys.modules, "onnxruntime", None)
    else:
        folder, told = tmp_path / "copy", "holds no campplus.onnx"
        folder.mkdir()
        for file in tiny.folder.iterdir():
            if file.name != "campplus.onnx":
                (folder / file.name).symlink_to(file)
    file = recording(0.1)
    with caplog.at_level(logging.WARNING, "sgl_omni"):
        found = prepared(folder, input="Hi.", references=[{"audio": file, "text": "Noise."}], seed=1)
    ours = [record.message for record in caplog.records if record.name.startswith("sgl_omni.")]
    assert len(ours) == 1 and told in ours[0]
    assert (found["ids"].tolist(), found["speaker_at"]) == tiny.prompt("Hi.", spoken="Noise.")
    assert "speaker" not in found and len(found["latents"]) > 0
    with pytest.raises(InvalidRequest, match="what is said"):
        prepared(folder, input="Hi.", references=[{"audio": file, "text": None}])
