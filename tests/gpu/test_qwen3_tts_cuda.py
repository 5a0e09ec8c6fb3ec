"""Qwen3-TTS on a GPU, through graphs, against what the authors' own code made of the tiny checkpoints."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_qwen3_tts import CASES, GOLDENS, Tiny, models, prepared, say, tiny

from sgl_omni.models.qwen3_tts.codec import CodecDecoder
from sgl_omni.models.qwen3_tts.references import References
from sgl_omni.models.qwen3_tts.vocoder import Vocoder

__all__ = ["models"]

pytestmark = pytest.mark.gpu

AUDIO_TOLERANCE = 1e-4
"""The convolutions of this test keep all bits of float32, which is not the default on a GPU."""


@pytest.fixture(scope="module")
def one_thread() -> None:
    """Here it is the GPU that computes."""


@pytest.mark.parametrize("graphs", [0, 8])
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_frames_are_those_of_the_authors(models: dict[str, Tiny], kind: str, graphs: int) -> None:
    names = [name for name, case in CASES.items() if case["kind"] == kind]
    models[kind].talker.to("cuda")
    engine = models[kind].engine(True, cuda_graph_max_bs=graphs, chunked_prefill_tokens=16)
    spoken: dict[str, list[list[int]]] = {name: [] for name in names}
    for name in names:
        engine.add(name, prepared(models, name))
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            spoken[output.request_id] += [row for chunk in output.chunks for row in chunk["codes"].tolist()]
    assert spoken == {name: GOLDENS[f"{name}/codes"].tolist() for name in names}
    assert engine.stats()["kv_used_tokens"] == 0


def test_a_stream_of_frames_is_the_whole(models: dict[str, Tiny]) -> None:
    folder = models["base"].folder / "speech_tokenizer"
    vocoder = Vocoder(CodecDecoder.load(folder, "cuda"), tiny.SAMPLE_RATE)
    with torch.backends.cudnn.flags(allow_tf32=False):
        audio = say(vocoder, GOLDENS["codec/codes"], [3, 11, 1, 20, 2, 30])
        primed: Any = say(vocoder, GOLDENS["codec/codes"][41:], [], reference_codes=GOLDENS["codec/codes"][:41])
    assert np.abs(audio - GOLDENS["codec/audio"]).max() < AUDIO_TOLERANCE
    assert np.abs(primed - GOLDENS["codec/audio"][41 * tiny.FRAME_SAMPLES :]).max() < AUDIO_TOLERANCE


def test_what_is_taken_of_a_recording_is_what_the_authors_take(models: dict[str, Tiny]) -> None:
    references = References.load(models["base"].folder, "cuda")
    with torch.backends.cudnn.flags(allow_tf32=False):
        speaker = references._speaker(torch.from_numpy(tiny.recording()).cuda()).cpu().numpy()
        frames = references._codec(torch.from_numpy(tiny.recording()).cuda()).cpu()
    expected = GOLDENS["reference/speaker"]
    assert np.abs(speaker - expected).max() / np.abs(expected).max() < 1e-3
    assert (frames.numpy() == GOLDENS["reference/codes"]).mean() > 0.9
