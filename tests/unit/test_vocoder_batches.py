"""Codecs that decode several streams at once: each stream's audio is what it is alone, whoever its neighbours are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sgl_omni.audio.causal import CausalStream
from sgl_omni.engine.task import HandOver
from sgl_omni.errors import NotFinite, StartupError
from sgl_omni.models.csm import codec as mimi
from sgl_omni.models.csm.stages import create_vocoder as create_csm
from sgl_omni.models.csm.vocoder import CsmVocoder
from sgl_omni.models.qwen3_tts import codec as qwen3
from sgl_omni.models.qwen3_tts.stages import create_vocoder as create_qwen3_tts
from sgl_omni.models.qwen3_tts.vocoder import Vocoder
from sgl_omni.models.rehearsal import rehearsed

pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).parents[1]))
import tiny_csm
import tiny_qwen3_tts

TOLERANCE = 2e-6
"""Of samples of at most 1: sums in another order."""
REQUEST: Any = SimpleNamespace(id="r", aborted=False)
FAMILIES = pytest.mark.parametrize("family", ["qwen3_tts", "csm"])

Decode = Callable[[Sequence[Any], Sequence[CausalStream]], list[Any]]


@dataclass(frozen=True)
class Codec:
    folder: Path
    decoder: Any
    decode: Decode
    books: int
    size: int
    hop: int

    def codes(self, frames: int, seed: int) -> np.ndarray:
        return np.random.default_rng(seed).integers(0, self.size, (frames, self.books)).astype(np.int16)

    def alone(self, codes: np.ndarray) -> np.ndarray:
        """All frames at once, and nobody else."""
        return np.asarray(self.decode([codes], [self.decoder.open()])[0])


@FAMILIES
def test_a_rehearsal_leaves_no_stream(codecs: dict[str, Codec], family: str) -> None:
    vocoder = (
        Vocoder(codecs[family].decoder, 24_000, max_batch=4)
        if family == "qwen3_tts"
        else CsmVocoder(codecs[family].decoder, HandOver(2, 12), max_batch=4)
    )
    rehearsal = rehearsed(vocoder, codecs[family].books).rehearsal
    assert rehearsal is not None
    rehearsal()
    assert vocoder._decode._callers == 0


@pytest.fixture(scope="module")
def codecs(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> dict[str, Codec]:
    folder = tiny_qwen3_tts.build(tmp_path_factory.mktemp("qwen3_tts"), "base")
    own = qwen3.CodecDecoder.load(folder / "speech_tokenizer")
    config = tiny_qwen3_tts.speech_tokenizer_config()["decoder_config"]
    tiny = tiny_csm.build(tmp_path_factory.mktemp("csm"), 12)
    mimis = mimi.CodecDecoder.load(tiny.folder)
    return {
        "qwen3_tts": Codec(folder, own, own, own.num_codes, config["codebook_size"], own.samples_per_frame),
        "csm": Codec(tiny.folder, mimis, mimis.decode, tiny_csm.BOOKS, tiny_csm.CODES, tiny_csm.FRAME),
    }


@FAMILIES
def test_streams_of_unequal_pieces_that_come_and_go_are_those_alone(codecs: dict[str, Codec], family: str) -> None:
    """a is there from the beginning to the end, b leaves, c joins and d takes its place."""
    codec = codecs[family]
    rounds = [{"a": 4, "b": 1}, {"a": 8, "b": 5, "c": 16}, {"a": 16, "c": 2}, {"a": 3, "c": 16, "d": 7}, {"d": 9}]
    streams = {name: codec.decoder.open() for name in "abcd"}
    spoken: dict[str, list[np.ndarray]] = {name: [] for name in streams}
    codes = {name: codec.codes(60, seed) for seed, name in enumerate(streams)}
    for counts in rounds:
        said = {name: codes[name][streams[name].frames :][:count] for name, count in counts.items()}
        audio = codec.decode([*said.values()], [streams[name] for name in said])
        for name, samples in zip(said, audio, strict=True):
            assert samples.shape == (counts[name] * codec.hop,)
            spoken[name].append(samples.numpy())
    assert {name: stream.frames for name, stream in streams.items()} == {"a": 31, "b": 6, "c": 34, "d": 16}
    for name, pieces in spoken.items():
        audio = np.concatenate(pieces)
        expected = codec.alone(codes[name][: streams[name].frames])
        assert np.abs(expected).max() > 0.05
        assert np.abs(audio - expected).max() < TOLERANCE


@FAMILIES
def test_a_stream_sounds_the_same_among_any_neighbours(codecs: dict[str, Codec], family: str) -> None:
    codec, codes = codecs[family], codecs[family].codes(40, 1)
    found = []
    for seed, frames in ((2, 1), (3, 16), (4, 40)):
        others, stream = [codec.decoder.open() for _ in range(3)], codec.decoder.open()
        neighbours = [codec.codes(frames, seed + other) for other in range(3)]
        parts = [codec.decode([*neighbours, part], [*others, stream])[-1] for part in (codes[:16], codes[16:])]
        found.append(np.concatenate(parts))
    for audio in found:
        assert np.abs(audio - codec.alone(codes)).max() < TOLERANCE


def test_streams_go_on_from_recordings_of_unequal_lengths(codecs: dict[str, Codec]) -> None:
    """Some shorter than what the codec looks back, some longer."""
    codec, lengths = codecs["qwen3_tts"], (1, 3, 40, 17)
    codes = [codec.codes(length + 16, length) for length in lengths]
    streams = [codec.decoder.open() for _ in lengths]
    codec.decoder.prime([each[:-16] for each in codes], streams)
    assert [stream.frames for stream in streams] == [*lengths]
    audio = codec.decode([each[-16:] for each in codes], streams)
    for samples, each in zip(audio, codes, strict=True):
        assert np.abs(samples.numpy() - codec.alone(each)[-16 * codec.hop :]).max() < TOLERANCE


@FAMILIES
def test_a_stream_keeps_as_much_among_others_as_alone(codecs: dict[str, Codec], family: str) -> None:
    codec = codecs[family]
    streams = [codec.decoder.open() for _ in range(3)]
    before = [stream.memory.untyped_storage().nbytes() for stream in streams]
    codec.decode([codec.codes(frames, frames) for frames in (2, 30, 9)], streams)
    assert [stream.memory.untyped_storage().nbytes() for stream in streams] == before
    assert before[0] == 4 * streams[0].memory.numel()


def vocoder_of(codec: Codec, family: str, max_batch: int) -> Any:
    if family == "csm":
        return CsmVocoder(codec.decoder, HandOver(2, 12), max_batch=max_batch)
    return Vocoder(codec.decoder, 24000, max_batch=max_batch)


def speak(vocoder: Any, codes: np.ndarray, frames: int, leave_at: int | None = None) -> np.ndarray:
    """Audio of codes that come so many at a time; the caller may go away at one of them."""
    state, audio = vocoder.open(REQUEST), []
    for start in range(0, len(codes), frames):
        if leave_at is not None and start >= leave_at:
            break
        chunk = {"codes": codes[start : start + frames], "speed": 1.0, "reference_codes": None}
        audio += [made["audio"] for made in vocoder.feed(state, chunk)]
    if leave_at is None:
        audio += [made["audio"] for made in vocoder.flush(state)]
    vocoder.close(state)
    return np.concatenate(audio)


@FAMILIES
def test_requests_at_once_are_those_alone_though_some_go_away(codecs: dict[str, Codec], family: str) -> None:
    codec = codecs[family]
    together, one_by_one = vocoder_of(codec, family, 6), vocoder_of(codec, family, 1)
    assert (together.concurrency, one_by_one.concurrency) == (6, 1)
    batches: list[int] = []
    make = together._decode.make
    together._decode.make = lambda pieces: batches.append(len(pieces)) or make(pieces)
    asked = [(codec.codes(25 + 3 * n, n), 1 + n % 5, 12 if n % 4 == 3 else None) for n in range(12)]
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda each: speak(together, *each), asked))
    assert 1 < max(batches) <= 6
    for audio, (codes, frames, leave_at) in zip(found, asked, strict=True):
        expected = speak(one_by_one, codes, frames, leave_at)
        assert audio.shape == expected.shape
        assert np.abs(audio - expected).max() < TOLERANCE
        whole = codec.alone(codes).clip(-1, 1)
        assert np.abs(audio - whole[: len(audio)]).max() < TOLERANCE


@FAMILIES
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_samples_that_are_not_finite_fail_their_request(codecs: dict[str, Codec], family: str, bad: float) -> None:
    codec = codecs[family]
    layers = codec.decoder._parts["decoder"] if family == "csm" else codec.decoder
    last = next(tensor for tensor in layers.parameters() if tensor.shape == (1,))  # added to every sample
    whole = last.clone()
    with torch.no_grad():
        last.fill_(bad)
        with pytest.raises(NotFinite, match="the vocoder's samples are not all finite"):
            speak(vocoder_of(codec, family, 1), codec.codes(31, 5), 31)
        last.copy_(whole)


@FAMILIES
def test_alone_audio_is_the_same_bits_however_frames_come(codecs: dict[str, Codec], family: str) -> None:
    vocoder, codes = vocoder_of(codecs[family], family, 1), codecs[family].codes(31, 5)
    first, *others = (speak(vocoder, codes, frames) for frames in (31, 1, 7))
    assert all(np.array_equal(first, audio) for audio in others)


@pytest.mark.parametrize(("family", "create"), [("qwen3_tts", create_qwen3_tts), ("csm", create_csm)])
def test_how_many_are_decoded_together_can_be_said(codecs: dict[str, Codec], family: str, create: Any) -> None:
    folder = str(codecs[family].folder)
    assert (create(folder).concurrency, create(folder, max_batch=8).concurrency) == (1, 8)
    with pytest.raises(StartupError, match="max_batch must be 1 or more, not 0"):
        create(folder, max_batch=0)
