"""Encoders of pictures, sounds and reference voices run before the first request, and nothing is left of that."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")

import tiny_ming
import tiny_qwen3_asr
import tiny_whisper
from tiny_checkpoints import BUILDERS

from sgl_omni.audio.encode import encode
from sgl_omni.audio.kept import LastMade
from sgl_omni.errors import StartupError
from sgl_omni.models import rehearsal
from sgl_omni.models.csm import stages as csm
from sgl_omni.models.higgs_tts import stages as higgs
from sgl_omni.models.higgs_tts.references import EncodedVoices
from sgl_omni.models.ming_omni_tts import stages as ming
from sgl_omni.models.moss_tts_local import stages as moss
from sgl_omni.models.qwen3_asr import stages as qwen3_asr
from sgl_omni.models.qwen3_omni import stages as qwen3_omni
from sgl_omni.models.qwen3_tts import stages as qwen3_tts
from sgl_omni.models.registry import PipelineRegistry
from sgl_omni.models.whisper import stages as whisper
from sgl_omni.runtime.build import runner_for
from sgl_omni.runtime.stage import BatchStage, FunctionStage
from sgl_omni.runtime.wiring import load_object

REQUEST: Any = SimpleNamespace(id="r", aborted=False)


def sound(seconds: float, rate: int) -> np.ndarray:
    time = np.arange(round(seconds * rate)) / rate
    return (0.3 * np.sin(2 * np.pi * 330 * time)).astype(np.float32)


def speech() -> dict[str, Any]:
    file = encode("wav", 44_100, [sound(1.2, 44_100)])
    return {"input": "hello", "references": [{"audio": file, "text": "hello"}]}


def reference() -> dict[str, Any]:
    return {"pieces": [[1], [2]], "references": [encode("wav", 44_100, [sound(1.2, 44_100)])]}


def latents() -> dict[str, Any]:
    return {"samples": sound(0.6, 16_000), "voice": sound(0.6, 16_000), "seed": 5}


def mels(bins: int) -> Callable[[], dict[str, Any]]:
    drawn = np.random.default_rng(3).normal(size=(bins, 150)).astype(np.float32)
    return lambda: {"mels": drawn, "mel_lengths": np.asarray([90, 60])}


def pixels() -> dict[str, Any]:
    drawn = np.random.default_rng(3).integers(0, 255, (16, 3 * 2 * 16 * 16), dtype=np.uint8)
    return {"pixels": drawn, "grids": np.asarray([[1, 4, 4]])}


def window() -> dict[str, Any]:
    drawn = np.random.default_rng(3).normal(size=(tiny_whisper.MELS, 2 * tiny_whisper.FRAMES)).astype(np.float32)
    return {"windows": [{"features": drawn, "start": 0.0, "end": 30.0}]}


ENCODERS: dict[str, tuple[str, Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "csm": ("csm", csm.create_preprocessing, speech),
    "higgs_v2": ("higgs_v2", higgs.create_audio_encoder, reference),
    "higgs_v3": ("higgs_v3", higgs.create_audio_encoder, reference),
    "ming": ("ming_speakers", ming.create_reference_encoder, latents),
    "moss": ("moss", moss.create_preprocessing, speech),
    "qwen3_asr": ("qwen3_asr", qwen3_asr.create_audio_encoder, mels(tiny_qwen3_asr.MELS)),
    "qwen3_omni audio": ("qwen3_omni", qwen3_omni.create_audio_encoder, mels(128)),
    "qwen3_omni pictures": ("qwen3_omni", qwen3_omni.create_image_encoder, pixels),
    "qwen3_tts": ("qwen3_tts", qwen3_tts.create_preprocessing, speech),
    "whisper": ("whisper", whisper.create_audio_encoder, window),
}
EVERY_ENCODER = pytest.mark.parametrize("encoder", ENCODERS)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.setattr(rehearsal, "SECONDS", (0.6, 1.2))


@pytest.fixture(scope="module")
def folders(built: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    speaking = tmp_path_factory.mktemp("ming_speakers")
    tiny_ming.build(speaking, speakers=True)
    return lambda name: speaking if name == "ming_speakers" else built(name)


@pytest.fixture
def make(folders: Callable[[str], Path]) -> Callable[[str], Any]:
    def made(encoder: str) -> Any:
        family, factory, _ = ENCODERS[encoder]
        return factory(str(folders(family)))

    return made


def asked(stage: FunctionStage | BatchStage, encoder: str) -> Any:
    """What the stage makes of the encoder's request."""
    payload = ENCODERS[encoder][2]()
    if isinstance(stage, BatchStage):
        return stage.fn([payload])[0]  # type: ignore[index]
    return stage.fn(payload, REQUEST)


class Seen(TorchDispatchMode):
    """Which operations were called in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.add(str(func))
        return func(*args, **(kwargs or {}))


class Broken(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("no kernel image is available")


def remembered() -> int:
    """Results that are kept for the next request with the same recording, in all stages."""
    kept = [each for each in gc.get_objects() if type(each) in (LastMade, EncodedVoices)]
    return sum(len(each._kept if type(each) is LastMade else each._found) for each in kept)


@EVERY_ENCODER
def test_a_rehearsal_calls_every_operation_that_a_request_does(make: Any, encoder: str) -> None:
    stage = make(encoder)
    with Seen() as rehearsed:
        stage.rehearsal()
    with Seen() as requested:
        asked(stage, encoder)
    assert len(requested.operations) > 10
    assert requested.operations <= rehearsed.operations


@EVERY_ENCODER
def test_a_rehearsal_changes_no_result_and_is_not_remembered(make: Any, encoder: str) -> None:
    fresh, rehearsed = make(encoder), make(encoder)
    expected = asked(fresh, encoder)
    before = remembered()
    rehearsed.rehearsal()
    assert remembered() == before
    assert_same(asked(rehearsed, encoder), expected)
    keeps = encoder in ("csm", "higgs_v2", "higgs_v3", "ming", "moss", "qwen3_tts")
    assert (remembered() > before) is keeps, "a request is remembered where voices are, or this test sees nothing"


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            assert_same(*pair)
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, np.ndarray):
        assert np.array_equal(found, expected)
    else:
        assert found == expected


@EVERY_ENCODER
def test_an_encoder_that_fails_fails_its_rehearsal(make: Any, encoder: str) -> None:
    stage = make(encoder)
    with Broken(), pytest.raises(RuntimeError, match="no kernel image is available"):
        stage.rehearsal()


def test_an_encoder_that_refuses_is_told_as_the_rehearsal(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "SECONDS", (0.1,))
    with pytest.raises(StartupError, match=r"its rehearsal failed: the recording lasts 0\.10 s"):
        runner_for(make("qwen3_tts"), "preprocessing").rehearse()


@pytest.mark.parametrize("family", [name for name in BUILDERS if name != "demo_voice"])
def test_every_stage_that_may_run_on_a_gpu_and_is_no_engine_has_a_rehearsal(
    folders: Callable[[str], Path], family: str
) -> None:
    folder = str(folders(family))
    pipeline = PipelineRegistry().by_model(folder)
    assert pipeline is not None
    for name, said in pipeline.default_stages.items():
        factory = load_object(said["factory_path"])
        declared = inspect.signature(factory).parameters
        if "device" in declared and "engine" not in declared:
            assert factory(folder).rehearsal is not None, name
