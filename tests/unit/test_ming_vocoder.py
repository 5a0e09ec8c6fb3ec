"""Ming-Omni-TTS's vocoder: latents in pieces of any length, of many streams in one call, are the audio of the whole."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_fixtures import RunAgain

from sgl_omni.engine.checkpoint import Checkpoint
from sgl_omni.engine.task import HandOver
from sgl_omni.errors import NotFinite, StartupError
from sgl_omni.models.ming_omni_tts import vae_streams
from sgl_omni.models.ming_omni_tts.spec import MingSpec
from sgl_omni.models.ming_omni_tts.stages import FIRST_STEPS, THEN_STEPS, create_vocoder
from sgl_omni.models.ming_omni_tts.vae_decoder import VaeDecoder
from sgl_omni.models.ming_omni_tts.vae_streams import Piece, VaeStream, VaeStreams
from sgl_omni.models.ming_omni_tts.vocoder import MingVocoder
from sgl_omni.models.rehearsal import rehearsed

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny_ming import LATENT, PATCH, STEP, Tiny, build, speak

FIRST, THEN = FIRST_STEPS * PATCH, THEN_STEPS * PATCH
LATENT_SAMPLES = STEP // PATCH
WITHIN = 1e-5
"""Of full scale: sums in another order."""


@pytest.fixture(scope="module", params=["all", "a window"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Tiny:
    """What the VAE's first layer sees of a recording; the second sees a window."""
    return build(tmp_path_factory.mktemp("ming-vocoder"), windowed_layers=2 if request.param == "a window" else 1)


@pytest.fixture
def decoder(tiny: Tiny) -> VaeDecoder:
    return VaeDecoder.load(tiny.folder)


@pytest.fixture
def streams(decoder: VaeDecoder) -> VaeStreams:
    return VaeStreams(decoder, rows=1)


@pytest.fixture
def captured(decoder: VaeDecoder, monkeypatch: pytest.MonkeyPatch) -> VaeStreams:
    """All but the capture itself is as on a GPU."""
    monkeypatch.setattr(vae_streams, "StepGraphs", RunAgain)
    monkeypatch.setattr(vae_streams, "can_capture", lambda device: True)
    found = VaeStreams(decoder, rows=1)
    found.capture(6, THEN)
    return found


def latents_of(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1, (count, LATENT)).astype(np.float32)


def whole(tiny: Tiny, latents: np.ndarray) -> np.ndarray:
    return tiny.model.audio.decode(torch.from_numpy(latents)).numpy()


def alike(found: np.ndarray, expected: np.ndarray, within: float = WITHIN) -> bool:
    assert found.shape == expected.shape and np.abs(expected).max() > 0.01
    return bool(np.abs(found - expected).max() < within * np.abs(expected).max())


def chunks_of(latents: np.ndarray, size: int, speed: float = 1.0) -> list[dict[str, Any]]:
    return [{"latents": latents[at : at + size], "speed": speed} for at in range(0, len(latents), size)]


def come_and_go(streams: VaeStreams, tiny: Tiny, seed: int, longest: int, within: float = WITHIN) -> None:
    """They begin at different times, and their pieces are as long as it comes; the last may hold no latents."""
    random = np.random.default_rng(seed)
    latents = [latents_of(int(random.integers(1, 40)), 10 * seed + i) for i in range(8)]
    begins = random.integers(0, 6, len(latents))
    going: dict[int, VaeStream] = {}
    audio: list[list[np.ndarray]] = [[] for _ in latents]
    ended: set[int] = set()
    for now in range(100):
        for i in range(len(latents)):
            if begins[i] <= now and i not in ended and i not in going and len(going) < 6:
                going[i] = streams.open()
        pieces = []
        for i, stream in going.items():
            part = latents[i][stream.heard : stream.heard + int(random.integers(1, longest + 1))]
            ends = stream.heard + len(part) == len(latents[i]) and (len(part) == 0 or random.random() < 0.7)
            pieces.append(Piece(part, stream, ends))
        pieces = [piece for piece in pieces if len(piece.latents) or piece.last]
        owners = {id(stream): i for i, stream in going.items()}
        for piece, samples in zip(pieces, streams.decode(pieces) if pieces else [], strict=True):
            i = owners[id(piece.stream)]
            audio[i].append(samples)
            if piece.last:
                streams.close(going.pop(i))
                ended.add(i)
        for i, stream in [*going.items()]:
            if stream.heard == len(latents[i]):
                [rest] = streams.decode([Piece(latents[i][:0], stream, True)])
                audio[i].append(rest)
                streams.close(going.pop(i))
                ended.add(i)
    assert len(ended) == len(latents)
    for parts, said in zip(audio, latents, strict=True):
        assert alike(np.concatenate(parts), whole(tiny, said), within)


@pytest.mark.parametrize("pieces", [[30], [1] * 30, [2] * 15, [7, 1, 22, 0]])
def test_decoding_in_pieces_gives_the_audio_of_the_whole(tiny: Tiny, streams: VaeStreams, pieces: list[int]) -> None:
    latents = latents_of(30, 1)
    stream, parts = streams.open(), np.split(latents, np.cumsum(pieces)[:-1])
    found = [streams.decode([Piece(part, stream, i == len(parts) - 1)])[0] for i, part in enumerate(parts)]
    assert alike(np.concatenate(found), whole(tiny, latents))
    assert len(np.concatenate(found)) == 30 * LATENT_SAMPLES


@pytest.mark.parametrize("seed", range(4))
def test_streams_decoded_together_are_those_decoded_alone(tiny: Tiny, streams: VaeStreams, seed: int) -> None:
    come_and_go(streams, tiny, seed, longest=4)


@pytest.mark.parametrize("seed", range(4))
def test_so_are_those_of_graphs(tiny: Tiny, captured: VaeStreams, seed: int) -> None:
    """Rows are found again, places are left over, and the memory grows under the graphs. What a layer sees grows too,
    unless it is a window; then there are none."""
    before = RunAgain.replays
    come_and_go(captured, tiny, seed, longest=THEN)
    assert (RunAgain.replays > before) == (not captured.decoder.sees_all)
    assert captured._used <= 1 + 6


def test_pieces_of_many_speeches_are_one_call_whatever_their_lengths(
    streams: VaeStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = streams.decoder.decoder
    calls: list[int] = []
    decode = decoder.forward
    monkeypatch.setattr(decoder, "forward", lambda x, *more: (calls.append(len(x)), decode(x, *more))[1])
    speeches = [streams.open() for _ in range(8)]
    for _ in range(3):
        streams.decode([Piece(latents_of(1 + i % 3, i), stream, i == 7) for i, stream in enumerate(speeches)])
    assert len(calls) == 3 and all(rows % 8 == 0 for rows in calls)


@pytest.mark.parametrize("kind", ["streams", "captured"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_latents_that_are_not_finite_ruin_their_stream_and_no_other(
    tiny: Tiny, request: pytest.FixtureRequest, kind: str, bad: float
) -> None:
    """Nor the one that gets its row."""
    streams: VaeStreams = request.getfixturevalue(kind)
    latents = latents_of(20, 2)
    damaged = latents.copy()
    damaged[3:] = bad
    good, other = streams.open(), streams.open()
    audio = []
    for at in range(0, 20, THEN):
        last = at + THEN >= 20
        pieces = [Piece(each[at : at + THEN], s, last) for each, s in ((latents, good), (damaged, other))]
        found, ruined = streams.decode(pieces)
        audio.append(found)
        assert not np.isfinite(ruined).all()
    assert alike(np.concatenate(audio), whole(tiny, latents))
    for cuts in ([1, 3, 3 + THEN, 3 + 2 * THEN], [FIRST, FIRST + THEN, FIRST + 2 * THEN]):
        assert alike(in_a_ruined_row(streams, other, np.split(latents, cuts)), whole(tiny, latents))
        other = streams.open()
        streams.decode([Piece(damaged[:THEN], other, True)])


def in_a_ruined_row(streams: VaeStreams, ruined: VaeStream, parts: list[np.ndarray]) -> np.ndarray:
    streams.close(ruined)
    stream = streams.open()
    assert stream.row == ruined.row
    audio = [streams.decode([Piece(part, stream, part is parts[-1])])[0] for part in parts]
    streams.close(stream)
    return np.concatenate(audio)


def test_audio_that_is_not_finite_fails_its_request(tiny: Tiny) -> None:
    latents = latents_of(20, 2)
    latents[7] = np.nan
    with pytest.raises(NotFinite, match="the vocoder's samples are not all finite"):
        speak(create_vocoder(str(tiny.folder)), chunks_of(latents, 3))


def test_alone_audio_is_the_same_bits_however_latents_come(tiny: Tiny) -> None:
    vocoder, latents = create_vocoder(str(tiny.folder)), latents_of(31, 5)
    first, *others = (speak(vocoder, chunks_of(latents, size)) for size in (31, 1, 7, PATCH))
    assert alike(first, whole(tiny, latents).clip(-1, 1))
    assert all(np.array_equal(first, audio) for audio in others)
    long = vocoder.open(None)  # another stream, that lasts, changes nothing
    for _ in range(30):
        list(vocoder.feed(long, {"latents": latents, "speed": 1.0}))
    assert np.array_equal(first, speak(vocoder, chunks_of(latents, 4)))


def test_the_first_sound_comes_of_the_first_step(tiny: Tiny) -> None:
    """All of its latents but the last, which waits for the one after it, and half of what its frames overlap."""
    vocoder = create_vocoder(str(tiny.folder))
    state = vocoder.open(None)  # type: ignore[arg-type]
    latents = latents_of(FIRST + THEN, 5)
    (first,) = vocoder.feed(state, {"latents": latents[:FIRST], "speed": 1.0})
    assert len(first["audio"]) == 0.5 * FIRST * LATENT_SAMPLES - 8 * 1.5
    assert [*vocoder.feed(state, {"latents": latents[FIRST:-1], "speed": 1.0})] == []
    (then,) = vocoder.feed(state, {"latents": latents[-1:], "speed": 1.0})
    assert len(then["audio"]) == THEN * LATENT_SAMPLES
    vocoder.close(state)


def test_requests_at_once_are_those_alone_though_some_go_away(tiny: Tiny) -> None:
    together = create_vocoder(str(tiny.folder), max_batch=6)
    sizes: list[int] = []
    make = together._decode.make
    together._decode.make = lambda pieces: sizes.append(len(pieces)) or make(pieces)
    asked = [(latents_of(20 + 3 * n, n), 1 + n % 5, 10 if n % 4 == 3 else None) for n in range(12)]

    def ask(latents: np.ndarray, size: int, leave_at: int | None) -> np.ndarray | None:
        if leave_at is None:
            return speak(together, chunks_of(latents, size))
        state = together.open(None)
        for chunk in chunks_of(latents[:leave_at], size):
            list(together.feed(state, chunk))
        together.close(state)
        return None

    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda each: ask(*each), asked))
    assert 1 < max(sizes) <= 6
    for audio, (latents, _, leave_at) in zip(found, asked, strict=True):
        assert (audio is None) == (leave_at is not None)
        if audio is not None:
            assert alike(audio, whole(tiny, latents).clip(-1, 1))
    assert together._decode._callers == 0
    assert sorted(together._streams._free) == [*range(1, together._streams._used)]


def test_speed_changes_the_length_alone(tiny: Tiny) -> None:
    vocoder, latents = create_vocoder(str(tiny.folder)), latents_of(20, 3)
    assert len(speak(vocoder, chunks_of(latents, 3, speed=2.0))) == 10 * LATENT_SAMPLES
    assert len(speak(vocoder, chunks_of(latents, 3, speed=0.5))) == 40 * LATENT_SAMPLES


def test_a_rehearsal_leaves_no_stream(decoder: VaeDecoder) -> None:
    vocoder = MingVocoder(VaeStreams(decoder), HandOver(FIRST, THEN), max_batch=4)
    assert rehearsed(vocoder, LATENT, "latents") is vocoder and vocoder.rehearsal is not None
    vocoder.rehearsal()
    assert (vocoder._decode._callers, vocoder._streams._free) == (0, [1])


def test_a_request_without_latents_has_no_audio(tiny: Tiny) -> None:
    assert len(speak(create_vocoder(str(tiny.folder)), [])) == 0


def test_how_many_are_decoded_together_can_be_said(tiny: Tiny) -> None:
    folder = str(tiny.folder)
    assert (create_vocoder(folder).concurrency, create_vocoder(folder, max_batch=8).concurrency) == (1, 8)
    with pytest.raises(StartupError, match="max_batch must be 1 or more, not 0"):
        create_vocoder(folder, max_batch=0)


def test_a_latent_may_be_a_single_frame(tiny: Tiny) -> None:
    """Nothing is drawn out then; the plain model would say the same of frames that were drawn out before."""
    spec = MingSpec.parse(Checkpoint(tiny.folder).config()).vae
    decoder = VaeDecoder.load(tiny.folder)
    object.__setattr__(decoder.spec, "patch", 1)
    one, many = VaeStreams(decoder), VaeStreams(decoder)
    assert spec.patch > 1
    latents = latents_of(9, 4)
    [all_at_once] = one.decode([Piece(latents, one.open(), True)])
    assert len(all_at_once) == 9 * spec.output_hop
    ruined = many.open()
    many.decode([Piece(np.full_like(latents, np.nan), ruined, True)])
    assert alike(in_a_ruined_row(many, ruined, np.split(latents, range(1, 9))), all_at_once)
    ruined = many.open()
    many.decode([Piece(np.full_like(latents, np.nan), ruined, True)])
    assert alike(in_a_ruined_row(many, ruined, [latents[:4], latents[4:]]), all_at_once)
