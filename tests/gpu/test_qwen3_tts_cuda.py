"""Qwen3-TTS on a GPU, through graphs, against what the authors' own code made of the tiny checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu_serving import codes, serve
from test_qwen3_tts import CASES, GOLDENS, Tiny, models, prepared, say, tiny

from sgl_omni.models.qwen3_tts.codec import CodecDecoder
from sgl_omni.models.qwen3_tts.facts import MOST_FRAMES
from sgl_omni.models.qwen3_tts.references import References
from sgl_omni.models.qwen3_tts.vocoder import Vocoder

__all__ = ["models"]

pytestmark = pytest.mark.gpu

AUDIO_TOLERANCE = 1e-4
"""Where factors keep all bits of float32, which is not the default on a GPU."""


@pytest.fixture(scope="module")
def one_thread() -> None:
    """Here it is the GPU that computes."""


@pytest.mark.parametrize("graphs", [0, 8])
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_frames_are_those_of_the_authors(models: dict[str, Tiny], kind: str, graphs: int) -> None:
    names = [name for name, case in CASES.items() if case["kind"] == kind]
    models[kind].talker.to("cuda")
    engine = models[kind].engine(True, cuda_graph_max_bs=graphs, chunked_prefill_tokens=16)
    handed = serve(engine, {name: prepared(models, name) for name in names})
    for name in names:
        assert codes(handed[name]) == GOLDENS[f"{name}/codes"].tolist()


def loaded(folder: Path, monkeypatch: pytest.MonkeyPatch, rounded: bool = False) -> CodecDecoder:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", rounded)
    return CodecDecoder.load(folder / "speech_tokenizer", "cuda:0")


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(("rounded", "most"), [(False, AUDIO_TOLERANCE), (True, 2e-3)])
def test_a_stream_of_frames_is_the_whole(
    models: dict[str, Tiny], monkeypatch: pytest.MonkeyPatch, rounded: bool, most: float, captured: bool
) -> None:
    decoder = loaded(models["base"].folder, monkeypatch, rounded)
    if captured:
        decoder.capture(1, MOST_FRAMES)
    vocoder = Vocoder(decoder, tiny.SAMPLE_RATE)
    audio = say(vocoder, GOLDENS["codec/codes"], [3, 11, 1, 20, 2, 30])
    primed: Any = say(vocoder, GOLDENS["codec/codes"][41:], [], reference_codes=GOLDENS["codec/codes"][:41])
    assert np.abs(audio - GOLDENS["codec/audio"]).max() < most
    assert np.abs(primed - GOLDENS["codec/audio"][41 * tiny.FRAME_SAMPLES :]).max() < most
    assert np.array_equal(audio, say(vocoder, GOLDENS["codec/codes"], []))


@pytest.mark.parametrize("captured", [False, True])
def test_streams_of_unequal_pieces_that_come_and_go_are_those_alone(
    models: dict[str, Tiny], monkeypatch: pytest.MonkeyPatch, captured: bool
) -> None:
    """a is there from the beginning to the end, b leaves, c joins and d takes its place; one piece has no graph."""
    decoder, plain = loaded(models["base"].folder, monkeypatch), models["base"].vocoder._decoder
    if captured:
        decoder.capture(3, MOST_FRAMES)
    rounds = [{"a": 4, "b": 1}, {"a": 8, "b": 5, "c": 16}, {"a": 16, "c": 2}, {"a": 3, "c": 20, "d": 7}, {"d": 9}]
    streams = {name: decoder.open() for name in "abcd"}
    rng = np.random.default_rng(2)
    said = {name: rng.integers(0, tiny.CODES, (60, tiny.GROUPS)).astype(np.int16) for name in streams}
    spoken: dict[str, list[Any]] = {name: [] for name in streams}
    for counts in rounds:
        cuts = [said[name][streams[name].frames :][:count] for name, count in counts.items()]
        for name, samples in zip(counts, decoder(cuts, [streams[name] for name in counts]), strict=True):
            spoken[name].append(samples)
    for name, stream in streams.items():
        expected = plain([said[name][: stream.frames]], [plain.open()])[0]
        assert (torch.cat(spoken[name]) - expected).abs().max() < AUDIO_TOLERANCE


def test_what_is_taken_of_a_recording_is_what_the_authors_take(models: dict[str, Tiny]) -> None:
    references = References.load(models["base"].folder, "cuda")
    with torch.backends.cudnn.flags(allow_tf32=False):
        speaker = references._speaker(torch.from_numpy(tiny.recording()).cuda()).cpu().numpy()
        frames = references._codec(torch.from_numpy(tiny.recording()).cuda()).cpu()
    expected = GOLDENS["reference/speaker"]
    assert np.abs(speaker - expected).max() / np.abs(expected).max() < 1e-3
    assert (frames.numpy() == GOLDENS["reference/codes"]).mean() > 0.9
