"""The codec and the vocoder stage: chunks equal the whole, and arrival does not matter."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sgl_omni.models.demo_voice.chunking import ready_chunks
from sgl_omni.models.demo_voice.codec import CodecDecoder
from sgl_omni.models.demo_voice.spec import PACKAGED_WEIGHTS
from sgl_omni.models.demo_voice.stages import create_vocoder
from sgl_omni.models.demo_voice.vocoder import DemoVocoder

GOLDEN = np.load(Path(__file__).parent / "data" / "demo_voice" / "audio.npz")
REQUEST: Any = SimpleNamespace(id="r", aborted=False)


@pytest.fixture(scope="module")
def codec() -> CodecDecoder:
    return CodecDecoder.load(PACKAGED_WEIGHTS)


@pytest.fixture(scope="module")
def vocoder(codec: CodecDecoder) -> DemoVocoder:
    return DemoVocoder(codec)


def random_codes(frames: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1024, (frames, 4)).astype(np.int16)


def say(vocoder: DemoVocoder, pieces: list[np.ndarray], groups: random.Random | None, **extra: Any) -> np.ndarray:
    """Feeds the pieces whole, or in groups of random size; returns the audio."""
    state = vocoder.open(REQUEST)
    audio: list[np.ndarray] = []
    for codes in pieces:
        at = 0
        while True:
            stop = len(codes) if groups is None else min(len(codes), at + groups.randint(0, 12))
            ended = stop == len(codes)
            chunk = {"codes": codes[at:stop], "piece_end": ended, **extra}
            audio += [made["audio"] for made in vocoder.feed(state, chunk)]
            at = stop
            if ended:
                break
    audio += [made["audio"] for made in vocoder.flush(state)]
    return np.concatenate(audio)


def test_audio_equals_the_golden_audio(codec: CodecDecoder) -> None:
    audio = codec.decode(GOLDEN["codes"])
    assert audio.dtype == np.float32
    np.testing.assert_allclose(audio, GOLDEN["audio"], atol=1e-5)


def test_no_frames_are_no_samples(codec: CodecDecoder) -> None:
    assert codec.decode(random_codes(0)).shape == (0,)


@pytest.mark.parametrize("frames", [1, 3, 4, 9, 10, 11, 25, 70, 133])
def test_chunks_equal_the_whole(codec: CodecDecoder, frames: int) -> None:
    codes = random_codes(frames, frames)
    chunks = ready_chunks(0, frames, codec.spec.right_context, complete=True)
    joined = np.concatenate([codec.decode_chunk(codes, start, end) for start, end in chunks])
    np.testing.assert_allclose(joined, codec.decode(codes), atol=1e-5)


def test_chunks_grow_and_wait_for_their_right_context() -> None:
    assert ready_chunks(0, 9, 6, complete=False) == []
    assert ready_chunks(0, 10, 6, complete=False) == [(0, 4)]
    assert ready_chunks(0, 110, 6, complete=False) == [(0, 4), (4, 8), (8, 16), (16, 32), (32, 64), (64, 96)]
    assert ready_chunks(8, 21, 6, complete=True) == [(8, 21)]
    assert ready_chunks(8, 22, 6, complete=True) == [(8, 16), (16, 22)]
    assert ready_chunks(8, 8, 6, complete=True) == []


@pytest.mark.parametrize("seed", range(4))
def test_audio_does_not_depend_on_how_the_codes_arrive(vocoder: DemoVocoder, seed: int) -> None:
    pieces = [random_codes(n, n) for n in (40, 0, 5, 77)]
    whole = say(vocoder, pieces, None)
    assert np.array_equal(say(vocoder, pieces, random.Random(seed)), whole)


def test_pieces_are_joined_by_a_pause(vocoder: DemoVocoder, codec: CodecDecoder) -> None:
    first, second = random_codes(12, 1), random_codes(7, 2)
    audio = say(vocoder, [first, second], None)
    assert len(audio) == (12 + 7) * 640 + 1920
    assert not audio[12 * 640 : 12 * 640 + 1920].any()
    np.testing.assert_allclose(audio[12 * 640 + 1920 :], codec.decode(second), atol=1e-5)


def test_chunks_are_audio_at_16_khz_in_range(vocoder: DemoVocoder) -> None:
    made = list(vocoder.feed(vocoder.open(REQUEST), {"codes": random_codes(30), "piece_end": True}))
    assert {chunk["sample_rate"] for chunk in made} == {16000}
    assert all(chunk["audio"].dtype == np.float32 and abs(chunk["audio"]).max() <= 1 for chunk in made)


def test_two_requests_keep_their_own_state(vocoder: DemoVocoder) -> None:
    a, b = random_codes(20, 1), random_codes(20, 2)
    states = [vocoder.open(REQUEST), vocoder.open(REQUEST)]
    heard: list[list[np.ndarray]] = [[], []]
    for at in range(0, 20, 5):
        for i, codes in enumerate((a, b)):
            chunk = {"codes": codes[at : at + 5], "piece_end": at == 15, "speed": 1.0}
            heard[i] += [made["audio"] for made in vocoder.feed(states[i], chunk)]
    for i, codes in enumerate((a, b)):
        assert np.array_equal(np.concatenate(heard[i]), say(vocoder, [codes], None))


def test_speed_changes_the_length_and_not_with_arrival(vocoder: DemoVocoder) -> None:
    codes = [GOLDEN["codes"], GOLDEN["codes"]]
    normal, fast = say(vocoder, codes, None), say(vocoder, codes, None, speed=1.5)
    assert len(fast) == pytest.approx(len(normal) / 1.5, rel=0.1)
    assert np.array_equal(say(vocoder, codes, random.Random(1), speed=1.5), fast)


def test_the_result_is_the_engines(vocoder: DemoVocoder) -> None:
    result = {"finish_reason": "stop", "input_tokens": 5, "output_tokens": 9}
    assert vocoder.result(vocoder.open(REQUEST), result) == result


def test_the_factory_builds_a_vocoder() -> None:
    assert isinstance(create_vocoder("demo-voice"), DemoVocoder)
